"""`FSDPDistributedIndex`: which axes of which meshes data parallelism has."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard import _torch
from flatshard.api import default_device_type
from flatshard.buffer import Lane
from flatshard.engine.tree.summary import check_buffers, summary
from flatshard.module import FSDPModule
from flatshard.optim.clip import grad_norms, weight_norms

_log = logging.getLogger("flatshard")


def default_mesh(shard: str = "fsdp", tp: str = "tp") -> DeviceMesh:
    """All ranks on the shard axis, and a tensor-parallel axis of one."""
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs torch.distributed: start the script with torchrun and call "
            "torch.distributed.init_process_group(), or give a device_mesh"
        )
    return init_device_mesh(default_device_type(), (dist.get_world_size(), 1), mesh_dim_names=(shard, tp))


def needs_transformer_engine(what: str) -> None:
    """ValueError where it is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{what} needs TransformerEngine, which is not installed")


def initial_values() -> Any:
    """What becomes of ranks that begin with different values: a warning, unless FLATSHARD_VALUES says other."""
    return os.environ.get("FLATSHARD_VALUES", "warn")


class FSDPDistributedIndex:
    """The meshes and process groups of a model, by their names.

    ``hybrid_fsdp_group`` and ``hybrid_fsdp_expt_group`` may be left out: the axes say it. Where they are given they
    must have as many ranks as both data-parallel axes together. An axis ``ep`` of ``expt_device_mesh`` is that along
    which ranks have different experts.
    """

    # fmt: off
    def __init__(
        self, device_mesh: DeviceMesh, dp_shard_dim: str | None = None, dp_outer_dim: str | None = None,
        tp_dim: str | None = None, hybrid_fsdp_group: ProcessGroup | None = None,
        hybrid_fsdp_expt_group: ProcessGroup | None = None, hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None, fsdp_group_ag: ProcessGroup | None = None,
        expt_fsdp_group_ag: ProcessGroup | None = None,
    ) -> None:
        # fmt: on
        for name, given in (("device_mesh", device_mesh), ("expt_device_mesh", expt_device_mesh)):
            if given is not None and not isinstance(given, DeviceMesh):
                raise TypeError(f"{name}={given!r}: must be a DeviceMesh")
        if dp_shard_dim is None and device_mesh.ndim != 1:
            raise ValueError(f"dp_shard_dim: name the axis of {device_mesh} that parameters are sharded over")
        self.device_mesh, self.expt_device_mesh = device_mesh, expt_device_mesh
        self.dp_shard_dim, self.dp_outer_dim, self.tp_dim = dp_shard_dim, dp_outer_dim, tp_dim
        self.use_hybrid_fsdp = dp_outer_dim is not None
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.fsdp_group_ag, self.expt_fsdp_group_ag = fsdp_group_ag, expt_fsdp_group_ag
        self.hybrid_fsdp_group, self.hybrid_fsdp_expt_group = hybrid_fsdp_group, hybrid_fsdp_expt_group
        self.dp_mesh = self._data_parallel(device_mesh)
        self.expt_dp_mesh = None if expt_device_mesh is None else self._data_parallel(expt_device_mesh)
        self.ep_dim = "ep" if expt_device_mesh is not None and "ep" in (expt_device_mesh.mesh_dim_names or ()) else None
        for group, mesh in ((hybrid_fsdp_group, self.dp_mesh), (hybrid_fsdp_expt_group, self.expt_dp_mesh)):
            if group is not None and mesh is not None and group.size() != mesh.size():
                sizes = f"{group.size()} ranks was given for {mesh.size()}"
                raise ValueError(f"a hybrid group of {sizes} data-parallel ones")

    def _data_parallel(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh (outer, shard) or (shard) of a larger one."""
        if self.dp_shard_dim is None:
            return mesh
        names = mesh.mesh_dim_names or ()
        wanted = [self.dp_shard_dim] if self.dp_outer_dim is None else [self.dp_shard_dim, self.dp_outer_dim]
        for name in wanted:
            if not contains_submesh(mesh, name):  # also an axis that was made of others (`_flatten`)
                raise ValueError(f"the mesh has no axis {name!r}; its axes are {names}")
        if all(name in names for name in wanted):
            return mesh[tuple(reversed(wanted))]
        return _torch.data_parallel_mesh(mesh, wanted[:1], wanted[1:])

    def mesh_of(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The data-parallel mesh of experts, or of all else."""
        if not is_expert_parallel:
            return self.dp_mesh
        if self.expt_dp_mesh is None:
            raise ValueError("the model has experts (parameters with allreduce=False); give expt_device_mesh")
        return self.expt_dp_mesh

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """Axes of a mesh by their names."""
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        missing = [name for name in names if mesh is None or name not in (mesh.mesh_dim_names or ())]
        if missing or mesh is None:
            raise ValueError(f"no axes {missing or names} in {mesh}")
        return mesh[names]

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """Of all data-parallel ranks. Over two axes it is the group that was given."""
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)
        given = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        if given is None:
            raise ValueError("no process group of all data-parallel ranks was given (hybrid_fsdp_group)")
        return given

    def get_fsdp_group(self, is_expert_parallel: bool = False, independent_all_gather: bool = False) -> ProcessGroup:
        """Of the shard axis; with ``independent_all_gather`` the one given for gathers."""
        mesh = self.mesh_of(is_expert_parallel)
        own = mesh.get_group(mesh.ndim - 1)
        given = self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return given if independent_all_gather and given is not None else own

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> ProcessGroup | None:
        """Of the outer axis, if there is one."""
        mesh = self.mesh_of(is_expert_parallel)
        return mesh.get_group(0) if mesh.ndim == 2 else None

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The mesh that was given."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """The number of this rank's shard where both axes shard: shard-major."""
        mesh = self.mesh_of(is_expert_parallel)
        place = mesh.get_coordinate()
        assert place is not None
        return place[-1] * math.prod(mesh.shape[:-1]) + (place[0] if mesh.ndim == 2 else 0)


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of an expert: other ranks have others in its place."""
    return not getattr(parameter, "allreduce", True)


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """The dim on which Megatron's tensor parallelism has cut a plain parameter, by the marks on it."""
    mode = getattr(param, "_tensor_parallel_mode", None)
    if mode in ("column", "row"):
        return 0 if mode == "column" else 1
    dim = getattr(param, "partition_dim", None) if getattr(param, "tensor_model_parallel", False) else None
    return None if dim is None or dim < 0 else int(dim)


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Whether Megatron's tensor parallelism has cut a plain parameter."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Whether every rank of it has all of a plain parameter."""
    return not is_mcore_tensor_model_parallel(param)


