"""From a unit to its root: the units under it, and their places."""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import nn

from flatshard.engine.schedule.keep import plan_kept
from flatshard.engine.schedule.root import Root, root_of
from flatshard.engine.tree.materialize import materialize, refuse_meta
from flatshard.engine.units.intent import Place
from flatshard.engine.units.unit import Unit, unit_of
from flatshard.policy import SchedulePolicy


def find_root(unit: Unit, module: nn.Module) -> Root:
    """The root of a unit. If it has none, ``module`` becomes the root of all units below it."""
    known = root_of(unit)
    if known is not None:
        return known
    if any(parameter.is_meta for parameter in module.parameters()):
        if unit.intent.refuses_meta:
            refuse_meta(module)
        warnings.warn(
            f"{type(module).__name__} has parameters on the meta device, which its first forward initialises. To use "
            "a checkpoint, load it before that; to avoid this warning, call flatshard.materialize(model)",
            stacklevel=2,
        )
        materialize(module)
    places = _places(module)
    units, policy = list(places), unit.schedule or SchedulePolicy()
    for found in units:
        found.release()
    for_backward, for_next = plan_kept(units, policy)
    for found, place in places.items():
        found.take_place(replace(place, stays_for_backward=found in for_backward, keeps_for_next=found in for_next))
    root = Root(units, unit.device, policy)
    for found in units:
        found.root = root
    return root


def _places(module: nn.Module) -> dict[Unit, Place]:
    """The places of all units at and below a module, in the order of registration."""
    places: dict[Unit, Place] = {}
    at: dict[str, Unit] = {}
    count = 0
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is None:
            continue
        at[name] = unit
        if unit in places:
            continue
        if unit.root is not None and unit.root.program.running is not None:
            raise RuntimeError(f"unit '{name}' is in a forward or backward; finish that before you call its parent")
        above = [name[:end] for end in range(len(name) - 1, -1, -1) if name[end] == "."] + [""] * bool(name)
        around = [at[outer] for outer in above if outer in at]
        for outer in around:
            places[outer] = replace(places[outer], nests=True)
        places[unit] = Place(
            name=name or type(child).__name__,
            index=len(places),
            numbers=range(count, count + len(unit.groups)),
            parent=places[around[0]].index if around else None,
            is_optional=bool(places)
            and (unit.intent.is_optional or any(places[outer].is_optional for outer in around)),
        )
        count += len(unit.groups)
    return places
