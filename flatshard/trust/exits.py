"""The end of a process: functions to call, its last messages, and an exit that does not wait."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any, NoReturn

from flatshard.trust.record import record

# Seconds for which a process that ends with an error keeps NCCL's threads, which have to send, and to log.
_LINGER = 1.0
_OURS = re.compile(rb"N3c10\d+Dist\w*ErrorE")  # c10::DistBackendError and others, as C++ names them in binaries
_Handler = ctypes.CFUNCTYPE(None)


def at_exit(action: Callable[[], None]) -> None:
    """Call a function once, at the very end of this process in Python; not in processes forked from it."""
    pid, todo = os.getpid(), [action]

    def once() -> None:
        if todo and pid == os.getpid():
            todo.pop()()

    atexit.register(once)
    util.Finalize(None, once, exitpriority=1)  # processes of multiprocessing end without atexit


def on_uncaught(action: Callable[[BaseException], None]) -> None:
    """Call a function with an uncaught exception, before the current ``sys.excepthook``."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        action(error)
        before(kind, error, trace)

    sys.excepthook = hook


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


def error_in_flight() -> Exception | None:
    """The error that ends this process, at its exit: multiprocessing catches it, so it is the current exception."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    return error if isinstance(error, Exception) else None


def print_record() -> None:
    """Write the flight record to its file, and its last entries to stderr."""
    if record.number:
        print(record.dump(), file=sys.stderr, flush=True)


def dump() -> None:
    """The flight record, and the stacks of all threads."""
    print_record()
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    sys.stderr.flush()


def end_stuck(reason: str | None) -> NoReturn:
    """End this process from another thread: the main thread has not reached a place where it could raise."""
    rank = record.header["rank"]
    entry, frame = record.oldest_pending(), sys._current_frames().get(threading.main_thread().ident or 0)
    waited = f"Rank {rank} was waiting for {'no collective' if entry is None else entry}"
    record.tell(error=f"PeerError: {reason}. {waited}")
    print_record()
    if frame is not None:
        print("flatshard: the main thread, the innermost call last:", file=sys.stderr)
        print("".join(traceback.format_stack(frame)[-4:]), end="", file=sys.stderr)
    where = f"; `flatshard blame {record.folder}` compares the ranks' records" if record.folder else ""
    print(f"flatshard: rank {rank} ends: {reason}. {waited}{where}.", file=sys.stderr)
    leave(1)


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
