"""`FSDPDistributedIndex`: the meshes of a model; Megatron's marks on parameters; helpers of this surface."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flatshard import _torch
from flatshard.api import no_shard
from flatshard.engine.parameters.sharded_param import PLAIN
from flatshard.engine.tree.summary import check_buffers, summary
from flatshard.module import FSDPModule
from flatshard.optim.clip import grad_norms, weight_norms
from flatshard.wrapping import unit_modules

_log = logging.getLogger("flatshard")


def needs_transformer_engine(what: str) -> None:
    """Raise ValueError if TransformerEngine, which ``what`` needs, is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{what} needs TransformerEngine, which is not installed")


def initial_values() -> Any:
    """``values`` for `flatshard.fully_shard`: FLATSHARD_VALUES, or a warning if ranks start with different values."""
    return os.environ.get("FLATSHARD_VALUES", "warn")


@dataclass(eq=False)
class FSDPDistributedIndex:
    """The meshes and process groups of a model.

    ``hybrid_fsdp_group`` and ``hybrid_fsdp_expt_group`` are optional; they must have as many ranks as both
    data-parallel axes together. Along an axis ``ep`` of ``expt_device_mesh``, ranks have different experts.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: ProcessGroup | None = None
    hybrid_fsdp_expt_group: ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: ProcessGroup | None = None
    expt_fsdp_group_ag: ProcessGroup | None = None

    def __post_init__(self) -> None:
        device_mesh, experts = self.device_mesh, self.expt_device_mesh
        for name, given in (("device_mesh", device_mesh), ("expt_device_mesh", experts)):
            if given is not None and not isinstance(given, DeviceMesh):
                raise TypeError(f"{name}={given!r}: must be a DeviceMesh")
        if self.dp_shard_dim is None and device_mesh.ndim != 1:
            raise ValueError(f"dp_shard_dim=None: name the axis of {device_mesh} that parameters are sharded over")
        self.use_hybrid_fsdp = self.dp_outer_dim is not None
        self.dp_mesh = self._data_parallel(device_mesh)
        self.expt_dp_mesh = None if experts is None else self._data_parallel(experts)
        self.ep_dim = "ep" if experts is not None and "ep" in (experts.mesh_dim_names or ()) else None
        for name, mesh in (("hybrid_fsdp_group", self.dp_mesh), ("hybrid_fsdp_expt_group", self.expt_dp_mesh)):
            group = getattr(self, name)
            if group is not None and mesh is not None and group.size() != mesh.size():
                raise ValueError(f"{name} has {group.size()} ranks; the mesh has {mesh.size()} data-parallel ranks")

    def _data_parallel(self, mesh: DeviceMesh) -> DeviceMesh:
        """The data-parallel submesh, (outer, shard) or (shard)."""
        if self.dp_shard_dim is None:
            return mesh
        names = mesh.mesh_dim_names or ()
        wanted = [self.dp_shard_dim] if self.dp_outer_dim is None else [self.dp_shard_dim, self.dp_outer_dim]
        for name in wanted:
            if not contains_submesh(mesh, name):
                raise ValueError(f"the mesh has no axis {name!r}; its axes are {names}")
        if all(name in names for name in wanted):
            return mesh[tuple(reversed(wanted))]
        return _torch.data_parallel_mesh(mesh, wanted[:1], wanted[1:])  # some were flattened from several axes

    def mesh_of(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The data-parallel mesh, of experts or of all other parameters."""
        if not is_expert_parallel:
            return self.dp_mesh
        if self.expt_dp_mesh is None:
            raise ValueError("expt_device_mesh=None: the model has experts (allreduce=False), which need a mesh")
        return self.expt_dp_mesh

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The submesh of axes of `get_root_mesh`, by their names."""
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if mesh is None or not contains_submesh(mesh, names):
            raise ValueError(f"the mesh {mesh} has no axes {names}")
        return mesh[names]

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """The process group of all data-parallel ranks; with two axes, the ``hybrid_fsdp_group`` that was given."""
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)
        given = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        if given is None:
            raise ValueError("hybrid_fsdp_group (experts: hybrid_fsdp_expt_group) is None: give the group of both axes")
        return given

    def get_fsdp_group(self, is_expert_parallel: bool = False, independent_all_gather: bool = False) -> ProcessGroup:
        """The process group of the shard axis, or with ``independent_all_gather`` the one given for all-gathers."""
        mesh = self.mesh_of(is_expert_parallel)
        own = mesh.get_group(mesh.ndim - 1)
        given = self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return given if independent_all_gather and given is not None else own

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> ProcessGroup | None:
        """The process group of the outer axis; None if there is none."""
        mesh = self.mesh_of(is_expert_parallel)
        return mesh.get_group(0) if mesh.ndim == 2 else None

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """``device_mesh`` or, for experts, ``expt_device_mesh``."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """The index of this rank's shard if both axes shard; the shard axis is the slower one."""
        mesh = self.mesh_of(is_expert_parallel)
        place = mesh.get_coordinate()
        assert place is not None
        return place[-1] * math.prod(mesh.shape[:-1]) + (place[0] if mesh.ndim == 2 else 0)


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to an expert (mark ``allreduce=False``): other ranks have other experts."""
    return not getattr(parameter, "allreduce", True)


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """The dim on which Megatron's tensor parallelism has sharded a plain parameter, by its marks; None if on none."""
    mode = getattr(param, "_tensor_parallel_mode", None)
    if mode in ("column", "row"):
        return 0 if mode == "column" else 1
    dim = getattr(param, "partition_dim", None) if getattr(param, "tensor_model_parallel", False) else None
    return None if dim is None or dim < 0 else int(dim)


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Whether Megatron's tensor parallelism has sharded a plain parameter."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Whether every tensor-parallel rank has all of a plain parameter."""
    return not is_mcore_tensor_model_parallel(param)


