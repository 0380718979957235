"""From a parameter to its group, for code that has parameters but no model: optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from flatshard.engine.groups.param_group import ParamGroup

# By the id of the sharded parameter, which exists as long as its group. Not an attribute of the parameter, which would
# be pickled and copied with it.
_GROUPS: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()
SUCCESSOR = "_flatshard_successor"
OWNER = "_flatshard_owner"  # on a parameter of a group, original, sharded or full: its name and the class of its unit
_generation = 0


def register(group: ParamGroup, originals: Iterable[nn.Parameter], in_main: bool = True) -> None:
    """Register the params of ``group``, and which parameters they have replaced.

    ``in_main=False``: they are not in its main buffer, so that they are not stepped there.
    """
    global _generation
    _generation += 1
    for index, (param, original) in enumerate(zip(group.params, originals)):
        if in_main:
            _GROUPS[id(param.sharded)] = group
        # Not a weak reference to the parameter itself: torch cannot move or cast one that has any.
        original.__dict__[SUCCESSOR] = (weakref.ref(group), index)


def adopt(group: ParamGroup, index: int, parameter: nn.Parameter) -> None:
    """Make ``parameter`` param ``index`` of a group; optimizers that hold the previous one detect it."""
    param = group.params[index]
    if _GROUPS.pop(id(param.sharded), None) is not None:
        _GROUPS[id(parameter)] = group
    old, param.sharded = param.sharded, parameter
    parameter.__dict__.pop(SUCCESSOR, None)  # it may have been in the group before
    supersede(group, index, old)


def supersede(group: ParamGroup, index: int, parameter: nn.Parameter) -> None:
    """Record that param ``index`` of a group has replaced ``parameter``, so that optimizers detect it."""
    global _generation
    _generation += 1
    parameter.__dict__[SUCCESSOR] = (weakref.ref(group), index)
    mark = group.params[index].sharded.__dict__.get(OWNER)
    if mark is not None:
        parameter.__dict__[OWNER] = mark


def retire(group: ParamGroup, index: int, successors: ParamGroup, place: int) -> None:
    """No module has param ``index`` of a group any more: param ``place`` of ``successors`` has replaced it."""
    parameter = group.params[index].sharded
    _GROUPS.pop(id(parameter), None)
    parameter.grad = None
    parameter.requires_grad_(False)  # so that no gradient of it is expected
    supersede(successors, place, parameter)


def generation() -> int:
    """A number that changes when parameters may have been replaced."""
    return _generation


def group_of(parameter: torch.Tensor) -> ParamGroup | None:
    """The group that a sharded parameter belongs to; None for any other tensor."""
    return _GROUPS.get(id(parameter))


def sharded_of(parameter: torch.Tensor) -> torch.Tensor:
    """The sharded parameter of a full one. Any other parameter is returned as it is."""
    if OWNER not in parameter.__dict__ or group_of(parameter) is not None:
        return parameter
    found = (param.sharded for group in groups() for param in group.params if param.full is parameter)
    return next(found, parameter)


def groups() -> list[ParamGroup]:
    """All groups whose parameters lie in main buffers."""
    return list(dict.fromkeys(_GROUPS.values()))


def is_replaced(parameter: torch.Tensor) -> bool:
    """Whether `fully_shard`, or a later assignment, has replaced this parameter."""
    if SUCCESSOR not in parameter.__dict__:
        return False
    found = _successor(parameter)
    # The user may have put it back since, which only the next forward detects.
    return found is None or not any(site.look() is parameter for site in found[0].params[found[1]].sites)


def owner_of(parameter: torch.Tensor) -> tuple[ParamGroup, int] | None:
    """The group, and the place in it, of a sharded parameter or of one that it has replaced, while it exists."""
    found = group_of(parameter)
    if found is not None:
        return found, next(i for i, param in enumerate(found.params) if param.sharded is parameter)
    return _successor(parameter)


def successor_of(original: torch.Tensor) -> nn.Parameter | None:
    """The sharded parameter that replaced ``original``, while it exists."""
    found = _successor(original)
    return None if found is None else found[0].params[found[1]].sharded


def _successor(parameter: torch.Tensor) -> tuple[ParamGroup, int] | None:
    group, index = parameter.__dict__.get(SUCCESSOR, (lambda: None, 0))
    known: ParamGroup | None = group()
    return None if known is None else (known, index)
