"""From modules to a unit: which parameters it owns, in which groups, and their buffers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _torch
from flatshard.buffer import DBuffer, from_first, watch_over
from flatshard.buffer.dtensor import largest_part
from flatshard.buffer.groups import group_among
from flatshard.engine.gradients.gradients import Gradients, GradientScale
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import OWNER, owner_of, register
from flatshard.engine.parameters.sharded_param import Plain, ShardedParam, Site, Structure, make_params
from flatshard.engine.parameters.values import Initial
from flatshard.engine.rows import RowGradients, Rows
from flatshard.engine.tree.unit_classes import EntryPoints
from flatshard.engine.units.changes import hook_state_dicts
from flatshard.engine.units.intent import Intent
from flatshard.engine.units.unit import Borrowed, FindRoot, Unit, set_unit, unit_of
from flatshard.engine.weights.codec import is_extended, unfilled
from flatshard.engine.weights.formats import chosen
from flatshard.engine.weights.offload import Home
from flatshard.layout import Layout, is_sharded, least_padded_dim, plan
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
Sharded = tuple[DBuffer, list[ShardedParam], Initial | None]

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
    for named in owned.values():
        parameter, marked = named[1], _is_marked(named)
        if marked and not parameter.requires_grad:
            plain.append(named)
            continue
        given, means_own = choices.where.of(named[0], parameter)
        mesh = given.mesh or choices.mesh
        dims[parameter] = _dim(named[0], parameter, given.dim, mesh, choices)
        if mesh.get_coordinate() is None:
            raise ValueError(f"this rank is not in mesh {mesh}; call fully_shard only on ranks of the mesh")
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


def _check_extended(named: Named, dim: int, placements: Placements) -> None:
    name, parameter, _ = named
    if placements.parameter != placements.optimizer or not is_sharded(placements.optimizer[-1]) or dim:
        raise ValueError(
            f"parameter '{name}' is a {type(parameter).__name__}: a tensor subclass can be sharded only on dim 0 and "
            "with strategy='optim_grads_params'"
        )


def build_unit(modules: Sequence[nn.Module], choices: Choices, find_root: FindRoot) -> Unit:
    """Shard the parameters below ``modules`` and register hooks. ``find_root``: as of a `Unit`."""
    watch_over(choices.device)  # a rank may raise before the first forward, where the others wait for it
    borrowed, by_kind, plain, dims = found = sort_parameters(modules, choices)
    by_rows = _checked_rows(modules, found, choices) if choices.rows else None
    for parameter in choices.ignored:
        parameter.__dict__[IGNORED] = True
    owner = type(modules[0]).__name__
    groups = [
        _build_group(params, [dims[p] for _, p, _ in params], kind, choices, owner) for kind, params in by_kind.items()
    ]
    for _, module in owned_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != choices.device and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(choices.device)
        _torch.mark_managed(module)
    reshard, post_forward_mesh = choices.reshard_after_forward, None
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        reshard, post_forward_mesh = True, _post_forward_mesh(choices.mesh, reshard)
    # A unit of frozen `no_shard` weights alone needs no hooks, unless it is the root of other units.
    nests = any(units_below(module) for module in modules)
    hooked = bool(groups or borrowed) or not plain or nests
    intent = Intent(reshard_after_forward=reshard, is_optional=choices.optional)
    mesh, device, precision = choices.mesh, choices.device, choices.precision.of_group(False, None)
    unit = Unit(modules, groups, mesh, device, precision, intent, find_root, choices.schedule, hooked)
    for module in modules if hooked else ():
        hook_state_dicts(unit, module)
    # Without references that could keep parameters, or the model, alive.
    where = replace(choices.where, choose=None)
    unit.choices = replace(choices, ignored=frozenset(), where=where, precision=precision)
    for group, param, site in borrowed:
        unit.borrow(group, param, site)
        group.snapshot.add(site, param.sharded)
    unit.plain = [Plain(name, sites, choices.precision.keeps_dtype(name, p)) for name, p, sites in plain]
    for each in unit.plain:
        each.place(device, precision.param_dtype)
    for group in groups:
        if post_forward_mesh is not None and group.mesh == choices.mesh and not group.is_extended:
            group.post_forward_mesh = post_forward_mesh
    if by_rows is not None:
        gradients = groups[0].gradients
        assert isinstance(gradients, RowGradients)
        gradients.padding = by_rows.padding_idx
        unit.rows = Rows(groups[0])
        unit.derive()
    if nests and len(modules) == 1:
        holders = {id(site.module()) for group in unit.needs for param in group.params for site in param.sites}
        owned = [module for _, module in owned_modules(modules) if module not in modules]
        EntryPoints(unit, [module for module in owned if any(id(each) in holders for each in module.modules())])
    for module in modules:
        set_unit(module, unit)
        _torch.mark_sharded(module)
    return unit


def _checked_rows(modules: Sequence[nn.Module], found: Sorted, choices: Choices) -> nn.Embedding:
    """The embedding of a unit by rows. Raises if it cannot be one."""
    module, (borrowed, by_kind, _, dims) = modules[0], found
    if len(modules) > 1 or not isinstance(module, nn.Embedding):
        raise ValueError(f"rows=True needs one nn.Embedding as the module, not {type(module).__name__}")
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            raise ValueError(f"rows=True does not support an nn.Embedding with {name}; leave one of the two out")
    params = [named for group in by_kind.values() for named in group]
    if borrowed or len(params) != 1 or len(params[0][2]) > 1:
        raise ValueError("rows=True: the embedding's weight is tied, or not its only parameter; leave rows=True out")
    if module._parameters.get("weight") is not params[0][1]:
        raise ValueError(
            "rows=True: the embedding's weight is not its own parameter (a parametrization?); leave it out"
        )
    (kind,) = by_kind
    placements, cut = kind.placements(choices), dims[params[0][1]]
    *outer, inner = placements.optimizer
    if placements.parameter != placements.optimizer or not is_sharded(inner) or any(map(is_sharded, outer)):
        raise ValueError(f"rows=True needs a `strategy` that shards over the last axis of {kind.mesh} and no other")
    if kind.parallel is not None or kind.apart is not None or kind.extended is not None or cut:
        raise ValueError("rows=True: the embedding's weight must be a plain tensor that is sharded on dim 0")
    if choices.optional or Home.of(choices.device, choices.offload).host:
        raise ValueError("rows=True cannot be used with optional=True or CPUOffloadPolicy")
    return module


def _is_marked(named: Named) -> bool:
    """Whether `no_shard` was called on the parameter or on every module that holds it."""
    _, parameter, sites = named
    modules = [site.module() for site in sites]
    on_modules = all(module is not None and module.__dict__.get(NO_SHARD) for module in modules)
    return bool(parameter.__dict__.get(NO_SHARD)) or on_modules


def _post_forward_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Groups of ``size`` neighbours of the shard axis, as meshes of one axis; this rank's."""
    known: dict[int, DeviceMesh] = mesh.__dict__.setdefault("_flatshard_post_forward_meshes", {})
    if size not in known:
        place = mesh.get_coordinate()
        assert place is not None
        first = place[-1] - place[-1] % size
        ranks = mesh.mesh[tuple(place[:-1])][first : first + size].tolist()
        # Not as an axis of a mesh of all these groups, whose creation is collective among all ranks of the world.
        group = group_among(ranks, [mesh.get_group(mesh.ndim - 1)], user=mesh)
        known[size] = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("within",))
    return known[size]


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


