"""Modules that share a parameter only after sharding: loaders tie output layers to embeddings.

Each module had its own parameter in a group. One of the two keeps its place, and the module of the other borrows it, as
if they had shared it from the start. The place of the other parameter in its group stays empty: its part of the buffers
is still gathered, but not used. A group with only empty places is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of, owner_of, retire
from flatshard.engine.parameters.sharded_param import ShardedParam, Site
from flatshard.engine.units.unit import Unit


def tie(unit: Unit, group: ParamGroup, take_over: Callable[[Unit], None]) -> None:
    """Tie modules of ``unit`` to the parameter of another module, if they were given that parameter.

    ``take_over``: called with a unit that was given a parameter that no unit has yet, so that this unit adopts it.
    """
    for index, param in enumerate(group.params):
        for site in list(param.sites):
            found = site.look()
            if found is not None and found is not param.sharded:
                _tie(unit, group, index, site, found, take_over)
    if not any(param.sites for param in group.params):
        unit.groups.remove(group)
        unit.needs.remove(group)


def _tie(
    unit: Unit, group: ParamGroup, index: int, site: Site, found: nn.Parameter, take_over: Callable[[Unit], None]
) -> None:
    assert unit.root is not None
    param = group.params[index]
    for other in unit.root.units if group_of(found) is None else ():
        # No unit has it yet: the innermost unit adopts it.
        if other.index > unit.index and any(place.look() is found for each in _params(other) for place in each.sites):
            take_over(other)
            break
    owner = owner_of(found) if group_of(found) is not None else None
    if owner is None or not is_cut_alike(found, param.sharded):
        return
    lender, lent = owner[0], owner[0].params[owner[1]]
    if not any(each is lent for other in unit.root.units for each in _params(other)):
        return  # of another model
    param.sites.remove(site)
    lent.sites.append(site)
    if lender is not group:
        unit.borrow(lender, lent, site)
    lender.snapshot.add(site, found)
    if not param.sites:
        retire(group, index, *owner)


def _params(unit: Unit) -> Iterator[ShardedParam]:
    return (param for group in unit.groups for param in group.params)
