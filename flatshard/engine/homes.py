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


def settle(group: Group, originals: Iterable[nn.Parameter]) -> None:
    """Remember where the members of ``group`` belong, and which parameters they have replaced."""
    global _settled
    _settled += 1
    for member, original in zip(group.members, originals):
        _GROUPS[id(member.sharded)] = group
        original.__dict__[_SUCCESSOR] = weakref.ref(member.sharded)


def settled() -> int:
    """How many groups have been made: a new number means that parameters may have been replaced."""
    return _settled


def group_of(parameter: torch.Tensor) -> Group | None:
    """The group that a sharded parameter belongs to; None for any other tensor."""
    return _GROUPS.get(id(parameter))


def is_replaced(parameter: torch.Tensor) -> bool:
    """Whether `fully_shard` has put another parameter in the place of this one."""
    return _SUCCESSOR in parameter.__dict__


def successor_of(original: torch.Tensor) -> nn.Parameter | None:
    """The sharded parameter in the place of ``original``, while it exists."""
    found = original.__dict__.get(_SUCCESSOR)
    parameter: nn.Parameter | None = found() if found is not None else None
    return parameter
