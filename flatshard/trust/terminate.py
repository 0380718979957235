"""A handler for uncaught C++ exceptions of torch.distributed, called instead of an abort.

A thread of ProcessGroupNCCL throws if a peer is gone or a collective has timed out. C++ then aborts the process before
any Python code runs. The terminate handler is the last place where a message can be printed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

_OURS = re.compile(rb"N3c10\d+Dist\w*ErrorE")  # c10::DistBackendError and others, as C++ names them in binaries
_Handler = ctypes.CFUNCTYPE(None)


class TerminateHandler:
    """Calls a function when a C++ exception is about to end the process, on the thread that threw it.

    Its argument says whether the exception is one of torch.distributed. If NCCL fails twice at once, this cannot be
    determined. If the function returns, the process ends as it would without this handler.
    """

    def __init__(self, call: Callable[[bool], None]) -> None:
        self._call = call
        self._exchange: Any = None  # std::set_terminate
        self._kind: Any = None  # abi::__cxa_current_exception_type
        self._before: int | None = None
        self._handler = _Handler(self._terminate)  # C++ keeps no reference

    def install(self) -> None:
        """Does nothing if the C++ standard library is not that of torch's Linux builds."""
        try:
            library = ctypes.CDLL("libstdc++.so.6")
            self._exchange = library["_ZSt13set_terminatePFvvE"]
            self._kind = library["__cxa_current_exception_type"]
        except (OSError, AttributeError):
            return
        self._exchange.restype, self._exchange.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._kind.restype = ctypes.c_void_p
        self._before = self._exchange(ctypes.cast(self._handler, ctypes.c_void_p))

    def remove(self) -> None:
        """The interpreter is about to end, and could not be called after that."""
        if self._before is not None:
            self._exchange(self._before)
            self._before = None

    def _terminate(self) -> None:
        self._call(_OURS.fullmatch(self._name_of_exception()) is not None)
        if self._before is not None:
            _Handler(self._before)()

    def _name_of_exception(self) -> bytes:
        """The mangled name of its class. A std::type_info is a table of methods and the name."""
        kind = self._kind()
        if not kind:
            return b""
        name = ctypes.cast(kind + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))[0]
        return name or b""
