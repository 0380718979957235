"""Names of torch that are private or differ between versions (checked on 2.11 and 2.13)."""

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

# The base class of what a collective returns. C++ calls only `wait` and `get_future` of a Python subclass.
Work: Any = _distributed_c10d.Work
ProcessGroup: Any = dist.ProcessGroup
HashStore: Any = _distributed_c10d.HashStore
cuda: Any = torch.cuda  # its events and streams have no type annotations
# Functions for the index of the current device and its current stream; None in a build without CUDA.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # the current stream, into a graph

# 2.13 renamed these methods, and C++ looks for the new name first. The backend has both.
NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def register_backend(name: str, create: Callable[[Any, Any], dist.ProcessGroup]) -> None:
    """Register ``name`` as a backend of ``init_process_group`` for CPU and CUDA.  A second call has no effect."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def premul_factor(op: Any) -> float:
    """The factor of a PREMUL_SUM reduction."""
    return float(op.__getstate__()[1])


@contextmanager
def replaced_group_constructors(init: Callable[..., None], new_group: Callable[..., Any]) -> Iterator[None]:
    """Within the context, torch calls ``init`` and ``new_group``; their first argument is the original function."""
    ours: dict[str, Any] = {
        "init_process_group": functools.partial(init, c10d.init_process_group),
        "new_group": functools.partial(new_group, c10d.new_group),
    }
    with ExitStack() as stack:
        for module in (c10d, dist, device_mesh):  # the last two import the names from the first
            stack.enter_context(patch.multiple(module, **ours))
        yield


def compile_kernel(source: str, name: str) -> ctypes.c_void_p:
    """Compile CUDA source for the current device, without an installed toolkit; returns the driver's function handle.

    The module stays loaded until the process ends.
    """
    kernel = torch.cuda._compile_kernel(source, name)
    return kernel.func  # type: ignore[no-any-return]