def using_tensor_parallel(dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False) -> bool:
    """Whether the tensor-parallel axis, if there is one, has several ranks."""
    tp = dist_index.tp_dim
    return tp is not None and dist_index.get_submesh(tp, is_expert_parallel).mesh.numel() > 1


def safe_get_rank() -> int:
    """This rank, also before torch.distributed is initialised: as torchrun says, else 0."""
    said = os.environ.get("RANK", "0")
    return dist.get_rank() if dist.is_initialized() else int(said) if said.isdecimal() else 0


def log_single_rank(logger_: logging.Logger, level: int, msg: str, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank only."""
    if safe_get_rank() == rank:
        logger_.log(level, msg, *args, **kwargs)


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """The names of the axes of a mesh, and of those that were made of several (`_flatten`)."""
    names = [] if device_mesh is None else list(device_mesh.mesh_dim_names or ())
    return names if only_submesh_dims or device_mesh is None else [*names, *_torch.flattened_names(device_mesh)]


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Whether a mesh has axes of these names, or such as were made of several."""
    wanted = [submesh_names] if isinstance(submesh_names, str) else submesh_names
    return device_mesh is not None and wanted is not None and set(wanted) <= set(get_mesh_names(device_mesh))


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """Whether a module is below another; with ``strict`` it is not its own."""
    return module in set(parent_module.modules()) and not (strict and module is parent_module)


def find_megatron_fsdp(model: nn.Module) -> nn.Module | None:
    """The `MegatronFSDP` at or below ``model``."""
    found = (each for each in model.modules() if isinstance(vars(each).get("dist_index"), FSDPDistributedIndex))
    return next(found, None)


def register_memory(unit: FSDPModule | None, mesh: DeviceMesh, symmetric: bool = True) -> None:
    """Let a unit communicate from memory that NCCL knows: symmetric, or of NCCL's own allocator."""
    if mesh.device_type != "cuda":
        raise ValueError(f"nccl_ub=True: memory is registered with NCCL, and this mesh is on {mesh.device_type}")
    if unit is not None and symmetric:
        unit.set_force_sum_reduction_for_comms(True)  # all that NCCL does in symmetric memory
        unit.set_symm_mem_for_comm()
    elif unit is not None:
        unit.set_allocate_memory_from_process_group_for_comm(True)


def take_first(lane: Lane, mesh: DeviceMesh, axis: int, local: torch.Tensor) -> None:
    """Give the ranks of an axis what the first of them has. All of them call it."""
    if mesh.get_local_rank(axis):
        local.zero_()
    lane.all_reduce(lane.group(mesh, axis), [local], after=(lane.mark(),), name="broadcast").wait()


# What a sharded model is made of and how large its parts are, for logs


def _inside(model: nn.Module) -> nn.Module:
    """What was wrapped, whose names count."""
    found = find_megatron_fsdp(model)
    return model if found is None else found.get_submodule("module")


def compute_per_param_norms(module: nn.Module) -> dict[str, dict[str, float]]:
    """Norms of weights and gradients over all ranks, by name: ``param_norm``, ``grad_norm``. All ranks call it."""
    weights, gradients = weight_norms(_inside(module)), grad_norms(_inside(module))
    return {name: {"param_norm": norm, "grad_norm": gradients.get(name, 0.0)} for name, norm in weights.items()}


def log_per_param_norms(module: nn.Module, iteration: int | None = None, prefix: str = "") -> None:
    """Log `compute_per_param_norms` on the first rank. All ranks call it."""
    head = " ".join([*([prefix] if prefix else []), *([] if iteration is None else [f"iteration {iteration},"])])
    for name, norms in compute_per_param_norms(module).items():
        told = (f"{head} {name}".strip(), norms["param_norm"], norms["grad_norm"])
        log_single_rank(_log, logging.INFO, "%s: weight %.6g, gradient %.6g", *told)


def log_parameter_groups(module: nn.Module) -> None:
    """Log the table of units and groups on the first rank."""
    log_single_rank(_log, logging.INFO, "parameter groups:\n%s", summary(_inside(module)))


def check_all_fsdp_buffers(module: nn.Module) -> bool:
    """Whether all parameters lie where their layout says, and none overlap; logs what is wrong."""
    try:
        check_buffers(_inside(module))
    except AssertionError as error:
        _log.error("%s", error)
        return False
    return True
