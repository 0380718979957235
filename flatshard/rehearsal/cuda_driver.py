"""The calls of the CUDA driver that a collective makes.

With ctypes and raw handles, an event takes about a microsecond of host time, a third of torch's event and stream
objects. With several calls per collective, torch's would disturb what a rehearsal measures.
"""

from __future__ import annotations

import ctypes
from typing import Any

from flatshard.rehearsal.torch_private import cuda

_NO_TIMING = 2
_NOT_READY = 600


class CudaDriver:
    """Handles are integers.  Every call raises RuntimeError if the driver reports an error."""

    def __init__(self) -> None:
        # A launch can block on a full queue, so it releases the GIL; the other calls return at once and keep it.
        blocking, quick = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        self._launch = _typed(blocking.cuLaunchKernel, pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer)
        self._synchronize = _typed(blocking.cuEventSynchronize, pointer)
        self._create = _typed(quick.cuEventCreate, pointer, ctypes.c_uint)
        self._record = _typed(quick.cuEventRecord, pointer, pointer)
        self._query = _typed(quick.cuEventQuery, pointer)
        self._wait = _typed(quick.cuStreamWaitEvent, pointer, pointer, ctypes.c_uint)

    def create_event(self) -> int:
        handle = ctypes.c_void_p()
        _check(self._create(ctypes.byref(handle), _NO_TIMING))
        return int(handle.value or 0)

    def record(self, event: int, stream: int) -> None:
        if self._record(event, stream):
            _make_context()
            _check(self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        if self._wait(stream, event, 0):
            _make_context()
            _check(self._wait(stream, event, 0))

    def is_done(self, event: int) -> bool:
        error = self._query(event)
        if error == _NOT_READY:
            return False
        _check(error)
        return True

    def synchronize(self, event: int) -> None:
        _check(self._synchronize(event))

    def launch(self, function: Any, blocks: int, threads: int, stream: int, pointers: Any) -> None:
        """Launch a kernel.  ``pointers``: a ctypes array of the addresses of the arguments, which are copied."""
        _check(self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None))


def _make_context() -> None:
    """Create a CUDA context for this thread, which has none if it has not used CUDA yet."""
    cuda.set_device(cuda.current_device())


def _typed(function: Any, *types: Any) -> Any:
    function.argtypes = types
    return function


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver reported error {error} in a rehearsed collective")
