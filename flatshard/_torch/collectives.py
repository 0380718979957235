"""The collectives of a process group: uses methods of `ProcessGroup` and the classes of their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup, ReduceOp, Work


def _method(name: str, on_2_11: str) -> Callable[..., Work]:
    method: Callable[..., Work] = getattr(ProcessGroup, name, None) or getattr(ProcessGroup, on_2_11)
    return method


# The coalesced forms take lists of tensors and launch once. The wrappers of torch.distributed around them cost several
# times the call in host time (argument checks, logging), so they are called on the process group itself.
all_gather_coalesced = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
reduce_scatter_coalesced = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
all_gather_one = _method("all_gather_single", "_allgather_base")
reduce_scatter_one = _method("reduce_scatter_single", "_reduce_scatter_base")
all_to_all_one = _method("all_to_all_single", "alltoall_base")


def _options(kind: type[Any], op: str | None = None) -> Any:
    """Options of a collective that, on NCCL, runs on the current stream (asyncOp off) instead of one of NCCL's own."""
    options = kind()
    options.asyncOp = False
    if op is not None:
        options.reduceOp = getattr(ReduceOp, op.upper())
    return options


ALL_GATHER = _options(AllgatherOptions)
ALL_TO_ALL = _options(AllToAllOptions)
REDUCE_SCATTER = {op: _options(ReduceScatterOptions, op) for op in ("sum", "avg", "max")}
ALL_REDUCE = {op: _options(AllreduceOptions, op) for op in ("sum", "avg", "max")}
