"""Which parameters a unit owns, in which groups, and on which dim and mesh each is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import is_lazy

from flatshard import _torch
from flatshard.buffer.dtensor import largest_part
from flatshard.engine.gradients.gradients import GradientScale
from flatshard.engine.groups.registry import OWNER, owner_of
from flatshard.engine.parameters.sharded_param import Site
from flatshard.engine.units.unit import Borrowed, unit_of
from flatshard.engine.weights.extensions import is_extended
from flatshard.layout import is_sharded, least_padded_dim
from flatshard.layout.planner import LayoutName
from flatshard.policy import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    Refusal,
    SchedulePolicy,
    Sharding,
    Unsupported,
    on_another_mesh,
    replicated,
    resident,
)

Named = tuple[str, nn.Parameter, list[Site]]

NO_SHARD = "_flatshard_no_shard"  # the mark that `no_shard` leaves on modules and parameters
IGNORED = "_flatshard_ignored"  # on a parameter that was in ``ignored_params``


def owned_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules below ``roots`` that no nested unit owns, with their names from their root down."""
    seen: set[nn.Module] = set()
    left = [("", root) for root in reversed(roots)]
    while left:
        name, module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        yield name, module
        for child_name, child in reversed(list(module.named_children())):
            if unit_of(child) is None and not _torch.is_replicated(child):
                left.append((f"{name}.{child_name}" if name else child_name, child))


