"""What rehearsal needs of torch that is private or differs between versions (checked on 2.11 and 2.13)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d

# The base of what a collective returns; a Python subclass is seen by C++ through `wait` and `get_future` only.
Work: Any = _distributed_c10d.Work
ProcessGroup: Any = dist.ProcessGroup
HashStore: Any = _distributed_c10d.HashStore
cuda: Any = torch.cuda  # its events and streams carry no annotations
# The index of the current device, and the handle of a device's current stream; a build without CUDA has neither.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# 2.13 renamed these methods and the C++ core looks for the new name first; a backend answers to both.
NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def register_backend(name: str, create: Callable[[Any, Any], dist.ProcessGroup]) -> None:
    """Make ``name`` a backend of ``init_process_group`` for CPU and CUDA tensors; a second call changes nothing."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def premul_factor(op: Any) -> float:
    """The factor of a PREMUL_SUM reduction."""
    return float(op.__getstate__()[1])


@contextmanager
def replaced_group_constructors(init: Callable[..., None], new_group: Callable[..., Any]) -> Iterator[None]:
    """Within, torch makes process groups through ``init`` and ``new_group``, which get the real function first."""
    ours: dict[str, Any] = {
        "init_process_group": functools.partial(init, c10d.init_process_group),
        "new_group": functools.partial(new_group, c10d.new_group),
    }
    with ExitStack() as stack:
        for module in (c10d, dist, device_mesh):  # the latter two bind the names at import
            stack.enter_context(patch.multiple(module, **ours))
        yield


def compile_kernel(source: str, name: str) -> ctypes.c_void_p:
    """Compile CUDA source for the current device without a toolkit installed; returns the driver's function handle.

    The module stays loaded for the life of the process.
    """
    kernel = torch.cuda._compile_kernel(source, name)
    return kernel.func  # type: ignore[no-any-return]
