"""Modules that come to share a parameter after sharding, as loaders tie output layers to embeddings.

Each had a parameter of its own in a group. One of the two keeps its place there, and the other's module borrows it, as
if they had shared it from the start. The other's own place in its group is left empty: what lies there in the buffers
is gathered in vain. A group all of whose places are empty is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.homes import group_of, owner_of, retire
from flatshard.engine.parameters import Member, Site
from flatshard.engine.unit import Unit
from flatshard.engine.weights import Group


def tie(unit: Unit, group: Group, take_over: Callable[[Unit], None]) -> None:
    """Let modules of ``unit`` that were given a parameter of another place in the model share it.

    ``take_over``: called with a unit that was given a parameter which nobody has yet, so that it has it.
    """
    for index, member in enumerate(group.members):
        for site in list(member.sites):
            found = site.look()
            if found is not None and found is not member.sharded:
                _tie(unit, group, index, site, found, take_over)
    if not any(member.sites for member in group.members):
        unit.groups.remove(group)
        unit.needs.remove(group)


def _tie(
    unit: Unit, group: Group, index: int, site: Site, found: nn.Parameter, take_over: Callable[[Unit], None]
) -> None:
    assert unit.scope is not None
    member = group.members[index]
    for other in unit.scope.units if group_of(found) is None else ():
        # Nobody's yet: the innermost unit is to have it.
        if other.index > unit.index and any(place.look() is found for each in _members(other) for place in each.sites):
            take_over(other)
            break
    owner = owner_of(found) if group_of(found) is not None else None
    if owner is None or not is_cut_alike(found, member.sharded):
        return
    lender, lent = owner[0], owner[0].members[owner[1]]
    if not any(each is lent for other in unit.scope.units for each in _members(other)):
        return  # of another model
    member.sites.remove(site)
    lent.sites.append(site)
    if lender is not group:
        unit.borrow(lender, lent, site)
    lender.look.add(site, found)
    if not member.sites:
        retire(group, index, *owner)


def _members(unit: Unit) -> Iterator[Member]:
    return (member for group in unit.groups for member in group.members)
