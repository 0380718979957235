"""A thread that waits for sockets, for work from other threads, for SIGUSR1, and for one second to pass."""

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
    """The thread of one process. Keys of its ``selector`` carry a function without arguments, which it calls.

    ``tick(seconds)`` is called once per `TICK`, with the time since the last call. ``pause()`` returns the longest time
    to sleep, in seconds. ``dump()`` is called on SIGUSR1, also while the main thread is in a C++ call, where Python
    runs no signal handlers; if other code handles the signal, it is not changed.
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
            else:  # an event loop of other code: a dump then waits until Python runs
                signal.set_wakeup_fd(before)
                signal.signal(signal.SIGUSR1, lambda *_: self._dump())
        self._thread.start()

    def do(self, action: Callable[[], None], wait: float = 0.0) -> None:
        """Run a function on the thread, and wait for it for at most this many seconds."""
        if threading.current_thread() is self._thread:
            action()
            return
        done = threading.Event()
        self._todo += (action, done.set)
        self._wake_up()
        if wait:
            done.wait(wait)

    def stop(self) -> None:
        """Wait until the thread has ended: if it returned from C++ after the interpreter's end, it would abort."""
        self._stops = True
        self._wake_up()
        self._thread.join(CALL_LIMIT + TICK)

    def _wake_up(self) -> None:
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
    """A signal handler that does nothing: the signal has already woken the loop."""


def _is_free(number: int) -> bool:
    """Whether a signal has no handler: no Python function, and none in C, such as that of `faulthandler`."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    action = ctypes.create_string_buffer(256)  # a struct sigaction begins with its handler, and is smaller than this
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None)
    if sigaction is None or sigaction(int(number), None, action) != 0:
        return False
    return not any(action.raw[: ctypes.sizeof(ctypes.c_void_p)])
