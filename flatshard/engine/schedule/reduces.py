"""The reduces of a root: their order, how far gradients are reduced, and which reduces are in flight."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flatshard import _recording, _torch
from flatshard.buffer import Pool
from flatshard.engine.gradients.main_grads import STAYING, copy_all_to_host
from flatshard.engine.gradients.reduction import Goal, Reduction
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.schedule.agreement import Announcer
from flatshard.engine.schedule.early_steps import EarlySteps
from flatshard.engine.units.unit import RootProtocol, Unit
from flatshard.layout import is_sharded
from flatshard.policy import SEPARATE_GROUPS, SchedulePolicy


class Reduces:
    """Groups are numbers, in the order of registration, as in `Turns`. The root owns this object."""

    def __init__(
        self, root: RootProtocol, units: Sequence[Unit], pool: Pool, policy: SchedulePolicy, announcer: Announcer
    ) -> None:
        self.pool = pool
        self.in_flight: deque[Reduction] = deque()
        self._unresolved: list[Callable[[], None]] = []  # the `Reduction.resolve_uses` of those that are over
        self.steps = EarlySteps()
        self._largest = -1  # bytes of the largest reduce of this backward; -1: not known yet
        self.is_alike = True  # all ranks use the same parameters
        self.is_one_of_several = False  # `Root.reduce_accumulated` is running, and may be called on other roots next
        self._root = weakref.ref(root)
        self._policy, self._program, self._announcer = policy, root.program, announcer
        self._groups = [(weakref.ref(unit), weakref.ref(group)) for unit in units for group in unit.groups]
        self._reduced: set[int] = set()  # groups that the running backward has reduced
        self._reduced_twice: set[int] = set()  # groups that some backward has reduced once more at its end
        self._has_optional = root.has_optional
        self._has_stopped = False  # a backward has stopped short of final gradients
        # Axes of meshes along which weights are gathered, in a pass or from what the optimizer has written.
        self._gathered = frozenset(
            (group.mesh, axis)
            for unit in units
            for group in unit.groups
            for rests in (group.placements.parameter, group.placements.optimizer)
            for axis, placement in enumerate(rests)
            if is_sharded(placement)
        )
        self.resolve(units)

    def resolve(self, units: Sequence[Unit]) -> None:
        """Combine the settings of all units for reduces: the highest limit; separate groups if any unit has them."""
        intents = [unit.intent for unit in units]
        highest = max((intent.max_reducing for intent in intents if intent.max_reducing is not None), default=None)
        self._most = self._policy.max_reducing if highest is None else highest
        choices = [intent.separate_groups for intent in intents if intent.separate_groups is not None]
        chosen, lane = any(choices) if choices else self._policy.separate_groups, self.pool.lane
        lane.own_groups = SEPARATE_GROUPS or self._has_optional if chosen is None else chosen
        self.share_axes()

    def share_axes(self) -> None:
        """Pass the axes that weights are gathered over to the lane, in addition to those of models that share it."""
        self.pool.lane.shared_axes = (self.pool.lane.shared_axes or frozenset()) | self._gathered

    # Turns

    def begin(self, units: Sequence[Unit]) -> None:
        """A backward begins."""
        self._reduced.clear()
        self._largest = -1
        self.is_alike = not self._has_optional and True not in [unit.intent.reduces_unused for unit in units]

    def group_complete(self, number: int) -> None:
        """All gradients of a group have arrived. It may be reduced before the backward leaves its unit, but not always.

        On ranks that use different parameters, the gradients arrive before or after an all-gather that other ranks wait
        for. And reduces that share process groups with all-gathers must keep their place among them.
        """
        if self.is_alike and self.pool.lane.own_groups:
            self._program.turns.mark(number, over=False)
            self.reduce_due()
        elif not self._has_optional:  # else what counts is when units are left, which ranks that skip some can follow
            self._program.turns.see(number)

    def reduce_due(self) -> None:
        """Reduce the marked groups whose turn it is."""
        for number in self._program.turns.due(self._may_get_gradients):
            self._reduce_if_needed(number)

    def reduce_remaining(self, units: Sequence[Unit]) -> None:
        """At the end of a backward: reduce the groups that have not been reduced, and those with a second turn."""
        self._has_stopped = False in [unit.goal is Goal.FINAL for unit in units]
        turns = self._program.turns
        for number in turns.remaining():
            self._reduce_if_needed(number)
        groups = enumerate([group() for _, group in self._groups])
        waiting = {number for number, group in groups if group is not None and group.gradients.waiting}
        for number in turns.again(waiting):
            found = self._at(number)
            if found is not None and (number in self._reduced or number in waiting):
                if number in self._reduced:
                    self._reduced_twice.add(number)  # its gradients are not complete after the first reduce
                self.launch(number, *found, self._goal(*found), found[0].is_last)

    def flush(self, units: Sequence[Unit], all_the_way: bool = False, wait: bool = True) -> None:
        """Reduce the accumulated gradients of these units, if the last micro-batch had no backward.

        With ``all_the_way``, also those that their settings leave unreduced. With ``wait``, order the current stream
        after the reduces.
        """
        for number in reversed(range(len(self._groups))):
            found = self._at(number)
            if found is None or found[0] not in units:
                continue
            unit, group = found
            # A rank that has used nothing of the unit takes part in the reduce of the others.
            unused = all_the_way and self._takes_part(unit) and self._has_stopped and group.gradients.expected > 0
            goes = all_the_way or group.gradients.goal(unit.goal) is Goal.FINAL
            if goes and (group.gradients.has_partial or unused):
                self.launch(number, unit, group, Goal.FINAL, unit.is_last)
        if all_the_way:
            self._has_stopped = False
        if wait:
            self.join()

    def is_awaited_by_other_roots(self, group: ParamGroup) -> bool:
        """Whether a unit of another root that uses a group expects a backward, or has gradient reduction turned off."""
        others = [unit for unit in group.units if unit.root is not self._root()] if group.borrowers else ()
        return any(unit.calls.are_awaited() or not unit.intent.reduces for unit in others)

    def _at(self, number: int) -> tuple[Unit, ParamGroup] | None:
        """A group and its unit; None once the unit's modules, or all parameters of the group, have left the model."""
        of, which = self._groups[number]
        unit, group = of(), which()
        return None if unit is None or group is None else (unit, group)

    def _takes_part(self, unit: Unit) -> bool:
        """Whether a unit is reduced, with zeros, also if the batch of this rank does not use it.

        If some units are optional, all units are: ranks that use different parameters of a unit would not be detected.
        """
        return self._has_optional or unit.intent.reduces_unused

    def _may_get_gradients(self, number: int) -> bool:
        found = self._at(number)
        return found is not None and found[1].gradients.expected > 0 and found[0].is_ahead

    def _goal(self, unit: Unit, group: ParamGroup) -> Goal:
        """How far the gradients of a group are reduced now."""
        if self.is_one_of_several and self.is_awaited_by_other_roots(group):
            return Goal.UNREDUCED
        return group.gradients.goal(unit.goal)

    def _reduce_if_needed(self, number: int) -> None:
        """Reduce a group at its turn, if it has gradients, or takes part with zeros."""
        of, which = self._groups[number]
        unit, group = of(), which()
        if unit is None or group is None:
            return
        gradients, goal = group.gradients, unit.goal
        if goal is not Goal.FINAL or self.is_one_of_several:
            goal = self._goal(unit, group)
        if (
            gradients.waiting
            or (goal is Goal.FINAL and gradients.has_partial)
            or (goal is not Goal.UNREDUCED and gradients.expected and self._takes_part(unit))
        ):
            self.launch(number, unit, group, goal, unit.is_last and number not in self._reduced_twice)

    # In flight

    def launch(self, number: int, unit: Unit, group: ParamGroup, goal: Goal, is_last: bool) -> None:
        """Start reducing the gradients of a group. ``is_last``: no more of them come in this optimizer step."""
        while len(self.in_flight) >= self._most and not (self._has_optional and self._could_hang()):
            self._wait_for_oldest()
        gradients, pool = group.gradients, self.pool
        while group.home.host and any(
            earlier.reduced is not None and earlier.writes is gradients.main_grads for earlier in self.in_flight
        ):
            self._wait_for_oldest()  # its result is not in host memory yet, where this one is added to it
        is_last = is_last and not self.is_one_of_several  # else the caller is going to scale them before the step
        if self.steps.waiting:
            self.steps.run_before(gradients)
        if goal is not Goal.UNREDUCED:
            if self._program.announces:
                self._announcer.announce(gradients.what, unit, unit.numbers.index(number))
            self._program.has_launched = True
        if self._program.is_profiled:
            with torch.profiler.record_function(f"flatshard::reduce {unit.name}"):
                reduction = gradients.reduce(pool, goal, unit.name, is_last)
        else:
            reduction = gradients.reduce(pool, goal, unit.name, is_last)
        self.in_flight.append(reduction)
        self._reduced.add(number)
        if not self._policy.async_reduce and not (self._has_optional and self._could_hang()):
            self._wait_for_oldest()

    def end_backward(self, joins: bool) -> None:
        """Order the current stream after all reduces if it ``joins`` them, else only after those with a callback."""
        while not joins and any(reduction.then is not None for reduction in self.in_flight):
            self._wait_for_oldest()
        self.steps.run()
        if joins:
            self.join()
        else:
            for reduction in self.in_flight:  # autograd adds to a `.grad` without reading it: a penalty on parameters
                if reduction.writes is not None:
                    reduction.guard(reduction.writes.accumulations(reduction.writes.trained), join_reduces)
            self.join_later()

    def join_later(self, *_: object) -> None:
        """Join at the next use of a gradient: a backward has ended, or has raised, before its reduces."""
        if self.in_flight or self._unresolved or self.steps.running:
            _unjoined.add(self)
            _torch.on_grad_read(join_reduces)

    def wait_for_all(self) -> None:
        """Order the current stream after all reduces, and after the steps of optimizers that they have started."""
        while self.in_flight:
            if len(self.in_flight) == 1:
                self.steps.run()  # beside the last reduce
            self._wait_for_oldest()
        self.steps.join()

    def join(self) -> None:
        """`wait_for_all`, and find out which gradients exist on all ranks: gradients can be read then."""
        self.wait_for_all()
        self._resolve_uses()

    def _resolve_uses(self) -> None:
        asking, self._unresolved = self._unresolved, []
        for ask in asking:
            ask()

    def _could_hang(self) -> bool:
        """With optional units: whether a wait for the oldest reduce could hang.

        A rank that skips units may launch that reduce only after an all-gather that this rank has not launched yet.
        """
        return not self.in_flight[0].ticket.has_ended()

    def _wait_for_oldest(self) -> None:
        """Order the current stream after the oldest reduce; its inputs may then be freed."""
        reduction = self.in_flight.popleft()
        recording = _recording.active
        if recording is None:
            reduction.wait()
        else:
            with recording.around("reduce", reduction.name, self._root()):
                reduction.wait()
        if reduction.resolve_uses is not None:
            self._unresolved.append(reduction.resolve_uses)
        if reduction.then is not None:
            with self._without_later_gradients(reduction):
                reduction.then()
        if reduction.reduced is not None:
            self.steps.add_on_host(reduction)
            if reduction.reduced in STAYING:
                _torch.on_grad_read(join_reduces)
        elif reduction.on_final is not None:
            self.steps.add(reduction, self._largest_reduce())

    @contextmanager
    def _without_later_gradients(self, reduction: Reduction) -> Iterator[None]:
        """Within it, parameters have the gradients that they have in one process when their hooks are called.

        Gradients of later reduces, and those that are not reduced yet, are concealed. So a hook that sets the gradients
        of the whole model to None, as `zero_grad` does, does not drop them.
        """
        is_unjoined = self in _unjoined
        _unjoined.discard(self)  # the visible gradients are complete; a join would show the concealed ones
        self._resolve_uses()
        self.steps.run()  # the hooks may take gradients that wait for their step
        for other in self.in_flight:  # another reduce of the same group may still add to visible gradients
            other.ticket.wait()
        known, own = [(each.writes, each.shown) for each in self.in_flight], reduction.writes
        later = [(grads, shown) for grads, shown in known if grads is not None and grads is not own]
        groups = [group for _, of in self._groups if (group := of()) is not None and group.is_full]
        full = [param.full for group in groups for param in group.params]
        arrived = [(each, each.grad) for each in full if each is not None and each.grad is not None]
        for grads, shown in later:
            grads.conceal(shown)
        for parameter, _ in arrived:
            parameter.grad = None
        try:
            yield
        finally:
            for grads, shown in later:
                grads.show(shown)
            for parameter, grad in arrived:
                parameter.grad = grad
            if is_unjoined:
                self.join_later()

    def _largest_reduce(self) -> int:
        """The bytes of the largest reduce, computed once per backward."""
        if self._largest < 0:
            reduced = (group.gradients for _, of in self._groups if (group := of()) and group.gradients.expected)
            self._largest = max((gradients.full_bytes for gradients in reduced), default=0)
        return self._largest

    def drop_steps(self) -> None:
        """Leave steps that have not begun to ``optimizer.step``: weights may have been written since an exception."""
        self.steps.drop()
        for reduction in self.in_flight:
            reduction.on_final = None


_unjoined: weakref.WeakSet[Reduces] = weakref.WeakSet()  # whose reduces are joined when a gradient is read


def join_reduces(to_host: bool = True) -> None:
    """Order the current stream after the reduces of all models, before gradients are read.

    Reading or setting a ``.grad`` calls it. With ``to_host``, gradients that have stayed on the device are copied to
    host memory, where they belong.
    """
    _torch.on_grad_read(None)
    for reduces in list(_unjoined):
        root = reduces._root()
        if root is not None and root.is_broken:  # after an earlier micro-batch that was not waited for
            reduces.drop_steps()
        reduces.join()
    _unjoined.clear()
    if to_host:
        copy_all_to_host()
    elif STAYING:
        _torch.on_grad_read(join_reduces)
