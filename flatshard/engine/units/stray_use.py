"""Sharded parameters that are used outside of a forward of their unit, where nothing has gathered them.

What concerns a parameter alone (`parameter.norm()`, an optimizer's arithmetic) is DTensor's to do. A layer that is
given a plain tensor, or a DTensor of another mesh, is refused by DTensor too, in words that name neither the parameter
nor the remedy; here are better ones. Passes of units pay nothing for it: their parameters are plain tensors. Under
tensor parallelism they are DTensors, and nobody is asked while such a pass runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from flatshard import _torch
from flatshard.buffer import ragged
from flatshard.engine.groups.registry import groups
from flatshard.engine.units.unit import unit_with

_passing: weakref.WeakSet[Any] = weakref.WeakSet()  # what has a pass running that computes with DTensors


def watch_use() -> None:
    """Explain what goes wrong with sharded parameters."""
    ragged.owner[:] = [_owner]
    _watch()


def pass_begins(root: Any) -> None:
    """A pass begins whose parameters are DTensors."""
    _passing.add(root)
    _torch.leave_mixed()


def pass_ends(root: Any) -> None:
    """It is over, or has been given up."""
    _passing.discard(root)
    _watch()


def _watch() -> None:
    if not _passing:
        _torch.on_mixed(_refuse)


def _refuse(op: Any, kind: str, sharded: Sequence[torch.Tensor]) -> None:
    """Raise if one of the tensors is a parameter of a unit, or a view of one."""
    found = [owner for owner in map(_owner, sharded) if owner is not None]
    if found:
        raise RuntimeError(
            f"{op}: got mixed {kind}, because {found[0]}, which is sharded, was used outside of a "
            "forward of that unit. Call the unit itself, run this within `with flatshard.gathered(module):` of the "
            "unit's module, or make the method that does it a forward by register_fsdp_forward_method(module, name)"
        )


def _owner(tensor: torch.Tensor) -> str | None:
    """Of a sharded parameter or a view of one: its name and its unit's."""
    known = [(param, unit_with(group)) for group in groups() for param in group.params]
    exact = [pair for pair in known if pair[0].sharded is tensor]
    for param, unit in exact or [pair for pair in known if _shows(tensor, pair[0].sharded)]:
        if unit is not None:
            reader = "" if unit.rows is None else " (by rows: only the forward of nn.Embedding reads it)"
            return f"parameter '{param.name}' of unit '{unit.name}'{reader}"
    return None


def _shows(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a DTensor is a view of a sharded parameter. Where this rank holds nothing of that, all begin alike."""
    mine, other = _torch.local_of(tensor), _torch.local_of(parameter)
    if _torch.is_wrapper(mine) or _torch.is_wrapper(other) or not _torch.begin_alike(mine, other):
        return False
    return mine.numel() > 0 < other.numel() or sorted(tensor.shape) == sorted(parameter.shape)
