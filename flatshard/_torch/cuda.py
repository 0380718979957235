"""Streams, events, memory pools and captures of CUDA: uses `torch._C._cuda_*` and torch's symmetric memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flatshard._torch.groups import backend_of, exists

# The base class of torch.cuda.Event, whose Python layer doubles the cost. It is missing in builds without CUDA.
Event: Any = getattr(torch._C, "_CudaEventBase", None)

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(index: int) -> torch.cuda.Stream:
    """The current stream of a CUDA device. torch's own accessor takes ten times as long."""
    found: tuple[int, int, int] = torch._C._cuda_getCurrentStream(index)
    stream = _streams.get(found)
    if stream is None:
        number, device, kind = found
        stream = _streams[found] = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
    return stream


def set_stream(stream: torch.cuda.Stream) -> None:
    """Make a stream of the current device the current one."""
    torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)


class AllocatingFrom:
    """A context, which can be entered repeatedly, in which this thread allocates CUDA memory from a memory pool."""

    def __init__(self, pool: torch.cuda.MemPool, index: int, owner: object) -> None:
        self._where = index, pool.id
        self._owner = owner  # keeps the pool

    def __enter__(self) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._where)

    def __exit__(self, *error: object) -> None:
        end_allocating(*self._where)


class _Registered:
    """A memory pool whose allocations NCCL registers with the communicators of some process groups.

    It is freed with this object, unless a group has been destroyed by then: torch ends the process if registered memory
    is freed after its communicator. In that case it stays until the process ends.
    """

    def __init__(self, groups: Sequence[ProcessGroup], device: torch.device) -> None:
        self._backends = [backend_of(group, device) for group in groups]
        self._groups = groups
        first = self._backends[0]
        # NCCL supports most features for memory from its own allocator, but can also register other memory.
        self.pool = torch.cuda.MemPool(first.mem_allocator if first.supports_tensor_alloc(device) else None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pool))
        for backend in self._backends:
            backend.register_mem_pool(self.pool)

    def __del__(self) -> None:
        if sys.is_finalizing() or not all(map(exists, self._groups)):
            return
        for backend in self._backends:
            backend.deregister_mem_pool(self.pool)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.pool))


def memory(device: torch.device, groups: Sequence[ProcessGroup] = ()) -> AllocatingFrom:
    """A separate memory pool; with ``groups``, registered with their communicators, which must exist."""
    owner = _Registered(groups, device) if groups else torch.cuda.MemPool()
    return AllocatingFrom(owner.pool if isinstance(owner, _Registered) else owner, device.index, owner)


def clear_workspaces() -> None:
    """Free the workspaces of matrix products: a small block keeps the whole cached segment that contains it."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocating(index: int, pool: Any) -> None:
    """Tell the allocator that nothing more is allocated from a memory pool, or captured into it.

    torch does not do this if the end of a capture raises, and ends the process when it frees memory later.
    """
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)


def allow_events_amid_captures() -> None:
    """Allow this thread to query CUDA events while another thread captures a graph in a mode that forbids it."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    with suppress(OSError):  # not a GPU of NVIDIA's
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def assert_on_device(condition: torch.Tensor) -> None:
    """Raise a device-side assertion if a condition is false, without waiting for the device, also in a graph."""
    torch._assert_async(condition)


def symmetric_memory(numbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that other ranks of the node can access. It is freed with its tensor.

    Waits for the device, which not every version of torch does: the words by which ranks signal each other are cleared
    on the default stream, and `rendezvous` writes their addresses there. A signal before that is lost, and another
    stream, if it is not ordered after the default stream, reads invalid addresses.
    """
    import torch.distributed._symmetric_memory as symmetric

    made = symmetric.empty(numbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return made


def rendezvous(tensor: torch.Tensor, group: ProcessGroup) -> Any:
    """Exchange the symmetric memory of the ranks of a group: ``get_buffer`` of the result accesses it."""
    import torch.distributed._symmetric_memory as symmetric

    seen = symmetric.rendezvous(tensor, group=group.group_name)
    torch.cuda.synchronize(tensor.device)  # see `symmetric_memory`
    return seen


def is_symmetric(tensor: torch.Tensor) -> bool:
    """Whether other ranks can access the memory of a tensor; False if this torch cannot tell (before 2.12)."""
    import torch.distributed._symmetric_memory as symmetric

    asked = getattr(symmetric, "is_symm_mem_tensor", None)
    return tensor.is_cuda and asked is not None and bool(asked(tensor))
