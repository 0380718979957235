"""A thread that waits for sockets, for work that other threads give it, for SIGUSR1, and for a second to pass."""

from __future__ import annotations

import contextlib
import ctypes
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

TICK = 1.0  # seconds between two looks at what there is to watch
CALL_LIMIT = 10.0  # seconds for one call of the thread to the store


class Loop:
    """The thread of one process. Keys of its ``selector`` carry a function of no arguments, which it calls.

    ``tick(seconds)`` is called once in `TICK`, with how long ago that was the last time. ``pause()`` says how many
    seconds it may sleep at most. ``dump()`` is called on SIGUSR1, also while the main thread sits in a call of C++,
    where no handler of Python's would run; if the signal is somebody else's, it is left alone.
    """

    def __init__(self, tick: Callable[[float], None], pause: Callable[[], float], dump: Callable[[], None]) -> None:
        self.selector = selectors.DefaultSelector()
        self._tick, self._pause, self._dump = tick, pause, dump
        self._todo: deque[Callable[[], None]] = deque()
        inside, self._wake = socket.socketpair()
        inside.setblocking(False)
        self._wake.setblocking(False)
        self._stops = False
        self.selector.register(inside, selectors.EVENT_READ, lambda: self._woken(inside.recv(4096)))
        self._thread = threading.Thread(target=self._run, name="flatshard-watch", daemon=True)

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread() and _is_free(signal.SIGUSR1):
            before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            if before == -1:
                signal.signal(signal.SIGUSR1, _leave_to_loop)
            else:  # somebody's event loop: then a dump waits until Python runs
                signal.set_wakeup_fd(before)
                signal.signal(signal.SIGUSR1, lambda *_: self._dump())
        self._thread.start()

    def do(self, action: Callable[[], None], wait: float = 0.0) -> None:
        """Let the thread do it; wait for so many seconds at most until it has."""
        if threading.current_thread() is self._thread:
            action()
            return
        done = threading.Event()
        self._todo += (action, done.set)
        self._knock()
        if wait:
            done.wait(wait)

    def stop(self) -> None:
        """Wait until the thread has ended: if it came back from C++ to an interpreter that is gone, it would abort."""
        self._stops = True
        self._knock()
        self._thread.join(CALL_LIMIT + TICK)

    def _knock(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough
            self._wake.send(b"\0")

    def _woken(self, by: bytes) -> None:
        while self._todo:
            self._todo.popleft()()
        if bytes([signal.SIGUSR1]) in by and signal.getsignal(signal.SIGUSR1) is _leave_to_loop:
            self._dump()

    def _run(self) -> None:
        then = time.monotonic()
        while not self._stops:
            for key, _ in self.selector.select(self._pause()):
                key.data()
            now = time.monotonic()
            if now - then >= TICK:
                self._tick(now - then)
                then = now


def _leave_to_loop(number: int, frame: object) -> None:
    """In the place of a handler: the loop has been woken already."""


def _is_free(number: int) -> bool:
    """Whether nobody handles a signal: no function of Python's, and none of C's, as `faulthandler` has."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    action = ctypes.create_string_buffer(256)  # a struct sigaction begins with its handler, and is smaller than this
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None)
    if sigaction is None or sigaction(int(number), None, action) != 0:
        return False
    return not any(action.raw[: ctypes.sizeof(ctypes.c_void_p)])
