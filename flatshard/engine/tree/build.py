"""From modules to a unit: its groups and their buffers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import DBuffer, from_first, watch_over
from flatshard.buffer.groups import group_among
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import OWNER, register
from flatshard.engine.parameters.sharded_param import Plain, ShardedParam, Structure, make_params
from flatshard.engine.parameters.values import Initial
from flatshard.engine.rows import RowGradients, Rows
from flatshard.engine.tree.parameters import IGNORED, Choices, Kind, Named, Sorted, owned_modules, sort_parameters
from flatshard.engine.tree.unit_classes import EntryPoints
from flatshard.engine.units.changes import hook_state_dicts
from flatshard.engine.units.intent import Intent
from flatshard.engine.units.unit import FindRoot, Unit, set_unit, unit_of
from flatshard.engine.weights.extensions import unfilled
from flatshard.engine.weights.formats import chosen
from flatshard.engine.weights.offload import Home
from flatshard.layout import Layout, is_sharded, plan

Sharded = tuple[DBuffer, list[ShardedParam], Initial | None]


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


def _build_group(params: list[Named], dims: list[int], kind: Kind, choices: Choices, owner: str) -> ParamGroup:
    """Shard the parameters of one group; the full originals are freed when it returns."""
    mesh, placements = kind.mesh, kind.placements(choices)
    whole = [_torch.held_of(p) for _, p, _ in params]
    shapes = [tuple(tensor.shape) for tensor in whole]
    precision = choices.precision.of_group(kind.keeps_dtype, kind.grad_dtype)
    shards = math.prod(mesh.size(axis) for axis, p in enumerate(placements.optimizer) if is_sharded(p))
    chunked = kind.parallel is not None or kind.apart is not None  # DTensors must be cut as torch.chunk does
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