def fsdp_no_shard(target: nn.Module | nn.Parameter) -> None:
    """`flatshard.no_shard`: the target stays replicated. Its parameters get the mark ``_fsdp_no_shard``, too."""
    no_shard(target)
    for parameter in [target] if isinstance(target, nn.Parameter) else target.parameters():
        parameter._fsdp_no_shard = True  # type: ignore[attr-defined]


def plan_units(
    model: nn.Module, classes: Sequence[type[nn.Module] | str] | None, *, fine_grained: bool, single: bool
) -> list[tuple[list[nn.Module], bool]]:
    """The modules of each unit below ``model``, and whether they are experts. Inner units come first.

    Without ``classes``, units are the repeated blocks; with ``single`` there are none. ``fine_grained`` makes a unit of
    every module inside a unit that has parameters of its own.
    """
    planned = unit_modules(model, classes)[:-1] if classes else [] if single else unit_modules(model, "auto")[:-1]
    chosen = [modules for modules in planned if any(True for module in modules for _ in module.parameters())]
    experts = list(_expert_modules(model, ""))
    inside = {below for modules in experts for module in modules for below in module.modules()}
    chosen = [modules for modules in chosen if not set(modules) & inside]
    ids = {id(module) for modules in (*chosen, *experts) for module in modules}
    for module in [below for modules in chosen for each in modules for below in each.modules()] if fine_grained else []:
        if id(module) not in ids and module not in inside and module._parameters:
            ids.add(id(module))
            chosen.append([module])
    place = {module: number for number, module in enumerate(model.modules())}
    units = [*((modules, False) for modules in chosen), *((modules, True) for modules in experts)]
    return sorted(units, key=lambda unit: -place[unit[0][0]])


def _expert_modules(module: nn.Module, name: str) -> Iterator[list[nn.Module]]:
    """The outermost modules with parameters of experts only. The modules of a list are one unit: some may be unused."""
    marks = [is_expert(parameter) for parameter in module.parameters()]
    if not any(marks):
        return
    if all(marks):
        called = type(module).forward is not nn.Module.forward
        yield [module] if called else [child for child in module.children() if any(True for _ in child.parameters())]
        return
    if any(is_expert(parameter) for parameter in module.parameters(recurse=False)):
        mixed = f"'{name or type(module).__name__}' has parameters of experts (allreduce=False) and others"
        raise ValueError(f"{mixed}; put those of experts into a module of their own")
    for child_name, child in module.named_children():
        yield from _expert_modules(child, f"{name}.{child_name}" if name else child_name)


def distribute_marked(model: nn.Module, index: FSDPDistributedIndex) -> None:
    """Replace parameters that marks say are tensor parallel, or of experts, by DTensors.

    Their modules still compute with plain local tensors; norms, optimizers and checkpoints see global shapes. The
    parameters of experts with the same name are concatenated on dim 0.
    """
    replaced = functools.cache(functools.partial(_distributed, index))  # cached: tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                module._parameters[name] = replaced(parameter)


