"""Fixed places for buffers that come and go: record which are live together, plan, replay.

A plan gives every buffer one slot for all its lifetimes, so that it has one address in forward, in backward and in
every step. What is recorded is only which buffers have been live at the same time: they need different slots. The
order in which a pass takes them is free, and patterns that alternate (training, evaluation) share one plan.

Buffers are numbers, in the order of their first use: ranks that run the same program make the same plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PoolStatistics:
    """How a planned pool does."""

    plans: int  # made so far; addresses hold from one to the next
    slots: int  # of the plan
    bytes: int  # of the plan's slots, before the device's rounding
    planned: int  # buffers that got their planned place
    missed: int  # buffers that got another one, since there is a plan


@dataclass(frozen=True)
class Plan:
    """Which slot a buffer has, and the bytes of every slot, largest first."""

    slot_of: dict[int, int]
    sizes: list[int]


def make_plan(sizes: Mapping[int, int], beside: Mapping[int, AbstractSet[int]]) -> Plan:
    """Slots for buffers of these sizes, of which those in ``beside`` each other (told both ways) never share one.

    The largest buffers come first, so a slot is as large as the first in it and the others take nothing more.
    """
    plan = Plan({}, [])
    for buffer in sorted(sizes, key=lambda buffer: (-sizes[buffer], buffer)):
        taken = {plan.slot_of.get(other) for other in beside[buffer]}
        slot = next(slot for slot in range(len(plan.sizes) + 1) if slot not in taken)
        if slot == len(plan.sizes):
            plan.sizes.append(sizes[buffer])
        plan.slot_of[buffer] = slot
    return plan


class Planner:
    """Records the buffers of a pool, and knows the plan for them. It hands out nothing: the pool does."""

    def __init__(self) -> None:
        self.plan = Plan({}, [])
        self.plans = self.planned = self.missed = 0
        self._count = 0
        self._numbers: dict[int, int] = {}  # by the tensor's id
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._sizes: dict[int, int] = {}
        self._live: set[int] = set()
        self._recent: dict[int, set[int]] = {}  # by buffer, those live when it was taken, since the last `end_pass`
        self._beside: dict[int, set[int]] = {}  # the same of all passes before, both ways
        self._differs = False  # a buffer did not get its place

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a buffer, a new one if it is new."""
        number = self._numbers.get(id(tensor))
        if number is None or self._tensors[number]() is not tensor:
            self._numbers[id(tensor)] = number = self._count
            self._tensors[number] = weakref.ref(tensor)
            self._sizes[number] = tensor.numel() * tensor.element_size()
            self._count += 1
        return number

    def take(self, number: int, as_planned: bool) -> None:
        """A buffer has become live, in its slot or elsewhere."""
        self._recent.setdefault(number, set()).update(self._live)
        self._live.add(number)
        if as_planned:
            self.planned += 1
        elif self.plans:
            self.missed += 1
            self._differs = True

    def release(self, tensor: torch.Tensor) -> None:
        self._live.discard(self.number(tensor))

    def forget(self) -> None:
        """The running pass was broken off: what it did is no pattern."""
        self._recent.clear()
        self._differs = False

    def end_pass(self) -> bool:
        """A pass is over. Whether there is a new plan: if something did not fit the old one, and nothing is live.

        It is for all patterns that have been, of the buffers that still exist.
        """
        for number, others in self._recent.items():
            self._beside.setdefault(number, set()).update(others)
            for other in others:
                self._beside.setdefault(other, set()).add(number)
        self._recent.clear()
        gone = {number for number, tensor in self._tensors.items() if tensor() is None}
        if gone:
            self._drop(gone)
        if self._live or not (self._differs or self._beside.keys() != self.plan.slot_of.keys()):
            return False
        self.plan = make_plan({number: self._sizes[number] for number in self._beside}, self._beside)
        self.plans += 1
        self._differs = False
        return True

    def _drop(self, gone: set[int]) -> None:
        self._numbers = {key: number for key, number in self._numbers.items() if number not in gone}
        for number in gone:
            del self._tensors[number], self._sizes[number]
            self._beside.pop(number, None)
        for others in self._beside.values():
            others -= gone
        self._live -= gone

    @property
    def statistics(self) -> PoolStatistics:
        sizes = self.plan.sizes
        return PoolStatistics(self.plans, len(sizes), sum(sizes), self.planned, self.missed)
