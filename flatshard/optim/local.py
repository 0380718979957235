"""The local side of an optimizer: its step on runs, and the state that others see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.engine.groups.registry import OWNER, generation, is_replaced
from flatshard.optim.runs import Run, State, cut, cut_of


class Local:
    """The local side of one optimizer: what its step sees, and how that becomes the state that others see.

    The state that others see is the optimizer's own dict. It is older than ours after a step, until somebody looks;
    what somebody did to it is noticed at the next step, and ours is then made anew from it.
    """

    def __init__(self, flat: bool, uncast: bool) -> None:
        self.flat = flat
        self.uncast = uncast
        self._runs: list[Run] | None = None
        self._generation = 0  # when the runs were cut
        self._absent: Sequence[torch.Tensor] = []
        self._others: list[list[torch.Tensor]] = []
        self._ids: list[list[int]] = []
        self._state: defaultdict[Any, State] = defaultdict(dict)
        self._outer: Any = None  # the optimizer's dict as we know it
        self._outdated = False
        self._looked = True
        self._lent = False

    @property
    def is_lent(self) -> bool:
        """Whether the optimizer's step is running, and has our state."""
        return self._lent

    def step(self, optimizer: Optimizer, base: Callable[[], Any]) -> Any:
        """Run the step of the optimizer's class on the runs."""
        groups = optimizer.param_groups
        if not self._is_prepared(optimizer):
            self._prepare(optimizer)
        assert self._runs is not None
        tensors = [[each for each in others if not isinstance(each, DTensor)] for others in self._others]
        for run in self._runs:
            tensors[run.number].append(run.tensor)
        # Parameters of tensor subclasses are stepped as they are, and fused kernels take no DTensors beside others.
        apart = [[each for each in others if isinstance(each, DTensor)] for others in self._others]
        lent = [{**group, "params": mine or others} for group, mine, others in zip(groups, tensors, apart)]
        both = [(group, others) for group, mine, others in zip(groups, tensors, apart) if mine and others]
        more = [{**group, "params": others} for group, others in both]
        optimizer.param_groups, self._lent = [*lent, *more], True
        self._outdated, self._looked = True, False
        try:
            return base()
        finally:
            optimizer.param_groups, self._lent = groups, False
            for group, mine in zip(groups, lent):
                mine["params"] = group["params"]
                group.update(mine)  # some optimizers count in their parameter groups
            for run in self._runs:
                run.tensor.grad = None  # so that `zero_grad` frees the gradients at once

    def rest_gradients(self) -> None:
        """Free the memory of gradients that have been set to None."""
        with _torch.PlainAttributes():
            for group in dict.fromkeys(run.group for run in self._runs or ()):
                if group is not None:
                    group.gradients.main_grads.rest()

    def look(self, optimizer: Optimizer) -> Any:
        """The state as others see it, up to date; during the step, ours."""
        if self._lent:
            return self._state
        outer = optimizer.__dict__["state"]
        if outer is not self._outer:
            self._forget()
            self._outer = outer
        self._looked = True
        if self._outdated and self._runs is not None:
            kinds, known = self._kinds(), len(outer)
            for run in self._runs:
                if run.tensor in self._state:
                    run.show(self._state[run.tensor], kinds, outer)
            ours = {id(run.tensor) for run in self._runs}
            for key, value in self._state.items():  # parameters that are not sharded, and what is of none
                if id(key) not in ours:
                    outer[key] = value
            if len(outer) != known:
                # Runs lie in another order on each rank, and whoever gathers the state goes by the order of its keys.
                order = [p for group in optimizer.param_groups for p in group["params"] if p in outer]
                entries = {key: outer.pop(key) for key in [*order, *(key for key in outer if key not in set(order))]}
                outer.update(entries)
            self._outdated = False
        return outer

    def tensors(self) -> list[torch.Tensor]:
        """Those of the state. Does not count as a look."""
        values = [value for state in self._state.values() for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def settle(self) -> bool:
        """See now what others have done to the state, since a step that is captured cannot. Whether it is nothing."""
        if self._looked and self._runs is not None and self._agrees():
            self._looked = False
        return not self._looked

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        """Whether the runs are still right; if so they have their gradients."""
        if self._runs is None or optimizer.__dict__["state"] is not self._outer or self._generation != generation():
            return False
        if [list(map(id, group["params"])) for group in optimizer.param_groups] != self._ids:
            return False
        if any(parameter.grad is not None for parameter in self._absent):
            return False
        if not all(run.is_current and run.attach(self.uncast) for run in self._runs):
            return False
        return not self._looked or self._agrees()

    def _agrees(self) -> bool:
        """Whether those who have looked at the state have left it as it was."""
        assert self._runs is not None
        kinds, known = self._kinds(), {id(parameter) for parameter in self._absent}
        for run in self._runs:
            if not run.agrees(self._state.get(run.tensor, {}), kinds, self._outer):
                return False
            known.update(map(id, run.parameters))
        rest = {id(key): key for key in self._outer if id(key) not in known}
        ours = {id(run.tensor) for run in self._runs}
        mine = {id(key) for key in self._state if id(key) not in ours}
        return rest.keys() == mine and all(self._outer[key] is self._state[key] for key in rest.values())

    def _kinds(self) -> dict[Any, bool]:
        """Per name in the state, whether it has a number for each element. One parameter alone cannot always tell."""
        assert self._runs is not None
        kinds: dict[Any, bool] = {}
        for run in self._runs:
            for key, value in self._state.get(run.tensor, {}).items():
                same = isinstance(value, torch.Tensor) and value.shape == run.tensor.shape and key != "step"
                kinds[key] = kinds.get(key, True) and same
        return kinds

    def _prepare(self, optimizer: Optimizer) -> None:
        """Cut runs, and fill our state from the one that others see."""
        outer = self.look(optimizer)
        groups = optimizer.param_groups
        _cut_as_parameters(groups, outer)
        refuse_replaced(optimizer)
        self._runs, self._absent, self._others = cut(groups, outer, self.flat)
        self._generation = generation()
        self._ids = [list(map(id, group["params"])) for group in groups]
        self._state = defaultdict(dict)
        sharded = set(map(id, self._absent))
        for run in self._runs:
            taken, kinds = run.take(outer)
            if taken:
                self._state[run.tensor] = taken
                run.show(taken, kinds, outer)  # views take the place of what was joined, which is freed
            sharded.update(map(id, run.parameters))
            if not run.attach(self.uncast):
                raise AssertionError("a run was cut that does not fit its gradients")
        for key, value in outer.items():
            if id(key) not in sharded:
                self._state[key] = value

    def _forget(self) -> None:
        self._runs, self._outdated, self._state = None, False, defaultdict(dict)


# Of one number per parameter, whatever its shape: names in the state of torch's optimizers.
_PER_PARAMETER = {"step", "mu_product", "eta", "mu"}


def _cut_as_parameters(groups: Sequence[dict[str, Any]], state: Any) -> None:
    """Cut state anew that was loaded in another form, as torch's full state dicts give it.

    In the order of the parameters: runs lie in another order on each rank, and gathering is collective.
    """
    for parameter in (p for group in groups for p in group["params"] if isinstance(p, DTensor)):
        for key, value in list(state.get(parameter, {}).items()):
            if isinstance(value, DTensor) and cut_of(value) != cut_of(parameter):
                fresh = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                state[parameter][key] = fresh.copy_(value)
            elif type(value) is torch.Tensor and value.shape == parameter.shape == () and key not in _PER_PARAMETER:
                state[parameter][key] = _torch.like_dtensor(parameter, value.to(parameter.device))


# Optimizers from before sharding


def refuse_replaced(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner = parameter.__dict__.get(OWNER)
            sharded = isinstance(parameter, DTensor)
            if not is_replaced(parameter) and (owner is None or sharded):
                continue
            known = "a parameter" if owner is None else f"'{owner[0]}' of {owner[1]}"
            when = (
                "as it was before another parameter was assigned in its place"
                if sharded
                else "as it was before fully_shard, or while it was unsharded"
            )
            raise RuntimeError(
                f"parameter group {number} of this {type(optimizer).__name__} holds {known} {when}; a step on it would "
                f"not train the model. Build the optimizer after {'that' if sharded else 'fully_shard'}, on "
                "model.parameters()"
            )