def _distributed(index: FSDPDistributedIndex, parameter: nn.Parameter) -> nn.Parameter:
    """The DTensor of a marked parameter; other parameters as they are."""
    root: Any = index.get_root_mesh(is_expert(parameter))
    expert_dim = 0 if parameter.dim() and is_expert(parameter) else None
    cuts = [(index.ep_dim, expert_dim), (index.tp_dim, get_mcore_tensor_parallel_partition_dim(parameter))]
    sizes = {} if root is None else dict(zip(root.mesh_dim_names or (), root.shape))
    axes: dict[Any, Shard] = {name: Shard(at) for name, at in cuts if at is not None and sizes.get(name, 1) > 1}
    if not axes:
        return parameter
    if index.hsdp_outer_dp_shard:
        what = f"a parameter of shape {tuple(parameter.shape)} is sharded along {', '.join(axes)}, too"
        raise NotImplementedError(f"outer_dp_sharding_strategy='optim' is not supported: {what}; use 'no_shard'")
    whole: Any = DTensor.from_local(parameter.detach(), root[tuple(axes)], list(axes.values()), run_check=False)
    replaced = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    replaced.__dict__.update({key: value for key, value in parameter.__dict__.items() if key not in replaced.__dict__})
    replaced.__dict__[PLAIN] = True
    return replaced


def using_tensor_parallel(dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False) -> bool:
    """Whether there is a tensor-parallel axis of more than one rank."""
    tp = dist_index.tp_dim
    return tp is not None and dist_index.get_submesh(tp, is_expert_parallel).mesh.numel() > 1


def safe_get_rank() -> int:
    """The rank. Before torch.distributed is initialised: the environment variable RANK, or 0."""
    rank = os.environ.get("RANK", "0")
    return dist.get_rank() if dist.is_initialized() else int(rank) if rank.isdecimal() else 0


def log_single_rank(logger_: logging.Logger, level: int, msg: str, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    if safe_get_rank() == rank:
        logger_.log(level, msg, *args, **kwargs)


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """The names of the axes of a mesh, including flattened ones unless ``only_submesh_dims``."""
    names = [] if device_mesh is None else list(device_mesh.mesh_dim_names or ())
    return names if only_submesh_dims or device_mesh is None else [*names, *_torch.flattened_names(device_mesh)]


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Whether a mesh has axes, flattened ones included, of all of these names."""
    wanted = [submesh_names] if isinstance(submesh_names, str) else submesh_names
    return device_mesh is not None and wanted is not None and set(wanted) <= set(get_mesh_names(device_mesh))


def find_megatron_fsdp(model: nn.Module) -> nn.Module | None:
    """The `MegatronFSDP` at or below ``model``."""
    wrappers = (each for each in model.modules() if isinstance(vars(each).get("dist_index"), FSDPDistributedIndex))
    return next(wrappers, None)


def register_memory(unit: FSDPModule | None, mesh: DeviceMesh, symmetric: bool = True) -> None:
    """Let a unit communicate from memory that is registered with NCCL. Without a unit, only check the mesh."""
    if mesh.device_type != "cuda":
        raise ValueError(f"nccl_ub or use_symm_mem: the mesh is on {mesh.device_type}; NCCL needs a mesh on cuda")
    if unit is not None and symmetric:
        unit.set_force_sum_reduction_for_comms(True)  # NCCL can only sum in symmetric memory
        unit.set_symm_mem_for_comm()
    elif unit is not None:
        unit.set_allocate_memory_from_process_group_for_comm(True)


# Logs and checks of a sharded model


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a `MegatronFSDP`, without the prefix of names that the wrapper adds."""
    wrapper = find_megatron_fsdp(model)
    return model if wrapper is None else wrapper.get_submodule("module")


def compute_per_param_norms(module: nn.Module) -> dict[str, dict[str, float]]:
    """The ``param_norm`` and ``grad_norm`` of full parameters, by name. All ranks call it."""
    weights, gradients = weight_norms(_unwrapped(module)), grad_norms(_unwrapped(module))
    return {name: {"param_norm": norm, "grad_norm": gradients.get(name, 0.0)} for name, norm in weights.items()}


def log_per_param_norms(module: nn.Module, iteration: int | None = None, prefix: str = "") -> None:
    """Log `compute_per_param_norms` on the first rank. All ranks call it."""
    head = " ".join([*([prefix] if prefix else []), *([] if iteration is None else [f"iteration {iteration},"])])
    for name, norms in compute_per_param_norms(module).items():
        values = (f"{head} {name}".strip(), norms["param_norm"], norms["grad_norm"])
        log_single_rank(_log, logging.INFO, "%s: weight %.6g, gradient %.6g", *values)


def log_parameter_groups(module: nn.Module) -> None:
    """Log the table of units and parameter groups on the first rank."""
    log_single_rank(_log, logging.INFO, "parameter groups:\n%s", summary(_unwrapped(module)))


def check_all_fsdp_buffers(module: nn.Module) -> bool:
    """Whether all parameters are at the offsets of their layout and do not overlap. Errors are logged."""
    try:
        check_buffers(_unwrapped(module))
    except AssertionError as error:
        _log.error("%s", error)
        return False
    return True
