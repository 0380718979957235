"""Names of parameters with and without the prefix ``module.`` of a wrapper (megatron_fsdp, DistributedDataParallel)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

_WRAPPERS = re.compile(r"(?:module\.)*")


def renaming(saved: Collection[str], here: Collection[str]) -> Callable[[str], str]:
    """A function from saved names to names of the model: it replaces the prefix that wrappers added to all names."""
    theirs, ours = _wrapped(saved), _wrapped(here)
    return lambda name: ours + name[len(theirs) :] if name.startswith(theirs) else name


def _wrapped(names: Collection[str]) -> str:
    """The repetitions of ``module.`` that all names begin with."""
    found = (_WRAPPERS.match(name) for name in names)
    return min((match.group() for match in found if match), key=len, default="")


def renamed(state: dict[str, Any], *, add: str = "", remove: str = "") -> dict[str, Any]:
    """A state dict of the same tensors with the prefix ``remove`` of each name replaced by ``add``.

    ``state``: the state dict of a model, or of an optimizer as torch's ``get_optimizer_state_dict`` returns it. With
    the result, torch.distributed.checkpoint reads and writes checkpoints of models that were wrapped:

        theirs = renamed(get_model_state_dict(model), add="module.")
        dcp.load({"model": theirs}, checkpoint_id=path)
        set_model_state_dict(model, renamed(theirs, remove="module."))
    """

    if not isinstance(state, dict):
        raise TypeError(f"renamed takes a state dict, not {type(state).__name__}")
    for what, given in (("add", add), ("remove", remove)):
        if not isinstance(given, str):
            raise TypeError(f"{what}={given!r}: must be a string")

    def change(name: str) -> str:
        if not name.startswith(remove):
            raise ValueError(f"'{name}' does not begin with remove={remove!r}")
        return add + name[len(remove) :]

    if state.keys() == {"state", "param_groups"}:
        return with_names(state, change)
    return {change(name): value for name, value in state.items()}


def with_names(optimizer: dict[str, Any], change: Callable[[Any], str]) -> dict[str, Any]:
    """The state dict of an optimizer with ``change`` applied to the names, or numbers, of its parameters."""
    groups = [{**group, "params": [change(name) for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {change(name): entries for name, entries in optimizer["state"].items()}, "param_groups": groups}
