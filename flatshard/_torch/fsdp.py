"""What torch's FSDP2, and those who look for it, find on modules: may touch `torch.distributed.fsdp` and registries."""

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

# Where torch exports the names of its FSDP2, and by which modules it implements it.
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


def mark_sharded(module: nn.Module) -> None:
    """Let torch's `replicate` see that `fully_shard` was called on a module: it leaves the parameters alone."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's `replicate` was called on a module."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


def mark_managed(module: nn.Module) -> None:
    """Say, as torch's `fully_shard` does, that a unit holds the parameters of a module.

    By this, transformers knows that ranks must generate equally many tokens; compilers treat the parameters with care.
    """
    managed: Any = module
    managed._is_fsdp_managed_module = managed._fsdp_use_orig_params = True


def let_torch_find(state: Any, module: nn.Module) -> None:
    """Make ``state`` what torch's own `fully_shard.state(module)`, and those who look for units, find."""
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, {})
    states[inspect.unwrap(fully_shard)] = state
    _module_state_mapping.setdefault(module, weakref.ref(state))


def mesh_info(mesh: DeviceMesh, sharded: bool) -> common.DataParallelMeshInfo:
    """What FSDP2 says of a mesh (shard) or (replicate, shard); ``sharded``: off where all axes keep copies."""
    if mesh.ndim == 2:
        return common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    if sharded:
        return common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return common.DDPMeshInfo(mesh, replicate_mesh_dim=0)


def shipped_comms(kind: str, group: ProcessGroup) -> tuple[Any, Any] | None:
    """The ``AllGather`` and the ``ReduceScatter`` of a kind that torch ships; None where it does not.

    "ProcessGroupAlloc": with buffers from the process group's allocator, where it has one. "SymmMem": with buffers in
    symmetric memory, a collective call.
    """
    gather, reduce = (getattr(_fsdp_collectives, f"{kind}{part}", None) for part in ("AllGather", "ReduceScatter"))
    return None if gather is None or reduce is None else (gather(group), reduce(group))


def is_shipped_comm(comm: Any) -> bool:
    """Whether torch ships the implementation of this object."""
    return type(comm).__module__ == _fsdp_collectives.__name__
