"""Uses of sharded parameters outside of a forward of their unit, when they are not gathered.

DTensor handles operations on a parameter alone (`parameter.norm()`, an optimizer step). A layer that mixes it with a
plain tensor, or with a DTensor of another mesh, fails in DTensor. If that error passes through a forward of a unit, the
fix is added to its message.
"""

from __future__ import annotations

import torch

from flatshard import _torch
from flatshard.buffer import ragged
from flatshard.engine.groups.registry import groups

# What DTensor says then; versions of torch differ.
_REFUSALS = ("mixed torch.Tensor and DTensor", "different mesh", "Cross device mesh")
_REMEDY = (
    "Parameters are sharded outside of the forward of their unit (the module that fully_shard was called on). If one "
    "was used there: call that module itself, use `with flatshard.gathered(module):`, or register the method that uses "
    "it with register_fsdp_forward_method(module, name)"
)
_BY_ROWS = "The parameter is sharded with rows=True: only the forward of its nn.Embedding can read it"


def explain(error: BaseException | None, by_rows: bool) -> None:
    """Add the fix to an error of a forward, if DTensor has refused to compute with a sharded parameter.

    ``by_rows``: the forward is that of a unit that is never gathered.
    """
    text = str(error)
    is_explained = _REMEDY in text or _BY_ROWS in text  # by a nested unit
    if isinstance(error, RuntimeError) and not is_explained and any(refusal in text for refusal in _REFUSALS):
        error.args = (f"{text}\n{_BY_ROWS if by_rows else _REMEDY}",)


def _owner(tensor: torch.Tensor) -> str | None:
    """The names of a sharded parameter, or of the base of a view of one, and of its unit."""
    known = [(param, group.owner()) for group in groups() if group.owner is not None for param in group.params]
    exact = [pair for pair in known if pair[0].sharded is tensor]
    for param, unit in exact or [pair for pair in known if _shows(tensor, pair[0].sharded)]:
        if unit is not None:
            reader = "" if unit.rows is None else " (rows=True: only the forward of its nn.Embedding can read it)"
            return f"parameter '{param.name}' of unit '{unit.name}'{reader}"
    return None


def _shows(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a DTensor is a view of a sharded parameter. On a rank without rows of it, all data pointers are equal."""
    mine, other = _torch.local_of(tensor), _torch.local_of(parameter)
    if _torch.is_wrapper(mine) or _torch.is_wrapper(other):
        return False
    place = mine.untyped_storage().data_ptr()
    if place == 0 or place != other.untyped_storage().data_ptr():
        return False
    return mine.numel() > 0 < other.numel() or sorted(tensor.shape) == sorted(parameter.shape)


ragged.owner = _owner