def _build_group(params: list[Named], dims: list[int], kind: Kind, choices: Choices, owner: str) -> ParamGroup:
    """Shard the parameters of one group; the full originals are freed when it returns."""
    mesh, placements = kind.mesh, kind.placements(choices)
    whole = [_torch.held_of(p) for _, p, _ in params]
    shapes = [tuple(tensor.shape) for tensor in whole]
    precision = choices.precision.of_group(kind.keeps_dtype, kind.grad_dtype)
    shards = math.prod(mesh.size(axis) for axis, p in enumerate(placements.optimizer) if is_sharded(p))
    # DTensors must be cut as torch.chunk does. So must everything with versions of torch without `RaggedDTensor`.
    chunked = kind.parallel is not None or kind.apart is not None or not _torch.SUBCLASSES_DISPATCH
    # Encoded tensors share no segment with others.
    apart = [
        precision.has_formats and chosen(name, p, [site.module() for site in sites], precision, owner)
        for name, p, sites in params
    ]
    by_tensor = kind.extended is not None or (chunked and choices.layout == "auto")
    planned = plan(shapes, shards, layout="tensor" if by_tensor else choices.layout, dims=dims, apart=apart)
    home, is_extended = Home.of(choices.device, choices.offload), kind.extended is not None
    if is_extended:
        main, sharded, initial = _shard_extended(params, planned, kind, choices, home)
    else:
        main, sharded, initial = _shard_plain(params, whole, planned, kind, choices, home)
    of_rows, own = RowGradients if choices.rows else Gradients, params[0][1].dtype
    group = ParamGroup(sharded, main, placements, precision, home, is_extended, own, owner, of_rows, apart)
    group.initial, group.keeps_dtype, group.own_grad_dtype = initial, kind.keeps_dtype, kind.grad_dtype
    group.gradients.configure(scale=kind.scale)
    # So that a tied module, an optimizer with an original, or a unit that shares the module, can detect it.
    for param, (name, parameter, _) in zip(group.params, params):
        parameter.__dict__[OWNER] = param.sharded.__dict__[OWNER] = (name, owner)
        if kind.grad_dtype is not None:
            param.sharded.grad_dtype = kind.grad_dtype
    register(group, (parameter for _, parameter, _ in params), in_main=not is_extended)
    return group


