"""From a parameter to its group, for those who hold parameters and no model: optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from flatshard.engine.group import Group

# By the identity of the sharded parameter, which lives as long as its group. Kept beside the parameters, not on them:
# what is put on a parameter is pickled and copied with it.
_GROUPS: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_SUCCESSOR = "_flatshard_successor"
_settled = 0


def settle(group: Group, originals: Iterable[nn.Parameter], in_main: bool = True) -> None:
    """Remember where the members of ``group`` belong, and which parameters they have replaced.

    ``in_main=False``: they do not lie in its main buffer, so that nobody is to step them there.
    """
    global _settled
    _settled += 1
    for index, (member, original) in enumerate(zip(group.members, originals)):
        if in_main:
            _GROUPS[id(member.sharded)] = group
        # Not a weak reference to the parameter itself: torch cannot move or cast one that has any.
        original.__dict__[_SUCCESSOR] = (weakref.ref(group), index)


def settled() -> int:
    """How many groups have been made: a new number means that parameters may have been replaced."""
    return _settled


def group_of(parameter: torch.Tensor) -> Group | None:
    """The group that a sharded parameter belongs to; None for any other tensor."""
    return _GROUPS.get(id(parameter))


def is_replaced(parameter: torch.Tensor) -> bool:
    """Whether `fully_shard` has put another parameter in the place of this one."""
    return _SUCCESSOR in parameter.__dict__


def owner_of(parameter: torch.Tensor) -> tuple[Group, int] | None:
    """The group, and the place in it, of a sharded parameter or of one that it has replaced, while it exists."""
    found = group_of(parameter)
    if found is not None:
        return found, next(i for i, member in enumerate(found.members) if member.sharded is parameter)
    group, index = parameter.__dict__.get(_SUCCESSOR, (lambda: None, 0))
    known: Group | None = group()
    return None if known is None else (known, index)


def successor_of(original: torch.Tensor) -> nn.Parameter | None:
    """The sharded parameter in the place of ``original``, while it exists."""
    if _SUCCESSOR not in original.__dict__:
        return None
    group, index = original.__dict__[_SUCCESSOR]
    found: Group | None = group()
    return None if found is None else found.members[index].sharded
