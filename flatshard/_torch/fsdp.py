"""State on modules that FSDP2, and code that detects FSDP2, expect: uses `torch.distributed.fsdp` and registries."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState

# The modules that export the names of FSDP2, and those that implement it.
FSDP_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
FSDP_INTERNALS = ("torch.distributed.fsdp.", "torch.distributed._composable.")
FSDP_BODY = "torch.distributed.fsdp._fully_shard._fully_shard"  # its own functions look up its classes there
FSDP_NAMES: dict[str, Any] = {
    name: getattr(torch.distributed.fsdp._fully_shard, name) for name in torch.distributed.fsdp._fully_shard.__all__
}

# Since torch 2.15, FSDP2 reduces in the dtype of gradients unless `reduce_dtype` is given; before, in `param_dtype`.
REDUCES_IN_GRAD_DTYPE = "GradientReductionHandle" in FSDP_NAMES


def mark_sharded(module: nn.Module) -> None:
    """Mark a module for torch's `replicate`, which then ignores its parameters."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's `replicate` was called on a module."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


def mark_managed(module: nn.Module) -> None:
    """Mark a module as torch's `fully_shard` does.

    Transformers then generates the same number of tokens on all ranks, and compilers guard the parameters.
    """
    managed: Any = module
    managed._is_fsdp_managed_module = managed._fsdp_use_orig_params = True


def let_torch_find(state: Any, module: nn.Module) -> None:
    """Register ``state`` for torch's own `fully_shard.state(module)` and for code that searches for units."""
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, {})
    states[inspect.unwrap(fully_shard)] = state
    _module_state_mapping.setdefault(module, weakref.ref(state))


def mesh_info(mesh: DeviceMesh, sharded: bool) -> common.DataParallelMeshInfo:
    """FSDP2's description of a mesh (shard) or (replicate, shard); ``sharded=False``: all axes replicate."""
    if mesh.ndim == 2:
        return common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    if sharded:
        return common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return common.DDPMeshInfo(mesh, replicate_mesh_dim=0)


def shipped_comms(kind: str, group: ProcessGroup) -> tuple[Any, Any] | None:
    """torch's ``AllGather`` and ``ReduceScatter`` of a kind; None if this version has none.

    "ProcessGroupAlloc": with buffers from the process group's allocator, if it has one. "SymmMem": with buffers in
    symmetric memory; a collective call.
    """
    gather, reduce = (getattr(_fsdp_collectives, f"{kind}{part}", None) for part in ("AllGather", "ReduceScatter"))
    return None if gather is None or reduce is None else (gather(group), reduce(group))


def is_shipped_comm(comm: Any) -> bool:
    """Whether the class of this object is torch's."""
    return type(comm).__module__ == _fsdp_collectives.__name__
