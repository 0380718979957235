"""Sharded parameters that are used outside of a forward of their unit, where nothing has gathered them.

What concerns a parameter alone (`parameter.norm()`, an optimizer's arithmetic) is DTensor's to do. A layer that is
given a plain tensor, or a DTensor of another mesh, is refused by DTensor. Where that error passes a forward of a unit,
the remedy is added to it.
"""

from __future__ import annotations

import torch

from flatshard import _torch
from flatshard.buffer import ragged
from flatshard.engine.groups.registry import groups

# What DTensor says then; versions of torch differ.
_REFUSALS = ("mixed torch.Tensor and DTensor", "different mesh", "Cross device mesh")
_REMEDY = (
    "Parameters are sharded outside of a forward of their unit. If one was used there: call the unit itself, run this "
    "within `with flatshard.gathered(module):` of the unit's module, or make the method that does it a forward by "
    "register_fsdp_forward_method(module, name)"
)
_BY_ROWS = "The parameter is sharded by rows: only the forward of nn.Embedding reads it"


def explain(error: BaseException | None, by_rows: bool) -> None:
    """Add the remedy to an error that a forward raises, if DTensor has refused to compute with what it was given.

    ``by_rows``: the forward is that of a unit which is never gathered.
    """
    text = str(error)
    told = _REMEDY in text or _BY_ROWS in text  # on its way through a unit inside
    if isinstance(error, RuntimeError) and not told and any(refusal in text for refusal in _REFUSALS):
        error.args = (f"{text}\n{_BY_ROWS if by_rows else _REMEDY}",)


def _owner(tensor: torch.Tensor) -> str | None:
    """Of a sharded parameter or a view of one: its name and its unit's."""
    known = [(param, group.owner()) for group in groups() if group.owner is not None for param in group.params]
    exact = [pair for pair in known if pair[0].sharded is tensor]
    for param, unit in exact or [pair for pair in known if _shows(tensor, pair[0].sharded)]:
        if unit is not None:
            reader = "" if unit.rows is None else " (by rows: only the forward of nn.Embedding reads it)"
            return f"parameter '{param.name}' of unit '{unit.name}'{reader}"
    return None


def _shows(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a DTensor is a view of a sharded parameter. Where this rank holds nothing of that, all begin alike."""
    mine, other = _torch.local_of(tensor), _torch.local_of(parameter)
    if _torch.is_wrapper(mine) or _torch.is_wrapper(other):
        return False
    place = mine.untyped_storage().data_ptr()
    if place == 0 or place != other.untyped_storage().data_ptr():
        return False
    return mine.numel() > 0 < other.numel() or sorted(tensor.shape) == sorted(parameter.shape)


ragged.owner = _owner
