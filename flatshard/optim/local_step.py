"""The step of an optimizer on the local shards of its parameters, and its state as DTensors."""

from __future__ import annotations

import functools
import itertools
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

    def __init__(self, flat: bool, keep_dtype: bool, offload_state: bool | None = None) -> None:
        """``flat``: join neighbours. ``keep_dtype``: gradients keep their dtype.

        ``offload_state``: state is in host memory; None: only that of weights in host memory is.
        """
        self.flat = flat
        self.keep_dtype = keep_dtype
        self.offload_state = offload_state
        self.rowwise: Sequence[str] = ()  # names in the state with numbers for each row of a parameter
        self._streamed = StreamedStep()
        self._flat_params: list[FlatParam] = []
        self._by_gradients = weakref.WeakKeyDictionary[Gradients, list[FlatParam]]()
        self._generation = -1  # of the registry when the flat parameters were made; -1: they have not been
        self._without_grad: Sequence[torch.Tensor] = []  # sharded parameters that have no gradient
        self._unsharded: list[list[torch.Tensor]] = []  # per parameter group
        self._sharded: set[int] = set()  # ids of sharded parameters, and of the flat tensors that are stepped for them
        self._ids: list[list[int]] = []  # of the optimizer's parameters, by parameter group
        self.flat_state: defaultdict[Any, State] = defaultdict(dict)  # by flat tensor
        self._public: Any = None  # the optimizer's dict of state, as we know it
        self._public_is_outdated = False  # the flat state may have changed since the public one was read
        self.state_override: Any = None  # what `optimizer.state` is during a step
        self.early_step: Callable[[Optimizer], Any] | None = None  # the step of the class, if backwards run it
        self._stepped_early: set[FlatParam] = set()  # by backwards since the last step
        self._late_parameter: str | None = None  # the name of one that has got a gradient after a backward stepped it

    def step(self, optimizer: Optimizer, base: Callable[[], Any]) -> Any:
        """Run the step of the optimizer's class on the flat parameters that no backward has stepped."""
        if self.early_step is not None and hasattr(optimizer, "found_inf"):
            raise RuntimeError(
                "GradScaler cannot be used with fully_shard_optimizer(..., in_backward=True), because the backward "
                "steps parameters before gradients are unscaled; leave one of the two out"
            )
        stepped, self._stepped_early = self._stepped_early, set()
        late, self._late_parameter = self._late_parameter, None
        if late is not None:
            raise RuntimeError(
                f"parameter '{late}' got another gradient after a backward had stepped it: in_backward=True "
                "needs one backward per step; mark micro-batches with flatshard.microbatch"
            )
        if not self._is_prepared(optimizer, stepped):
            self._prepare(optimizer)  # those that were stepped have no gradients any more
            stepped = set()
        left = [each for each in self._flat_params if each not in stepped]
        result = None
        if left or any(self._unsharded) or not stepped:
            result, ticket = self._run(optimizer, left, self._unsharded, base)
            ticket.wait()
        self._streamed.join()
        streamed, others = ({e.group() for e in self._flat_params if e.is_streamed is kind} for kind in (True, False))
        for group in streamed - others:  # a step on the CPU leaves compute weights as they were
            if group is not None and group.home.host:
                group.note_step()
        return result

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer's step is running, or a load of its state: `optimizer.state` is overridden."""
        return self.state_override is not None

    @contextmanager
    def overriding_state(self, state: Any) -> Iterator[None]:
        """A context in which ``state`` is `optimizer.state`."""
        before, self.state_override = self.state_override, state
        try:
            yield
        finally:
            self.state_override = before

    def step_early(self, optimizer: Optimizer, complete: Sequence[Gradients], reduced: Reduced | None) -> Ticket | None:
        """Step the parameters of groups whose gradients are complete, in a backward.

        A group with a gradient that no flat parameter has is left to `step`. ``reduced``: the gradients of one group in
        host memory, on the device. Returns when the weights can be read.
        """
        assert self.early_step is not None
        by_gradients = {gradients: self._by_gradients.get(gradients, []) for gradients in complete}
        for gradients, flat_params in list(by_gradients.items()):
            if not self._stepped_early.isdisjoint(flat_params):
                self._late_parameter = gradients.params[0].name
                del by_gradients[gradients]
        if not self._is_current(optimizer) or not self._public_is_unchanged():
            return None
        if _torch.has_step_pre_hooks(optimizer):  # they may change gradients and hyperparameters
            return None
        ready: list[FlatParam] = []
        with _torch.PlainAttributes():  # reading gradients otherwise waits for all reduces
            for gradients, flat_params in by_gradients.items():
                known = {id(parameter) for each in flat_params for parameter in each.parameters}
                with_grad = (param.sharded for param in gradients.params if param.sharded.grad is not None)
                if all(id(parameter) in known for parameter in with_grad) and self._attach(flat_params):
                    ready += flat_params
        if not ready:
            return None
        others, base = [()] * len(optimizer.param_groups), functools.partial(self.early_step, optimizer)
        _, ticket = self._run(optimizer, ready, others, base, reduced)
        self._stepped_early.update(ready)
        with _torch.PlainAttributes():
            for parameter in (parameter for each in ready for parameter in each.parameters):
                parameter.grad = None
            for gradients in complete:
                gradients.main_grads.free_cleared()
        return ticket

    def _run(
        self,
        optimizer: Optimizer,
        flat_params: Sequence[FlatParam],
        others: Sequence[Sequence[Any]],
        base: Callable[[], Any],
        reduced: Reduced | None = None,
    ) -> tuple[Any, Ticket]:
        """Step flat parameters, and the ``others`` of each group. Returns the result, and when weights can be read."""
        streamed = [each for each in flat_params if each.is_streamed]
        result, ticket = None, DONE
        try:
            if len(streamed) < len(flat_params) or any(others) or not flat_params:
                result = self._run_unstreamed(optimizer, [e for e in flat_params if not e.is_streamed], others, base)
            if streamed:
                self._public_is_outdated, split = True, SplitStep(optimizer, base)
                ticket = self._streamed.step(
                    streamed, self.flat_state, split, self.overriding_state, self.keep_dtype, reduced
                )
                split.close()
        finally:
            for each in flat_params:
                each.tensor.grad = None  # so that `zero_grad` frees the gradients at once
        return result, ticket

    def _run_unstreamed(
        self, optimizer: Optimizer, flat: Sequence[FlatParam], others: Sequence[Sequence[Any]], base: Callable[[], Any]
    ) -> Any:
        """Step flat parameters that are not streamed, and the ``others``, as the parameters of the optimizer."""
        groups = optimizer.param_groups
        tensors = [[each for each in params if not isinstance(each, DTensor)] for params in others]
        for each in flat:
            tensors[each.number].append(each.tensor)
        # Parameters of tensor subclasses are stepped as they are, and fused kernels take no DTensors beside others.
        dtensors = [[each for each in params if isinstance(each, DTensor)] for params in others]
        triples = list(zip(groups, tensors, dtensors))
        flat_groups = [{**group, "params": plain or others} for group, plain, others in triples]
        more = [{**group, "params": others} for group, plain, others in triples if plain and others]
        optimizer.param_groups = [*flat_groups, *more]
        self._public_is_outdated = True
        try:
            with self.overriding_state(self.flat_state):
                return base()
        finally:
            optimizer.param_groups = groups
            for group, stepped in zip(groups, flat_groups):
                group.update({**stepped, "params": group["params"]})  # some optimizers count in their parameter groups

    def free_gradients(self, others: Iterable[ParamGroup | None] = ()) -> None:
        """Free the memory of gradients that have been set to None, also those of other groups."""
        self.recover_if_broken()
        self._stepped_early.clear()  # by a backward that was given up, if any
        self._streamed.join()
        self._late_parameter = None
        with _torch.PlainAttributes():
            for group in dict.fromkeys([*[each.group() for each in self._flat_params], *others]):
                if group is not None:
                    group.gradients.main_grads.free_cleared()

    def recover_if_broken(self) -> None:
        """Wait for what is still stepped of a backward that an exception has broken off."""
        groups = [each.group() for each in self._flat_params] if self.early_step is not None else []
        units = [unit_with(group) for group in groups if group is not None]
        for root in dict.fromkeys(unit.root for unit in units if unit is not None):
            if root is not None:
                root.recover_if_broken()

    def public_state(self, optimizer: Optimizer) -> Any:
        """The public state, up to date; during the step, the flat one."""
        if self.state_override is not None:
            return self.state_override
        state = optimizer.__dict__["state"]
        if state is not self._public:
            self._flat_params, self._generation, self.flat_state = [], -1, defaultdict(dict)
            self._public, self._public_is_outdated = state, False
        if self._public_is_outdated:
            self._streamed.synchronize()
            elementwise, count = self._elementwise(), len(state)
            for each in self._flat_params:
                if each.tensor in self.flat_state:
                    each.write_state(self.flat_state[each.tensor], elementwise, state)
            for key, value in self.flat_state.items():  # unsharded parameters, and entries that belong to no parameter
                if id(key) not in self._sharded:
                    state[key] = value
            if len(state) != count:
                # Flat parameters have another order on each rank, and the state is gathered in the order of its keys.
                order = [p for group in optimizer.param_groups for p in group["params"] if p in state]
                for key in dict.fromkeys([*order, *state]):
                    state[key] = state.pop(key)
            self._public_is_outdated = False
        return state

    def settle(self) -> bool:
        """Detect changes of the state now, because a captured step cannot. Returns whether there are none."""
        self._public_is_outdated |= self._generation >= 0 and self._public_is_unchanged()
        return self._public_is_outdated

    def _is_current(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the parameters and the state from which the flat parameters were created."""
        is_same = optimizer.__dict__["state"] is self._public and self._generation == generation()
        return is_same and _ids(optimizer) == self._ids

    def _attach(self, flat_params: Iterable[FlatParam]) -> bool:
        """Set the gradients of flat parameters; False if those of one have changed since it was created."""
        for each in flat_params:
            if not each.attach_gradient(self.keep_dtype or each.is_streamed):  # which are cast piece by piece
                return False
        return True

    def _is_prepared(self, optimizer: Optimizer, stepped: set[FlatParam]) -> bool:
        """Whether the flat parameters are valid; if so their gradients are set, unless they are ``stepped``."""
        if not self._is_current(optimizer) or any(_torch.grad_of(each) is not None for each in self._without_grad):
            return False
        if not self._attach([each for each in self._flat_params if each not in stepped]):
            return False
        return self._public_is_unchanged()

    def _public_is_unchanged(self) -> bool:
        """Whether users have not changed the public state: none have read it since a step, or it is as it was then."""
        if self._public_is_outdated:
            return True
        kinds, flat_state = self._elementwise(), self.flat_state
        if not all(e.matches_state(flat_state.get(e.tensor, {}), kinds, self._public) for e in self._flat_params):
            return False
        public, own = (
            {id(key): value for key, value in state.items() if id(key) not in self._sharded}
            for state in (self._public, flat_state)
        )
        return public.keys() == own.keys() and all(value is own[key] for key, value in public.items())

    def _elementwise(self) -> dict[Any, bool]:
        """Per name in the state, whether it has a number for each element. One parameter alone cannot always tell."""
        elementwise: dict[Any, bool] = {}
        for each in self._flat_params:
            for key, value in self.flat_state.get(each.tensor, {}).items():
                # Numbers, or None, may be in place of tensors in parameter groups with other options.
                same = key != "step" and all(held.shape == each.tensor.shape for held in tensors_in(value))
                elementwise[key] = elementwise.get(key, True) and (same or key in self.rowwise)
        return elementwise

    def _prepare(self, optimizer: Optimizer) -> None:
        """Create flat parameters, and fill their state from the public one."""
        state, groups = self.public_state(optimizer), optimizer.param_groups
        _reshard_state(groups, state)
        refuse_replaced(optimizer)
        self._flat_params, self._without_grad, self._unsharded = make_flat_params(groups, state, self.flat)
        self._generation, self._ids = generation(), _ids(optimizer)
        self.flat_state = defaultdict(dict)
        self._sharded = set(map(id, self._without_grad))
        self._by_gradients.clear()
        for each in self._flat_params:
            group = each.group()
            assert group is not None
            self._by_gradients.setdefault(group.gradients, []).append(each)
            each.is_streamed = self._streams(group.home, groups[each.number])
            self._sharded.update(map(id, (each.tensor, *each.parameters)))
            if self.rowwise:
                require_rows(each.parameters[0])
                cut_entries(each.parameters[0], state.get(each.parameters[0], {}))
            joined, elementwise = each.join_state(state)
            if each.is_streamed:
                home = state_home(group.home)
                joined = {key: home.keep(value) if elementwise[key] else value for key, value in joined.items()}
            if joined:
                self.flat_state[each.tensor] = joined
                each.write_state(joined, elementwise, state)  # views replace the tensors that were joined
            if not self._attach([each]):
                raise AssertionError("a flat parameter was made that does not fit its gradients")
        self.flat_state.update({key: value for key, value in state.items() if id(key) not in self._sharded})
        is_apart = any(gradients.main_grads.is_apart for gradients in self._by_gradients)
        if is_apart and not self.flat_state:
            torch.cuda.empty_cache()  # else the state, which is about to be made, splits what the next forward needs
        if self.early_step is not None:
            self._take_over(optimizer)

    def _take_over(self, optimizer: Optimizer) -> None:
        """From now on, backwards step the flat parameters for this optimizer."""
        global _takeovers
        on_final = functools.partial(_step_early, weakref.ref(optimizer))
        streamed = {each.group() for each in self._flat_params if each.is_streamed}
        for group in {each.group() for each in self._flat_params}:
            if group is not None and not group.borrowers:  # a unit elsewhere may add to the gradients of others
                _takeovers += early_optimizer(group) is not optimizer
                group.gradients.on_final, group.gradients.is_streamed = on_final, group in streamed

    def _streams(self, home: Home, options: dict[str, Any]) -> bool:
        """Whether parameters are stepped on the device with state, or also weights, from host memory."""
        if self.offload_state or not home.host:
            return bool(self.offload_state)
        if self.offload_state is False or not (self.flat or self.rowwise):
            return self.early_step is not None
        # The CPU steps fused optimizers faster than the bus carries their state and gradients; but not beside a
        # backward, and not if the gradients are on the device.
        return self.early_step is not None or home.device_grad_bytes > 0 or not options.get("fused")


def _ids(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _step_early(
    optimizer: weakref.ref[Optimizer], complete: Sequence[Gradients], reduced: Reduced | None
) -> Ticket | None:
    """`LocalStep.step_early` of an optimizer, while it exists."""
    target = optimizer()
    if target is None:
        for gradients in complete:
            gradients.on_final = None
        return None
    stepper: LocalStep = target.__dict__[STEPPER]
    return stepper.step_early(target, complete, reduced)


def takeovers() -> int:
    """A number that changes when backwards begin to step parameters for another optimizer, or for a first one."""
    return _takeovers


def early_optimizer(group: ParamGroup | None) -> Optimizer | None:
    """The optimizer whose parameters in a group are stepped in backwards, while it exists."""
    on_final: Any = None if group is None else group.gradients.on_final
    optimizer: Optimizer | None = None if on_final is None else on_final.args[0]()
    return optimizer


def stepped_by_others(optimizer: Optimizer) -> list[tuple[torch.Tensor, ParamGroup]]:
    """Parameters of an optimizer that backwards step for another optimizer that has them too, and their groups.

    An optimizer that it wraps, as a `CombinedOptimizer` does, is no other one: it has the same parameter groups.
    """
    ids_of = functools.cache(lambda other: {*itertools.chain(*_ids(other)), *map(id, other.param_groups)})
    found = []
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            group = group_of(parameter)
            other = early_optimizer(group)
            if group is None or other in (None, optimizer):
                continue
            if id(parameter) in ids_of(other) and id(options) not in ids_of(other):
                found.append((parameter, group))
    return found


def _reshard_state(groups: Sequence[dict[str, Any]], state: Any) -> None:
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
            name = "a parameter" if owner is None else f"'{owner[0]}' of {owner[1]}"
            when, event = "before fully_shard, or while it was unsharded", "fully_shard"
            if sharded:
                when, event = "before another parameter was assigned in its place", "that"
            raise RuntimeError(
                f"parameter group {number} of this {type(optimizer).__name__} holds {name} as it was {when}, so a "
                f"step would not train the model. Build the optimizer after {event}, on model.parameters()"
            )