def _refuse(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ValueError(f"parameter '{name}' of a lazy module has no shape yet: run one forward before fully_shard")
    if parameter.is_complex() and parameter.requires_grad:
        raise ValueError(f"parameter '{name}' is {parameter.dtype}: use a real dtype (view_as_real), or freeze it")
    if not parameter.is_contiguous():
        raise Unsupported(
            f"FSDP does not support non-contiguous parameters, and '{name}' is not contiguous; call contiguous() on it "
            "before fully_shard"
        )


@dataclass(frozen=True)
class Where:
    """On which dim and over which mesh each parameter is sharded."""

    choose: Callable[[nn.Parameter], Any] | None = None  # the user's ``shard_placement_fn``
    mesh: DeviceMesh | None = None  # of all parameters, if data parallelism has axes of it
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # the axes of `mesh` that shard, and that replicate
    by_waste: bool = False  # choose a dim with little padding, unless the user has chosen one

    def of(self, name: str, parameter: nn.Parameter) -> tuple[Sharding, bool]:
        """How it is sharded; and whether its gradient is the mean over its own mesh, without regard to `data_mesh`."""
        self._check_mesh(name, parameter)
        answer: Any = None if self.choose is None else self.choose(parameter)
        if isinstance(answer, Sharding):
            given, means_own = answer, False
        else:
            info = getattr(answer, "mesh_info", None)  # of torch 2.13's `ShardPlacementResult`
            placement, mesh = (answer, None) if info is None else (answer.placement, info.mesh)
            if placement is not None and type(placement) is not Shard:
                raise Refusal(
                    f"Invalid shard_placement_fn result: {answer!r} for parameter '{name}'; it must be Shard(dim), "
                    "flatshard.Sharding(...) or None"
                )
            dim = placement.dim if placement is not None else None if self.by_waste else 0
            given, means_own = Sharding(dim, mesh), mesh is not None
        is_plain = not isinstance(parameter, DTensor) and not is_extended(parameter) and parameter.dim()
        if given.apart is not None and not is_plain:
            raise ValueError(
                f"Sharding(apart=...) is not supported for parameter '{name}': it needs a plain tensor with at least "
                "one dim. The placements of a DTensor already say which part a rank has; leave `apart` out"
            )
        if given.dim is None:
            return given, means_own
        dims, shape = max(parameter.dim(), 1), tuple(parameter.shape)
        if not -dims <= given.dim < dims:
            raise Refusal(
                f"Shard dim {given.dim} is invalid for {parameter.dim()}D tensor: shard_placement_fn returned it for "
                f"parameter '{name}', whose shape is {shape}"
            )
        return replace(given, dim=given.dim % dims), means_own

    def _check_mesh(self, name: str, parameter: nn.Parameter) -> None:
        if self.mesh is None or not isinstance(parameter, DTensor):
            return
        if parameter.device_mesh != self.mesh:
            raise ValueError(
                f"parameter '{name}' is a DTensor on {parameter.device_mesh}; with dp_mesh_dims it must be on "
                f"{self.mesh}, the mesh given to fully_shard (use torch.distributed.tensor.distribute_module)"
            )
        for axis in (*self.axes[0], *self.axes[1]):
            if not isinstance(parameter.placements[axis], Replicate):
                raise ValueError(
                    f"Expected Replicate() for parameter '{name}' on axis {axis} of its mesh, which dp_mesh_dims gives "
                    f"to data parallelism, but got {parameter.placements[axis]}"
                )


Values: TypeAlias = Literal["same", "warn", "first", "own"]


@dataclass(frozen=True)
class Choices:
    """The arguments of a `fully_shard` call, checked."""

    mesh: DeviceMesh
    device: torch.device
    placements: Placements
    precision: MixedPrecisionPolicy
    layout: LayoutName
    reshard_after_forward: bool | int | Literal["auto"] | None
    gradient_scale: GradientScale
    schedule: SchedulePolicy | None
    ignored: frozenset[nn.Parameter]
    where: Where
    offload: OffloadPolicy
    optional: bool = False
    rows: bool = False  # of an embedding, exchange rows instead of the table
    strategy: tuple[Any, Any] = (None, None)  # of the inner and the outer axis, for parameters with a mesh of their own
    values: Values = "same"  # of the ranks' parameters
    data_mesh: DeviceMesh | None = None  # whose ranks' data the gradients come from, if it is not `mesh`

    def placements_on(self, mesh: DeviceMesh) -> Placements:
        return self.placements if mesh == self.mesh else on_another_mesh(*self.strategy, mesh.ndim)

    def scale_on(self, mesh: DeviceMesh, means_own: bool) -> GradientScale:
        """The scale of gradients that are reduced over ``mesh``."""
        data = mesh if means_own else self.data_mesh or self.mesh
        if self.gradient_scale != "mean" or data.size() == mesh.size():
            return self.gradient_scale
        return 1.0 / data.size()


@dataclass(frozen=True)
class Kind:
    """What the parameters of a group have in common."""

    dtype: torch.dtype
    trainable: bool
    has_rows: bool  # not 0-dim
    marked: bool  # by `no_shard`
    mesh: DeviceMesh
    parallel: DeviceMesh | None  # the mesh of DTensors, from tensor parallelism
    apart: DeviceMesh | None
    scale: GradientScale
    extended: type | None  # their tensor subclass
    keeps_dtype: bool  # full weights have their own dtype
    grad_dtype: torch.dtype | None  # set on the parameters

    def placements(self, choices: Choices) -> Placements:
        found = choices.placements_on(self.mesh) if self.has_rows else replicated(self.mesh.ndim)
        return resident(found) if self.marked else found


def _borrowed(name: str, parameter: nn.Parameter, site: Site, mesh: DeviceMesh) -> Borrowed:
    """A parameter that another unit owns, and where this unit has it."""
    known, unit = parameter.__dict__[OWNER]
    tied = f"parameter '{name}' is tied to '{known}', which another unit ({unit}) already owns"
    owner = owner_of(parameter)
    if owner is None or owner[0].is_full:
        raise RuntimeError(f"{tied} and has unsharded; call reshard() on that module first")
    group, index = owner
    if group.mesh != mesh:
        raise ValueError(f"{tied}, over another mesh; shard both over the same mesh")
    return group, group.params[index], site


Sorted = tuple[list[Borrowed], dict[Kind, list[Named]], list[Named], dict[nn.Parameter, int]]


def sort_parameters(modules: Sequence[nn.Module], choices: Choices) -> Sorted:
    """The parameters of a unit: borrowed ones, those of each group, plain ones, and their sharded dims.

    Raises, before anything has changed, if they cannot be sharded like this.
    """
    borrowed: list[Borrowed] = []
    owned: dict[nn.Parameter, Named] = {}  # with every place where it is registered
    for prefix, module in owned_modules(modules):
        for own_name, parameter in module._parameters.items():
            if parameter is None or parameter in choices.ignored:
                continue
            name, site = f"{prefix}.{own_name}" if prefix else own_name, Site.of(module, own_name)
            if OWNER in parameter.__dict__:
                borrowed.append(_borrowed(name, parameter, site, choices.mesh))
            else:
                _refuse(name, parameter)
                owned.setdefault(parameter, (name, parameter, []))[2].append(site)
    by_kind: dict[Kind, list[Named]] = {}
    plain: list[Named] = []
    dims: dict[nn.Parameter, int] = {}
    meshes: set[DeviceMesh] = set()
    for named in owned.values():
        parameter, marked = named[1], _is_marked(named)
        if marked and not parameter.requires_grad:
            plain.append(named)
            continue
        given, means_own = choices.where.of(named[0], parameter)
        mesh = given.mesh or choices.mesh
        dims[parameter] = _dim(named[0], parameter, given.dim, mesh, choices)
        if mesh not in meshes:
            _check_place(mesh)
            meshes.add(mesh)
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != mesh.device_type:
            raise ValueError(
                f"parameter '{named[0]}': Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{parameter.device_mesh.device_type} for DTensor and {mesh.device_type} for FSDP"
            )
        kind = Kind(
            parameter.dtype,
            parameter.requires_grad,
            parameter.dim() > 0,
            marked,
            mesh,
            parameter.device_mesh if isinstance(parameter, DTensor) else None,
            given.apart,
            choices.scale_on(mesh, means_own),
            type(_torch.held_of(parameter).data) if is_extended(parameter) else None,
            choices.precision.keeps_dtype(named[0], parameter),
            parameter.grad_dtype if parameter.grad_dtype != parameter.dtype else None,
        )
        if is_extended(parameter):
            _check_extended(named, dims[parameter], kind.placements(choices))
        by_kind.setdefault(kind, []).append(named)
    return borrowed, by_kind, plain, dims


def _check_place(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in mesh {mesh}; call fully_shard only on ranks of the mesh")
    # Process groups sort their ranks: a part's number in the mesh would be another rank's in the collective. All ranks
    # of the mesh must raise, those whose own groups are in order too.
    if any((mesh.mesh.diff(dim=axis) < 0).any() for axis in range(mesh.ndim)):
        raise ValueError(
            f"mesh {mesh} has ranks in another order than its process groups; list them in ascending order along each "
            "axis"
        )


def _check_extended(named: Named, dim: int, placements: Placements) -> None:
    name, parameter, _ = named
    if placements.parameter != placements.optimizer or not is_sharded(placements.optimizer[-1]) or dim:
        raise ValueError(
            f"parameter '{name}' is a {type(parameter).__name__}: a tensor subclass can be sharded only on dim 0 and "
            "with strategy='optim_grads_params'"
        )


def _is_marked(named: Named) -> bool:
    """Whether `no_shard` was called on the parameter or on every module that holds it."""
    _, parameter, sites = named
    modules = [site.module() for site in sites]
    on_modules = all(module is not None and module.__dict__.get(NO_SHARD) for module in modules)
    return bool(parameter.__dict__.get(NO_SHARD)) or on_modules


def _dim(name: str, parameter: nn.Parameter, given: int | None, mesh: DeviceMesh, choices: Choices) -> int:
    """The sharded dim of a parameter."""
    any_dim = choices.layout != "flat"
    if given is None:
        placements = choices.placements_on(mesh).optimizer
        shards = math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if is_sharded(placement))
        return least_padded_dim(largest_part(parameter), shards) if any_dim and not is_extended(parameter) else 0
    if given and not any_dim:
        raise ValueError(
            f"parameter '{name}' cannot be sharded on dim {given} with layout='flat'; use dim 0 or layout='tensor'"
        )
    return given
