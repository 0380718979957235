"""From a unit to its root: the units under it, their places, and which of them stay gathered between passes.

A unit that is kept from its forward to its backward, or from the backward of one micro-batch to the forward of the
next, saves one all-gather: the transfer time of its bytes and one latency. Per byte of the budget, the transfer time is
the same for all units, and the latency is larger for smaller units, so small units are kept first. Among units of equal
size, those that are kept for the shortest time come first: the last units of a forward for backward, the first units
for the next forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from flatshard.engine.schedule.optional import OptionalRoot
from flatshard.engine.schedule.root import Root, root_of
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.materialize import materialize, refuse_meta
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
    for name, found in units_below(module):
        if found.root is not None and found.root.program.running is not None:
            raise RuntimeError(f"unit '{name}' is in a forward or backward; finish that before you call its parent")
    units, policy = _placed(module), unit.schedule or SchedulePolicy()
    for found in units:
        found.free()
    # In the order of a forward. Backward gathers some units that stay for the next micro-batch only at its end.
    auto = [found for found in reversed(units) if found.intent.reshard_after_forward == "auto"]
    for_backward = _chosen([found for found in auto if found.unshard_in_backward], policy.keep_for_backward)
    for_next = _chosen([found for found in units if found.unshard_in_forward], policy.keep_for_next)
    for found in units:
        found.stays_for_backward, found.keeps_for_next = found in for_backward, found in for_next
        found.derive()
    kind = OptionalRoot if any(found.is_optional for found in units) else Root
    root = kind(units, unit.device, policy)
    for found in units:
        found.root = root
    return root


def _placed(module: nn.Module) -> list[Unit]:
    """All units at and below a module, in the order of registration, with their places set."""
    units: list[Unit] = []
    at: dict[str, Unit] = {}
    count = 0
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is None:
            continue
        at[name] = unit
        if unit in units:
            continue
        above = [name[:end] for end in range(len(name) - 1, -1, -1) if name[end] == "."] + [""] * bool(name)
        around = [at[outer] for outer in above if outer in at]
        for outer in around:
            outer.nests = True
        unit.name, unit.index = name or type(child).__name__, len(units)
        unit.numbers, unit.nests = range(count, count + len(unit.groups)), False
        unit.parent = around[0].index if around else None
        optional = unit.intent.is_optional or any(outer.is_optional for outer in around)
        unit.is_optional = optional and bool(units)
        units.append(unit)
        count += len(unit.groups)
    return units


def gathered_bytes(unit: Unit) -> int:
    """Device memory of the full weights of a unit, beyond what this rank holds between passes."""
    return sum(group.gathered_bytes for group in unit.groups)


def _chosen(candidates: Sequence[Unit], budget: int) -> set[Unit]:
    """Those that fit into a budget of bytes."""
    chosen = set()
    for unit in sorted(candidates, key=gathered_bytes):
        size = gathered_bytes(unit)
        if 0 < size <= budget:
            chosen.add(unit)
            budget -= size
    return chosen
