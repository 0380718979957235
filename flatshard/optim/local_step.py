"""The step of an optimizer on the local shards of its parameters, and its state as DTensors."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.buffer import DONE, Ticket
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.main_grads import Reduced
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import OWNER, generation, group_of, is_replaced
from flatshard.engine.units.unit import unit_with
from flatshard.engine.weights.offload import Home
from flatshard.optim.adamw8bit import cut_entries, require_rows
from flatshard.optim.flat_params import PER_PARAMETER, FlatParam, State, make_flat_params, sharding_of, tensors_in
from flatshard.optim.split_step import SplitStep
from flatshard.optim.streaming import StreamedStep, state_home

STEPPER = "_flatshard_stepper"  # on an optimizer, what steps it
_takeovers = 0


class LocalStep:
    """Steps one optimizer on flat local tensors, and keeps its public state up to date.

    The public state is the optimizer's own dict, by parameter. After a step it is outdated until it is read. The next
    step detects changes that users have made to it, and rebuilds the state of the flat tensors from it.
    """

    def __init__(self, flat: bool, uncast: bool, offloads: bool | None = None) -> None:
        """``flat``: join neighbours. ``uncast``: gradients keep their dtype. ``offloads``: state is in host memory.

        With None, that is so for weights in host memory only.
        """
        self.flat = flat
        self.uncast = uncast
        self.offloads = offloads
        self.rowwise: Sequence[str] = ()  # names in the state with numbers for each row of a parameter
        self._streamed = StreamedStep()
        self._flat_params: list[FlatParam] = []
        self._by_gradients = weakref.WeakKeyDictionary[Gradients, list[FlatParam]]()
        self._generation = -1  # when the flat parameters were made, if they have been
        self._absent: Sequence[torch.Tensor] = []
        self._others: list[list[torch.Tensor]] = []
        self._sharded: set[int] = set()  # ids of sharded parameters, and of the flat tensors that are stepped for them
        self._ids: list[list[int]] = []
        self.flat_state: defaultdict[Any, State] = defaultdict(dict)  # by flat tensor
        self._outer: Any = None  # the optimizer's dict as we know it
        self._outdated = False  # the flat state may have changed since the public one was read
        self.lent: Any = None  # what `optimizer.state` is meanwhile
        self.early: Callable[[Optimizer], Any] | None = None  # the step of the optimizer's class, if backwards run it
        self._stepped: set[FlatParam] = set()  # by the backward before this step
        self._again: str | None = None  # a parameter that has got gradients after that

    def step(self, optimizer: Optimizer, base: Callable[[], Any]) -> Any:
        """Run the step of the optimizer's class on the flat parameters that no backward has stepped."""
        if self.early is not None and hasattr(optimizer, "found_inf"):
            raise RuntimeError(
                "GradScaler cannot be used with fully_shard_optimizer(..., in_backward=True), because the backward "
                "steps parameters before gradients are unscaled; leave one of the two out"
            )
        again, self._again = self._again, None
        if again is not None:
            self._stepped.clear()  # gradients may be cleared without `zero_grad` of this optimizer
            raise RuntimeError(
                f"parameter '{again}' got another gradient after a backward had stepped it: in_backward=True "
                "needs one backward per step; mark micro-batches with flatshard.microbatch"
            )
        stepped, self._stepped = self._stepped, set()
        if not self._is_prepared(optimizer, stepped):
            self._prepare(optimizer)  # those that were stepped have no gradients any more
            stepped = set()
        left = [each for each in self._flat_params if each not in stepped]
        result = None
        if left or any(self._others) or not stepped:
            result, ticket = self._run(optimizer, left, self._others, base)
            ticket.wait()
        self._streamed.join()
        streamed, here = ({e.group() for e in self._flat_params if e.is_streamed is kind} for kind in (True, False))
        for group in streamed - here:  # a step on the CPU leaves compute weights as they were
            if group is not None and group.home.host:
                group.note_step()
        return result

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer's step is running, or something else that must see only what it is lent."""
        return self.lent is not None

    @contextmanager
    def lending(self, state: Any) -> Iterator[None]:
        """Within it, this is `optimizer.state`."""
        before, self.lent = self.lent, state
        try:
            yield
        finally:
            self.lent = before

    def step_early(self, optimizer: Optimizer, complete: Sequence[Gradients], reduced: Reduced | None) -> Ticket | None:
        """Step the parameters of groups whose gradients are complete. A group of which any is new is left to `step`.

        ``reduced``: the gradients of one group in host memory, on the device. Returns when the weights can be read.
        """
        assert self.early is not None
        ours = {gradients: self._by_gradients.get(gradients, []) for gradients in complete}
        for gradients, found in list(ours.items()):
            if not self._stepped.isdisjoint(found):
                self._again = gradients.params[0].name
                del ours[gradients]
        if not self._is_known(optimizer) or not (self._outdated or self._agrees()):
            return None
        mine: list[FlatParam] = []
        with _torch.PlainAttributes():  # who reads gradients otherwise waits for all reduces
            for gradients, found in ours.items():
                known = {id(parameter) for each in found for parameter in each.parameters}
                having = (param.sharded for param in gradients.params if param.sharded.grad is not None)
                if all(id(parameter) in known for parameter in having) and self._attach(found):
                    mine += found
        if not mine:
            return None
        beside, base = [()] * len(optimizer.param_groups), functools.partial(self.early, optimizer)
        _, ticket = self._run(optimizer, mine, beside, base, reduced)
        self._stepped.update(mine)
        with _torch.PlainAttributes():
            for parameter in (parameter for each in mine for parameter in each.parameters):
                parameter.grad = None
            for gradients in complete:
                gradients.main_grads.free_cleared()
        return ticket

    def _run(
        self,
        optimizer: Optimizer,
        mine: Sequence[FlatParam],
        beside: Sequence[Sequence[Any]],
        base: Callable[[], Any],
        reduced: Reduced | None = None,
    ) -> tuple[Any, Ticket]:
        """Step flat parameters, and others ``beside`` them. Returns the result, and when weights can be read."""
        streamed = [each for each in mine if each.is_streamed]
        result, ticket = None, DONE
        try:
            if len(streamed) < len(mine) or any(beside) or not mine:
                result = self._run_here(optimizer, [each for each in mine if not each.is_streamed], beside, base)
            if streamed:
                self._outdated, split = True, SplitStep(optimizer, base)
                ticket = self._streamed.step(streamed, self.flat_state, split, self.lending, self.uncast, reduced)
                split.close()
        finally:
            for each in mine:
                each.tensor.grad = None  # so that `zero_grad` frees the gradients at once
        return result, ticket

    def _run_here(
        self, optimizer: Optimizer, mine: Sequence[FlatParam], beside: Sequence[Sequence[Any]], base: Callable[[], Any]
    ) -> Any:
        """Replace the optimizer's parameters by flat ones for a step; other parameters stay."""
        groups = optimizer.param_groups
        tensors = [[each for each in others if not isinstance(each, DTensor)] for others in beside]
        for each in mine:
            tensors[each.number].append(each.tensor)
        # Parameters of tensor subclasses are stepped as they are, and fused kernels take no DTensors beside others.
        dtensors = [[each for each in others if isinstance(each, DTensor)] for others in beside]
        lent = [{**group, "params": plain or others} for group, plain, others in zip(groups, tensors, dtensors)]
        more = [
            {**group, "params": others} for group, plain, others in zip(groups, tensors, dtensors) if plain and others
        ]
        optimizer.param_groups = [*lent, *more]
        self._outdated = True
        try:
            with self.lending(self.flat_state):
                return base()
        finally:
            optimizer.param_groups = groups
            for group, was_lent in zip(groups, lent):
                was_lent["params"] = group["params"]
                group.update(was_lent)  # some optimizers count in their parameter groups

    def free_gradients(self, others: Iterable[ParamGroup | None] = ()) -> None:
        """Free the memory of gradients that have been set to None, also those of other groups."""
        self.recover_if_broken()
        self._stepped.clear()  # by a backward that was given up, if any
        self._streamed.join()
        self._again = None
        with _torch.PlainAttributes():
            for group in dict.fromkeys([*[each.group() for each in self._flat_params], *others]):
                if group is not None:
                    group.gradients.main_grads.free_cleared()

    def recover_if_broken(self) -> None:
        """Wait for what is still stepped of a backward that an exception has broken off."""
        groups = [each.group() for each in self._flat_params] if self.early is not None else []
        units = [unit_with(group) for group in groups if group is not None]
        for root in dict.fromkeys(unit.root for unit in units if unit is not None):
            if root is not None:
                root.recover_if_broken()

    def public_state(self, optimizer: Optimizer) -> Any:
        """The public state, up to date; during the step, the flat one."""
        if self.lent is not None:
            return self.lent
        outer = optimizer.__dict__["state"]
        if outer is not self._outer:
            self._flat_params, self._generation, self.flat_state = [], -1, defaultdict(dict)
            self._outer, self._outdated = outer, False
        if self._outdated:
            self._streamed.synchronize()
            kinds, known = self._kinds(), len(outer)
            for each in self._flat_params:
                if each.tensor in self.flat_state:
                    each.write_state(self.flat_state[each.tensor], kinds, outer)
            for key, value in self.flat_state.items():  # parameters that are not sharded, and what is of none
                if id(key) not in self._sharded:
                    outer[key] = value
            if len(outer) != known:
                # Flat parameters lie in another order on each rank, and the state is gathered in the order of its keys.
                order = [p for group in optimizer.param_groups for p in group["params"] if p in outer]
                for key in dict.fromkeys([*order, *outer]):
                    outer[key] = outer.pop(key)
            self._outdated = False
        return outer

    def settle(self) -> bool:
        """Detect changes of the state now, because a captured step cannot. Returns whether there are none."""
        self._outdated = self._outdated or (self._generation >= 0 and self._agrees())
        return self._outdated

    def _is_known(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the parameters and the state from which the flat parameters were created."""
        is_known = optimizer.__dict__["state"] is self._outer and self._generation == generation()
        return is_known and _ids(optimizer) == self._ids

    def _attach(self, flat_params: Iterable[FlatParam]) -> bool:
        for each in flat_params:
            if not each.attach_gradient(self.uncast or each.is_streamed):  # what is streamed is cast piece by piece
                return False
        return True

    def _is_prepared(self, optimizer: Optimizer, stepped: set[FlatParam]) -> bool:
        """Whether the flat parameters are valid; if so their gradients are set, unless they are ``stepped``."""
        if not self._is_known(optimizer) or any(_torch.grad_of(parameter) is not None for parameter in self._absent):
            return False
        if not self._attach([each for each in self._flat_params if each not in stepped]):
            return False
        return self._outdated or self._agrees()

    def _agrees(self) -> bool:
        """Whether the public state that was read has not been changed."""
        kinds = self._kinds()
        if not all(e.matches_state(self.flat_state.get(e.tensor, {}), kinds, self._outer) for e in self._flat_params):
            return False
        rest = {id(key): key for key in self._outer if id(key) not in self._sharded}
        mine = {id(key) for key in self.flat_state if id(key) not in self._sharded}
        return rest.keys() == mine and all(self._outer[key] is self.flat_state[key] for key in rest.values())

    def _kinds(self) -> dict[Any, bool]:
        """Per name in the state, whether it has a number for each element. One parameter alone cannot always tell."""
        kinds: dict[Any, bool] = {}
        for each in self._flat_params:
            for key, value in self.flat_state.get(each.tensor, {}).items():
                # Numbers, or None, may be in place of tensors in parameter groups with other options.
                same = key != "step" and all(held.shape == each.tensor.shape for held in tensors_in(value))
                kinds[key] = kinds.get(key, True) and (same or key in self.rowwise)
        return kinds

    def _prepare(self, optimizer: Optimizer) -> None:
        """Create flat parameters, and fill their state from the public one."""
        outer = self.public_state(optimizer)
        _cut_as_parameters(optimizer.param_groups, outer)
        refuse_replaced(optimizer)
        self._flat_params, self._absent, self._others = make_flat_params(optimizer.param_groups, outer, self.flat)
        self._generation, self._ids = generation(), _ids(optimizer)
        self.flat_state = defaultdict(dict)
        self._sharded = set(map(id, self._absent))
        self._by_gradients.clear()
        for each in self._flat_params:
            group = each.group()
            assert group is not None
            self._by_gradients.setdefault(group.gradients, []).append(each)
            each.is_streamed = self._streams(group.home, optimizer.param_groups[each.number])
            self._sharded.update(map(id, (each.tensor, *each.parameters)))
            if self.rowwise:
                require_rows(each.parameters[0])
                cut_entries(each.parameters[0], outer.get(each.parameters[0], {}))
            taken, kinds = each.join_state(outer)
            if each.is_streamed:
                home = state_home(group.home)
                taken = {key: home.keep(value) if kinds[key] else value for key, value in taken.items()}
            if taken:
                self.flat_state[each.tensor] = taken
                each.write_state(taken, kinds, outer)  # views take the place of what was joined, which is freed
            if not self._attach([each]):
                raise AssertionError("a flat parameter was made that does not fit its gradients")
        self.flat_state.update({key: value for key, value in outer.items() if id(key) not in self._sharded})
        groups = {each.group() for each in self._flat_params}
        if not self.flat_state and any(group is not None and group.gradients.main_grads.is_apart for group in groups):
            torch.cuda.empty_cache()  # else the state, which is about to be made, splits what the next forward needs
        streamed = {each.group() for each in self._flat_params if each.is_streamed}
        on_final = functools.partial(_step_early, weakref.ref(optimizer))
        for group in groups if self.early is not None else ():
            if group is not None and not group.borrowers:  # a unit elsewhere may add to the gradients of others
                _note_takeover(optimizer, group)
                group.gradients.on_final, group.gradients.is_streamed = on_final, group in streamed

    def _streams(self, home: Home, options: dict[str, Any]) -> bool:
        """Whether parameters are stepped on the device with state, or also weights, from host memory."""
        if self.offloads or not home.host:
            return bool(self.offloads)
        if self.offloads is False or not (self.flat or self.rowwise):
            return self.early is not None
        # The CPU steps fused optimizers faster than the bus carries their state and gradients; but not beside a
        # backward, and not if the gradients are on the device.
        return self.early is not None or home.device_grad_bytes > 0 or not options.get("fused")


def _ids(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _step_early(
    optimizer: weakref.ref[Optimizer], complete: Sequence[Gradients], reduced: Reduced | None
) -> Ticket | None:
    """The gradients of some groups are complete."""
    known = optimizer()
    if known is None:
        for gradients in complete:
            gradients.on_final = None
        return None
    stepper: LocalStep = known.__dict__[STEPPER]
    return stepper.step_early(known, complete, reduced)


def takeovers() -> int:
    """A number that changes when backwards begin to step parameters for another optimizer, or for a first one."""
    return _takeovers


def _note_takeover(optimizer: Optimizer, group: ParamGroup) -> None:
    global _takeovers
    _takeovers += stepped_for(group) is not optimizer


def stepped_for(group: ParamGroup | None) -> Optimizer | None:
    """The optimizer for which backwards step the parameters of a group, while it exists."""
    on_final: Any = None if group is None else group.gradients.on_final
    found: Optimizer | None = None if on_final is None else on_final.args[0]()
    return found


def stepped_for_others(optimizer: Optimizer) -> list[tuple[torch.Tensor, ParamGroup]]:
    """Parameters of an optimizer that backwards step for another one that has them too, and their groups.

    Not for one that it wraps, such as those of a `CombinedOptimizer`: they have the same dicts as parameter groups.
    """
    found, held = [], dict[Optimizer, set[int]]()
    listed = [(each, parameter) for each in optimizer.param_groups for parameter in each["params"]]
    for options, parameter in listed:
        group = group_of(parameter)
        other = stepped_for(group)
        if group is None or other is None or other is optimizer:
            continue
        if other not in held:
            held[other] = {number for numbers in _ids(other) for number in numbers}
            held[other].update(map(id, other.param_groups))
        if id(parameter) in held[other] and id(options) not in held[other]:
            found.append((parameter, group))
    return found


def _cut_as_parameters(groups: Sequence[dict[str, Any]], state: Any) -> None:
    """Shard state again that was loaded in another form, such as torch's full state dicts.

    In the order of the parameters: the order of flat parameters differs between ranks, and gathering is collective.
    """
    for parameter in (p for group in groups for p in group["params"] if isinstance(p, DTensor)):
        for key, value in list(state.get(parameter, {}).items()):
            if any(isinstance(e, DTensor) and sharding_of(e) != sharding_of(parameter) for e in tensors_in(value)):
                state[parameter][key] = _torch.map_leaves(DTensor, functools.partial(_cut_anew, parameter), value)
        wrap_scalars(parameter, state)


def _cut_anew(parameter: DTensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def wrap_scalars(parameter: torch.Tensor, state: Any) -> None:
    """Convert loaded state of parameters without dims to DTensors, as an optimizer creates it.

    torch's functions that distribute a full state dict leave scalars as plain tensors.
    """
    for key, value in state.get(parameter, {}).items() if parameter.dim() == 0 else ():
        if type(value) is torch.Tensor and value.dim() == 0 and key not in PER_PARAMETER:
            state[parameter][key] = _torch.like_dtensor(parameter, value.to(_torch.local_of(parameter).device))


# Optimizers from before sharding


def refuse_replaced(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner = parameter.__dict__.get(OWNER)
            sharded = isinstance(parameter, DTensor)
            if not is_replaced(parameter) and (owner is None or sharded):
                continue
            known = "a parameter" if owner is None else f"'{owner[0]}' of {owner[1]}"
            when, event = "before fully_shard, or while it was unsharded", "fully_shard"
            if sharded:
                when, event = "before another parameter was assigned in its place", "that"
            raise RuntimeError(
                f"parameter group {number} of this {type(optimizer).__name__} holds {known} as it was {when}, so a "
                f"step would not train the model. Build the optimizer after {event}, on model.parameters()"
            )
