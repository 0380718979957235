"""From modules to a unit: which parameters it owns, in which groups, and their buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatshard.buffer import DBuffer
from flatshard.engine.group import Group, Site, make_members
from flatshard.engine.unit import Unit, unit_of
from flatshard.layout import plan
from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, Placements, SchedulePolicy, fully_sharded, replicated

Named = tuple[str, nn.Parameter, list[Site]]


def owned_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules below ``roots`` that no nested unit owns, with their names from their root down."""
    seen: set[nn.Module] = set()
    for root in roots:
        yield from _walk("", root, seen)


def _walk(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield name, module
    for child_name, child in module.named_children():
        if unit_of(child) is None:
            yield from _walk(f"{name}.{child_name}" if name else child_name, child, seen)


def owned_parameters(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Named]:
    """The parameters of a unit, each once, with every place where it is registered."""
    found: dict[nn.Parameter, Named] = {}
    for prefix, module in owned_modules(roots):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            _refuse(full_name, parameter)
            entry = found.setdefault(parameter, (full_name, parameter, []))
            entry[2].append(Site.of(module, name))
    return list(found.values())


def _refuse(name: str, parameter: nn.Parameter) -> None:
    owner = parameter.__dict__.get("_flatshard_owner")
    if owner is not None:
        raise ValueError(
            f"parameter '{name}' is tied to '{owner[0]}', which another unit ({owner[1]}) already owns; shard both "
            "modules in one call: fully_shard([first, second])"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter '{name}' is a DTensor on mesh {parameter.device_mesh}; sharding parameters that tensor "
            "parallelism has distributed is not supported; leave it out with ignored_params"
        )
    if parameter.is_complex() and parameter.requires_grad:
        raise ValueError(f"parameter '{name}' is {parameter.dtype}, which cannot be reduced; hold it as real numbers")
    if not parameter.is_contiguous():
        raise ValueError(f"parameter '{name}' is not contiguous; make it so before fully_shard")


def build_unit(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    policy: MixedPrecisionPolicy,
    layout: LayoutName,
    reshard_after_forward: bool | None,
    ignored: set[nn.Parameter],
    schedule: SchedulePolicy | None,
) -> Unit:
    """Shard the parameters below ``modules`` and hook them up."""
    by_kind: dict[tuple[torch.dtype, bool, bool], list[Named]] = {}
    for named in owned_parameters(modules, ignored):
        parameter = named[1]
        # A tensor without dims has no rows to shard.
        by_kind.setdefault((parameter.dtype, parameter.requires_grad, parameter.dim() > 0), []).append(named)
    owner = type(modules[0]).__name__
    groups = []
    for (_, _, can_shard), members in by_kind.items():
        placements = fully_sharded(mesh.ndim) if can_shard else replicated(mesh.ndim)
        groups.append(_build_group(members, mesh, device, policy, layout, placements, owner))
    for _, module in owned_modules(modules):
        _move_buffers(module, device)
    unit = Unit(modules, groups, mesh, device, policy, reshard_after_forward, schedule)
    for module in modules:
        module.__dict__["_flatshard_unit"] = unit
    return unit


def _build_group(
    members: list[Named],
    mesh: DeviceMesh,
    device: torch.device,
    policy: MixedPrecisionPolicy,
    layout: LayoutName,
    placements: Placements,
    owner: str,
) -> Group:
    """Cut the parameters of one group; the full originals are freed when it returns."""
    shapes = [tuple(parameter.shape) for _, parameter, _ in members]
    planned = plan(shapes, mesh.size(-1 % mesh.ndim), layout=layout)
    frozen = not members[0][1].requires_grad
    floating = members[0][1].is_floating_point()
    main_dtype = policy.main_dtype if policy.main_dtype is not None and floating and not frozen else None
    full = [parameter.detach() if parameter.is_meta else parameter.detach().to(device) for _, parameter, _ in members]
    main = DBuffer.distribute(full, planned, mesh, placements.optimizer)
    if main_dtype is not None and main_dtype != main.dtype:
        main = main.cast(main_dtype)
    made = make_members(main, members)
    for member, (name, parameter, _) in zip(made, members):
        # Whoever still holds the original (a tied module, an optimizer) finds out, and holds no memory.
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.__dict__["_flatshard_owner"] = (name, owner)
        member.sharded.__dict__["_flatshard_owner"] = (name, owner)  # a module that two units share
    return Group(made, main, placements, policy)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device and buffer.device.type != "meta":
            module._buffers[name] = buffer.to(device)


def units_below(module: nn.Module) -> list[tuple[str, Unit]]:
    """Every unit at or below ``module``, once, with the name of its first module."""
    found: dict[int, tuple[str, Unit]] = {}
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None:
            found.setdefault(id(unit), (name, unit))
    return list(found.values())
