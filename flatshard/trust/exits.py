"""The end of a process: functions to call, its last messages, and an exit that does not wait."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import util
from types import FrameType, TracebackType
from typing import Any, NoReturn

from flatshard.trust.record import record

# Seconds for which a process that ends with an error keeps NCCL's threads, which have to send, and to log.
_LINGER = 1.0
_LAST_WORDS = 3.0  # seconds for messages of the watch thread: stderr may be a pipe that nobody reads
# c10::DistBackendError and others, and Gloo's of data that it did not expect, as C++ names them in binaries
_OURS = re.compile(rb"N3c10\d+Dist\w*ErrorE|N4gloo13EnforceNotMetE")
_Handler = ctypes.CFUNCTYPE(None)


def at_exit(action: Callable[[], None]) -> None:
    """Call a function once, at the very end of this process in Python; not in processes forked from it."""
    pid, todo = os.getpid(), [action]

    def once() -> None:
        if todo and pid == os.getpid():
            todo.pop()()

    atexit.register(once)
    util.Finalize(None, once, exitpriority=1)  # processes of multiprocessing end without atexit


_hook: Callable[..., None] | None = None  # of `on_uncaught`


def on_uncaught(action: Callable[[BaseException], None]) -> None:
    """Call a function with an uncaught exception, before the current ``sys.excepthook``."""
    global _hook
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            action(error)
        finally:
            before(kind, error, trace)

    sys.excepthook = _hook = hook


class TerminateHandler:
    """Calls a function when a C++ exception is about to end the process, on the thread that threw it.

    A thread of ProcessGroupNCCL throws if a peer is gone or a collective has timed out. C++ then aborts the process
    before any Python code runs: here is the last place where a message can be printed. The function's argument says
    whether the exception is one of torch.distributed. If NCCL fails twice at once, this cannot be determined. If the
    function returns, the process ends as it would without this handler.
    """

    def __init__(self, call: Callable[[bool], None]) -> None:
        self._call = call
        self._set_terminate: Any = None  # std::set_terminate
        self._exception_type: Any = None  # abi::__cxa_current_exception_type
        self._before: int | None = None
        self._handler = _Handler(self._terminate)  # C++ keeps no reference

    def install(self) -> None:
        """Does nothing if the C++ standard library is not that of torch's Linux builds."""
        try:
            library = ctypes.CDLL("libstdc++.so.6")
            self._set_terminate = library["_ZSt13set_terminatePFvvE"]
            self._exception_type = library["__cxa_current_exception_type"]
        except (OSError, AttributeError):
            return
        self._set_terminate.restype, self._set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._exception_type.restype = ctypes.c_void_p
        self._before = self._set_terminate(ctypes.cast(self._handler, ctypes.c_void_p))

    def remove(self) -> None:
        """The interpreter is about to end, and could not be called after that."""
        if self._before is not None:
            self._set_terminate(self._before)
            self._before = None

    def _terminate(self) -> None:
        self._call(_OURS.fullmatch(self._name_of_exception()) is not None)
        if self._before is not None:
            _Handler(self._before)()

    def _name_of_exception(self) -> bytes:
        """The mangled name of its class. A std::type_info is a table of methods and the name."""
        kind = self._exception_type()
        if not kind:
            return b""
        name = ctypes.cast(kind + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))[0]
        return name or b""


def ending_error() -> Exception | None:
    """The error that ends this process, at its exit, if `on_uncaught` has not seen it.

    multiprocessing catches it, so it is the current exception. Python keeps what it gave to a ``sys.excepthook`` that
    was set later and does not call the one before it. Consoles and pytest keep what they catch as well; but only what
    nobody catches passes the outermost frame.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    if error is None and sys.excepthook is not _hook:
        error = getattr(sys, "last_value", None)
        trace = None if error is None else error.__traceback__
        error = error if trace is not None and trace.tb_frame.f_back is None else None
    return error if isinstance(error, Exception) else None


def dump() -> None:
    """Print the flight record, and the stacks of all threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [record.dump()] if record.number else []
    for ident, frame in sys._current_frames().items():
        lines += [f"flatshard: thread {names.get(ident, ident)}, the innermost call last:", _stack(frame)]
    _print_briefly(lines)


def end_stuck(reason: str | None) -> NoReturn:
    """End this process from another thread: the main thread has not reached a place where it could raise."""
    try:
        rank = record.header["rank"]
        entry, frame = record.oldest_pending(), sys._current_frames().get(threading.main_thread().ident or 0)
        waited = f"Rank {rank} was waiting for {'no collective' if entry is None else entry}"
        record.tell(error=f"PeerError: {reason}. {waited}")
        lines = [record.dump()] if record.number else []
        if frame is not None:
            lines += ["flatshard: the main thread, the innermost call last:", _stack(frame, -4)]
        where = f"; `flatshard blame {record.folder}` compares the ranks' records" if record.folder else ""
        _print_briefly([*lines, f"flatshard: rank {rank} ends: {reason}. {waited}{where}."])
    finally:
        os._exit(1)


def _stack(frame: FrameType, first: int = 0) -> str:
    return "".join(traceback.format_stack(frame)[first:]).rstrip()


def _print_briefly(lines: Sequence[str]) -> None:
    """Print on another thread: if stderr is closed, or is full and not read, this one neither fails nor waits long."""

    def say() -> None:
        print(*lines, sep="\n", file=sys.stderr)
        _flush()

    words = threading.Thread(target=say, daemon=True)
    words.start()
    words.join(_LAST_WORDS)


def say_last(explanation: str) -> None:
    """Print why this process ends, after what torch prints: ``explanation``, or on a GPU the error."""
    if record.is_on_device:
        logging.shutdown()
        time.sleep(_LINGER)
    if explanation or record.is_on_device:
        print(f"flatshard: rank {record.header['rank']} ends: {explanation or record.header['error']}", file=sys.stderr)


def end_failed() -> NoReturn:
    """End this process at its exit, after an error: its process groups would wait until their timeout first."""
    logging.shutdown()
    error = sys.exc_info()[1]
    if isinstance(error, Exception):  # multiprocessing would print it after this
        _print_briefly(["".join(traceback.format_exception(error)).rstrip()])
    leave(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def remove_record() -> None:
    """At the exit of a process without an error: remove its flight record."""
    folder = record.folder
    record.forget()
    if folder is not None and "FLATSHARD_RECORD" not in os.environ:
        with contextlib.suppress(OSError):  # other ranks have records there, or have just removed it
            folder.rmdir()


def leave(status: int) -> NoReturn:
    """End the process now: a normal exit would wait for process groups whose collectives will not end."""
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or an object of the user's
            stream.flush()
