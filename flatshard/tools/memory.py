"""The bytes of a rank: at rest, and at the fullest moment of a step.

At rest, between `zero_grad` and the next forward, a rank holds per group

    main      shard x main dtype
    compute   what its placement says x compute dtype, where that placement is not main's (ZeRO 1 and 2, HFSDP)
    state     tensors of optimizer state x shard x main dtype

with ``shard`` the elements of the layout on one rank, padding included. A step adds

    gradients of main     shard x gradient dtype, from the reduce of the group on
    gathered              all elements x compute dtype, of the unit in use and of those gathered ahead of it
                          (``max_gathered`` together, or more under ``max_gathered_bytes``), and of units
                          kept for backward
    staging               gradients as autograd leaves them, all elements x compute dtype, until their reduce has been
                          waited for: those of the unit in backward and of ``max_reducing`` groups in flight; where they
                          are not in the reduce dtype or a segment has padding, also a copy x reduce dtype; and what a
                          reduce needs on its way where it cannot write main gradients directly

`memory_of` goes through a step unit by unit, in the order of `flatshard.engine.scope`, and notes the fullest moment.
Not counted: activations and their gradients, temporaries of the optimizer's own step, buffers of the model, what the
allocator reserves beyond what is used, and the communication library's buffers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from flatshard.tools.groups import Choice, Group, Launch, groups_of
from flatshard.tools.shapes import Call, Model


@dataclass(frozen=True)
class Bytes:
    """Of one rank at one moment, by what they are for."""

    main: int = 0
    compute: int = 0
    state: int = 0
    gradients: int = 0
    gathered: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Memory:
    """``peak``: the fullest moment. ``most_gathered`` and ``most_staging``: their own largest, perhaps at another one.

    ``launches``: the collectives of one step.
    """

    resting: Bytes
    peak: Bytes
    most_gathered: int
    most_staging: int
    launches: tuple[Launch, ...]


def memory_of(model: Model, choice: Choice) -> Memory:
    """What training ``model`` takes of one rank, and sends."""
    alike = {tensors: groups_of(tensors, choice) for tensors in dict.fromkeys(unit.tensors for unit in model.units)}
    groups = [alike[unit.tensors] for unit in model.units]
    every = [group for unit in groups for group in unit]
    resting = Bytes(*(sum(getattr(group, name) for group in every) for name in ("main", "compute", "state")))
    step = _Step(model, groups, choice, resting)
    step.forward()
    step.backward()
    launches = [
        launch
        for number, unit in enumerate(groups)
        for group in unit
        for launch in group.launches(step.gathers[0][number], step.gathers[1][number])
    ]
    return Memory(resting, step.peak, step.most_gathered, step.most_staging, tuple(launches))


class _Step:
    """One micro-batch, the last of a step, as the engine schedules it."""

    def __init__(self, model: Model, groups: Sequence[Sequence[Group]], choice: Choice, resting: Bytes) -> None:
        self._model, self._groups, self._schedule = model, groups, choice.schedule
        self._root = model.root.unit
        self._reshards = choice.reshards
        self._accumulates = choice.microbatches > 1
        self._now = replace(resting, gradients=sum(group.accumulated for unit in groups for group in unit))
        self.peak = self._now
        self.most_gathered = self.most_staging = 0
        count = len(model.units)
        self.gathers = [[0] * count, [0] * count]  # by unit, in forward and in backward
        self._calls = [0] * count  # forwards of this pass that are over
        self._total = [0] * count  # forwards of a pass
        for call in _calls(model.root):
            self._total[call.unit] += 1
        self._gathered: set[int] = set()
        self._ahead: set[int] = set()
        self._reducing: deque[Bytes] = deque()  # what each gives back
        self._upcoming: list[int] = []
        self._in_backward = False

    def _add(self, gradients: int = 0, gathered: int = 0, staging: int = 0) -> None:
        now = self._now
        self._now = now = replace(
            now,
            gradients=now.gradients + gradients,
            gathered=now.gathered + gathered,
            staging=now.staging + staging,
        )
        self.most_gathered = max(self.most_gathered, now.gathered)
        self.most_staging = max(self.most_staging, now.staging)
        if now.total > self.peak.total:
            self.peak = now

    # Weights

    def _bytes(self, *units: int) -> int:
        return sum(group.gathered for unit in units for group in self._groups[unit])

    def _gather(self, unit: int) -> None:
        if unit in self._gathered:
            return
        self._gathered.add(unit)
        self.gathers[self._in_backward][unit] += 1
        self._add(gathered=self._bytes(unit))

    def _release(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.remove(unit)
            self._add(gathered=-self._bytes(unit))

    def _need(self, unit: int, gather: bool = True) -> None:
        if unit in self._upcoming:
            del self._upcoming[: self._upcoming.index(unit) + 1]
        self._ahead.discard(unit)
        if gather:
            self._gather(unit)
        self._gather_ahead(unit, self._schedule.max_gathered - 1 - len(self._ahead))

    def _gather_ahead(self, unit: int, room: int) -> None:
        most = self._schedule.max_gathered_bytes
        for other in self._upcoming if self._schedule.prefetch else ():
            if room <= 0 and not most:
                return
            if other == unit or other in self._ahead:
                continue
            if other in self._gathered:
                return
            if self._in_backward and self._model.units[other].is_embedding:
                continue
            if room <= 0 and self._bytes(*self._gathered, other) > most:
                return
            self._ahead.add(other)
            self._gather(other)
            room -= 1

    # Forward

    def forward(self) -> None:
        self._upcoming = [call.unit for call in _calls(self._model.root)]
        self._forward(self._model.root)

    def _forward(self, call: Call) -> None:
        unit = call.unit
        self._need(unit)
        for inner in call.inner:
            self._forward(inner)
        self._calls[unit] += 1
        keeps = unit == self._root if self._reshards is None else not self._reshards
        if self._calls[unit] == self._total[unit] and not keeps:
            self._add(gathered=sum(group.parked for group in self._groups[unit]))
            self._release(unit)

    # Backward

    def backward(self) -> None:
        self._in_backward = True
        self._ahead.clear()
        self._upcoming = [call.unit for call in _calls(self._model.root, backward=True)]
        self._backward(self._model.root)
        while self._reducing:
            self._land()

    def _backward(self, call: Call) -> None:
        number, unit = call.unit, self._model.units[call.unit]
        groups = [group for group in self._groups[number] if group.trainable]
        self._need(number, gather=not unit.is_embedding)
        for position in range(len(call.inner), 0, -1):
            self._add(staging=sum(_arriving(group, position) for group in groups))
            for group in groups:
                if _first(group) == position:
                    self._reduce(group)
            self._backward(call.inner[position - 1])
        arriving = sum(_arriving(group, 0) for group in groups)
        self._add(staging=arriving)
        self._calls[number] -= 1
        if not self._calls[number] and self._total[number] > 1:
            # Several forwards have given gradients of the same weights; autograd adds them up in memory of its own.
            self._add(staging=arriving)
            self._add(staging=-self._total[number] * arriving)
        self._release(number)
        self._gather_ahead(number, self._schedule.max_gathered - len(self._ahead))
        if not self._calls[number]:
            for group in groups:
                if _first(group) == 0:
                    self._reduce(group)
            self._add(gathered=-sum(group.parked for group in self._groups[number]))

    def _reduce(self, group: Group) -> None:
        while len(self._reducing) >= self._schedule.max_reducing:
            self._land()
        fresh = not self._accumulates or group.ends
        self._add(gradients=group.main_grad if fresh else 0, staging=group.reducing)
        ended = group.accumulated if group.ends else 0
        self._reducing.append(Bytes(gradients=ended, staging=group.arriving + group.reducing))
        if not self._schedule.async_reduce:
            self._land()

    def _land(self) -> None:
        done = self._reducing.popleft()
        self._add(gradients=-done.gradients, staging=-done.staging)


def _arriving(group: Group, position: int) -> int:
    """Bytes of the gradients that arrive when so many units inside are still to come in backward."""
    return group.wire.itemsize * sum(math.prod(tensor.shape) for tensor in group.tensors if tensor.after == position)


def _first(group: Group) -> int:
    """When all gradients of a group have arrived: so many units inside are still to come."""
    return min(tensor.after for tensor in group.tensors)


def _calls(call: Call, backward: bool = False) -> Iterator[Call]:
    """In the order in which their units are needed."""
    yield call
    for inner in reversed(call.inner) if backward else call.inner:
        yield from _calls(inner, backward)