def _shard_plain(
    params: list[Named], whole: Sequence[torch.Tensor], planned: Layout, kind: Kind, choices: Choices, home: Home
) -> Sharded:
    mesh, main_dtype = kind.mesh, choices.precision.main_dtype
    full = [p.detach() if p.is_meta else p.detach().to(choices.device) for p in whole]
    has_values = not any(tensor.is_meta for tensor in full)
    if choices.values == "first" and has_values:
        full = from_first(full, mesh)
    compared = choices.values in ("same", "warn") and has_values and mesh.size() > 1
    initial = Initial(full, warns=choices.values == "warn") if compared else None
    main = DBuffer.distribute(full, planned, mesh, kind.placements(choices).optimizer)
    if main_dtype not in (None, main.dtype) and kind.dtype.is_floating_point and kind.trainable:
        main = main.cast(main_dtype)
    main = home.take(main)
    sharded = make_params(main, params, choices.where.axes, apart=kind.apart)
    if initial is not None:
        initial.parts = initial.of_parts(main)
    for _, parameter, _ in params if kind.parallel is None else ():
        # An original that is still referenced, by an optimizer for example, keeps no memory.
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return main, sharded, initial


def _shard_extended(named: list[Named], layout: Layout, kind: Kind, choices: Choices, home: Home) -> Sharded:
    """Shard parameters of a tensor subclass."""
    whole = [_torch.held_of(p).detach() for _, p, _ in named]
    main = unfilled(layout, kind.mesh, kind.placements(choices), whole[0].dtype)
    structures: list[tuple[Structure, list[bool]] | None] = []
    locals_ = []
    with torch.no_grad():
        for index, (tensor, (_, parameter, _)) in enumerate(zip(whole, named)):
            tensor = tensor if tensor.is_meta or tensor.device == home.device else tensor.to(home.device)
            structure_and_cut = None
            if not parameter.requires_grad and getattr(tensor, "fsdp_pre_all_gather", None) is None:
                structure = Structure.of(tensor)
                structure_and_cut = structure, [structure.has_rows(leaf) for leaf in structure.leaves(tensor)]
                rows = layout.rows(layout.slots[index], main.held.first, main.held.count)[1]
                local = structure.mapped(tensor, functools.partial(main.rows_of, index), rows)
            else:
                local = main.rows_of(index, tensor).clone(memory_format=torch.contiguous_format)
            structures.append(structure_and_cut)
            locals_.append(local.cpu() if home.host and not local.is_meta else local)
    params = make_params(main, named, choices.where.axes, locals_)
    for param, structure_and_cut in zip(params, structures):
        param.structure = structure_and_cut
    return main, params, None


def units_below(module: nn.Module) -> list[tuple[str, Unit]]:
    """Every unit at or below ``module``, once, with the name of its first module."""
    found: dict[int, tuple[str, Unit]] = {}
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None:
            found.setdefault(id(unit), (name, unit))
    return list(found.values())
