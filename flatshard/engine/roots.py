"""From a module to its unit, and from a unit to its scope."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from flatshard.engine.keep import plan_kept
from flatshard.engine.scope import Scope
from flatshard.policy import SchedulePolicy

if TYPE_CHECKING:
    from flatshard.engine.unit import Unit

_UNIT = "_flatshard_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of this module, if it did."""
    found: Unit | None = module.__dict__.get(_UNIT)
    return found


def own(module: nn.Module, unit: Unit) -> None:
    """Let `unit_of` find it."""
    module.__dict__[_UNIT] = unit


def scope_of(unit: Unit, module: nn.Module) -> Scope:
    """The scope of a unit. Where it has none, ``module`` is the root of one, and all units below it share it."""
    if unit.scope is not None:
        return unit.scope
    units: list[Unit] = []
    at: dict[str, Unit] = {}
    count = 0
    if any(parameter.is_meta for parameter in module.parameters()):
        from flatshard.engine.materialize import materialize, refuse_meta  # they build on units

        if unit.settings.refuses_meta:
            refuse_meta(module)
        warnings.warn(
            f"{type(module).__name__} has parameters on the meta device, which its first use initialises; if a "
            "checkpoint was to be loaded, it has not been. flatshard.materialize(model) does the same without a word",
            stacklevel=2,
        )
        materialize(module)
    for name, child in module.named_modules():
        found = unit_of(child)
        if found is None:
            continue
        at[name] = found
        if found in units:
            continue
        if found.scope is not None and found.scope.program.running is not None:
            raise RuntimeError(f"unit '{name}' is in a pass of its own; finish that before running its parent")
        found.release()
        found.name = name or type(child).__name__
        found.index = len(units)
        found.numbers = range(count, count + len(found.groups))
        count += len(found.groups)
        found.nests, found.parent, found.is_optional = False, None, bool(units) and found.settings.is_optional
        units.append(found)
        above = name
        while above:
            above = above.rpartition(".")[0]
            if above in at:
                if found.parent is None:
                    found.parent = at[above].index
                at[above].nests = True
                found.is_optional = found.is_optional or at[above].is_optional
    policy = unit.schedule or SchedulePolicy()
    plan_kept(units, policy)
    scope = Scope(units, unit.device, policy)
    for found in units:
        found.scope = scope
    return scope
