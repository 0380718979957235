"""Several optimizers as one: one kind for matrices, another for all other parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, which may run a backward; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CombinedOptimizer(Optimizer):
    """Optimizers with separate parameters that are stepped, saved and scheduled as one.

    ``param_groups`` is the concatenation of theirs, with the same dicts, so that a change of an option, for example by
    a scheduler, applies to them. ``state_dict`` is that of one optimizer with all these groups. A closure is evaluated
    once, before the first step. To add a parameter group, add it to one of the optimizers.
    """

    optimizers: list[Optimizer]

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        listed = list(optimizers)
        odd = next((each for each in listed if not isinstance(each, Optimizer)), None)
        if odd is not None or not listed:
            raise TypeError(
                f"CombinedOptimizer takes one or more optimizers, not {'none' if odd is None else repr(odd)}"
            )
        ids: set[int] = set()
        for parameter in (p for each in listed for group in each.param_groups for p in group["params"]):
            if id(parameter) in ids:
                raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is in two optimizers; give it to one")
            ids.add(id(parameter))
        # What `Optimizer.__init__` would make of its own groups is theirs here; this makes the rest. Schedulers look
        # into ``defaults`` for what all groups have.
        shared = {key: value for key, value in listed[0].defaults.items() if all(key in o.defaults for o in listed)}
        super().__setstate__({"optimizers": listed, "defaults": shared})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state of all of them, read-only."""
        return {key: value for each in self.optimizers for key, value in each.state.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        for each in self.optimizers:
            each.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("CombinedOptimizer has no add_param_group: call it on one of its `optimizers`")

    def state_dict(self) -> dict[str, Any]:
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        for each in self.optimizers:
            theirs, first = each.state_dict(), sum(len(group["params"]) for group in joined["param_groups"])
            joined["state"].update({first + number: value for number, value in theirs["state"].items()})
            for group in theirs["param_groups"]:
                joined["param_groups"].append({**group, "params": [first + number for number in group["params"]]})
        return joined

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or what one optimizer with the same groups gives."""
        given, count = len(state_dict["param_groups"]), len(self.param_groups)
        if given != count:
            raise ValueError(f"the state dict has {given} parameter groups; build optimizers with as many, not {count}")
        for each, share in self._shares(state_dict):
            each.load_state_dict(share)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take parameter groups and state by parameter, as `flatshard.checkpoint.load` gives them."""
        if "param_groups" not in state:
            super().__setstate__(state)
            return
        for each, share in self._shares(state):
            each.__setstate__(share)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    def __repr__(self) -> str:
        return f"CombinedOptimizer({self.optimizers!r})"

    def _shares(self, both: dict[str, Any]) -> Iterable[tuple[Optimizer, dict[str, Any]]]:
        """Each optimizer with its parameter groups, and the state of their parameters."""
        groups = iter(both["param_groups"])
        for each in self.optimizers:
            theirs = list(itertools.islice(groups, len(each.param_groups)))
            listed = {key for group in theirs for key in group["params"]}
            state = {key: value for key, value in both["state"].items() if key in listed}
            yield each, {"state": state, "param_groups": theirs}
