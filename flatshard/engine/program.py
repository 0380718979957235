"""The program: the order in which units are gathered and groups are reduced, the same on every rank.

A pass (a forward with gradients, one without, a backward) needs units one after another. The order of the first pass of
each kind, if it is the same on all ranks, predicts later passes, so the next units can be prefetched. A unit that a
pass does not need is removed from the prediction for the next pass, and a unit that it gathers in addition is inserted.
All ranks gather the same units, so their predictions stay the same.

Reduces need more care: when the gradients of a group are complete depends on which parameters the data of a rank uses.
So hooks only mark groups, and `Turns` decides which groups may be reduced, always in one order that all ranks have
agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum


class Pass(Enum):
    """The kind of a pass through the model."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    FORWARD = "forward"
    FORWARD_NO_GRAD = "forward without gradients"
    BACKWARD = "backward"


class Turns:
    """The order of reduces in one backward, for all groups. Groups are numbers, in the order of registration.

        order    e d c b a      agreed on by all ranks
        marked   x   x          the gradients of the group are complete on this rank
        next       ^            if gradients may still arrive for d, c waits; if not, d is skipped, and c is due

    The groups that `due` and `remaining` return, taken together, depend only on the order and on the set of groups that
    are used, not on the time of the marks. A group that is marked after its turn gets another turn at the end.

    ``free``: there is no order yet, and a group is due as soon as it is marked; the ranks then compare their launches.
    """

    def __init__(self, order: Sequence[int], free: bool = False) -> None:
        self.seen: dict[int, None] = {}  # groups in the order in which they were complete, due or not
        self.is_free = free
        self._was_due: set[int] = set()  # groups, if there is no order
        self._order = order
        self._place = {number: place for place, number in enumerate(order)}
        self._next = 0
        self._last = -1  # the last marked place in the order
        self._marked: dict[int, bool] = {}  # groups, and whether the backward has left their unit
        self._again: set[int] = set()  # groups with a second turn

    def see(self, number: int) -> None:
        """All gradients of a group have arrived, but its unit may still be in use."""
        self.seen[number] = None  # a dict keeps the place of a known key

    def mark(self, number: int, over: bool = True) -> None:
        """The gradients of a group are complete. ``over``: the backward has also left its unit."""
        self.seen[number] = None
        if self._marked.get(number):
            if over:  # the backward has left another recompute of the same unit
                self._again.add(number)
        else:
            self._marked[number] = over
        if self._place[number] > self._last:
            self._last = self._place[number]

    def due(self, may_get_gradients: Callable[[int], bool]) -> Sequence[int]:
        """The groups that are reduced next, up to the last marked one in the order.

        Stops before a group that is not marked but ``may_get_gradients``.
        """
        if self.is_free:
            due = [number for number in self.seen if number in self._marked and number not in self._was_due]
            self._was_due.update(due)
            return due
        first = self._next
        while self._next <= self._last:
            number = self._order[self._next]
            if number not in self._marked and may_get_gradients(number):
                break
            self._next += 1
        return self._order[first : self._next]

    def remaining(self) -> Iterator[int]:
        """At the end of the backward: the groups that have not had their turn."""
        while self._next < len(self._order):
            self._next += 1
            if self._order[self._next - 1] not in self._was_due:
                yield self._order[self._next - 1]

    def again(self, waiting: Collection[int]) -> list[int]:
        """After all turns: groups with a second turn, because they were marked twice or have gradients ``waiting``."""
        return [number for number in self._order if number in self._again or number in waiting]


class Program:
    """The recorded order of all-gathers for each kind of pass, and the order of reduces. Units are numbers too.

    A forward that enters at another unit than the root (generation, evaluation of a submodule) is another kind of pass.
    The first pass from the root is predicted by the order of registration. The first pass from another unit is not
    predicted.
    """

    def __init__(self, groups: Sequence[int], parents: Sequence[int | None] | None = None) -> None:
        """``groups``: the number of groups of each unit. ``parents``: the unit around each unit, if there is one."""
        registered = tuple(range(len(groups)))
        self._parents = [None] * len(groups) if parents is None else parents
        self._orders: dict[tuple[Pass, int], Sequence[int]] = {
            (Pass.FORWARD, 0): registered,
            (Pass.FORWARD_NO_GRAD, 0): registered,
            (Pass.BACKWARD, 0): self._backward_of(registered),
        }
        # Backward comes to the last unit first.
        first = [sum(groups[:index]) for index in registered]
        self._reversed = tuple(first[index] + number for index in registered[::-1] for number in range(groups[index]))
        self._reduces: dict[int, Sequence[int]] = {}  # by the unit where the forward began
        self._recorded: set[tuple[Pass, int]] = set()
        self.running: Pass | None = None  # the pass that has begun and not ended
        self.is_first = False  # it is the first of its kind: no order has been recorded
        self.checks = False  # ranks compare every launch
        self.announces = False  # they compare those of the running pass
        self.has_launched = False  # the running pass has communicated
        self.is_profiled = False  # a profiler is active
        self._kind: tuple[Pass, int] = (Pass.FORWARD, 0)  # with the unit where the pass, or its forward, began
        self.upcoming: list[int] = []  # units expected to be needed in the running pass, nearest first
        self._entry = self._entry_before = 0  # where the last forward with gradients began, and the one before it
        self.gathered: list[int] = []  # units whose gathers the running pass has launched
        self.needed: dict[int, None] = {}  # units that the running pass has needed
        self.left: set[int] = set()  # units that the running backward has left
        self._needs: list[int] = []  # in a first pass: the same in order, with repetitions
        self.turns = Turns(())

    def begin(self, kind: Pass, entry: int | None = None, free: bool = False) -> None:
        """Start a pass at unit ``entry``, or a backward of the last forward. An interrupted pass is dropped.

        ``free``: if it is the first of its kind, its reduces have no order.
        """
        if kind is Pass.FORWARD and entry is not None:
            self._entry, self._entry_before = entry, self._entry
        self.running, self._kind = kind, (kind, self._entry if entry is None else entry)
        self.is_first = self._kind not in self._recorded
        self.announces = self.is_first or self.checks
        self.upcoming = list(self._orders.get(self._kind, ()))
        self.gathered, self.needed, self._needs = [], {}, []
        self.has_launched = False
        if kind is Pass.BACKWARD:
            self.left = set()
            self.turns = Turns(self._reduces.get(self._kind[1], self._reversed), free and self.is_first)

    def need(self, unit: int, is_ahead: Callable[[int], bool]) -> Sequence[int]:
        """The running pass needs this unit now. Returns the units that it has skipped.

        Those are the units that were expected before it, unless a backward will still reach them. A unit that is not
        expected at all (another branch, evaluation of a submodule) does not change the prediction.
        """
        self.needed[unit] = None
        if self.is_first:
            self._needs.append(unit)
        upcoming = self.upcoming
        if not upcoming:
            return ()
        if upcoming[0] == unit:
            del upcoming[0]
            return ()
        if unit not in upcoming:
            return ()
        passed = upcoming[: upcoming.index(unit)]
        later = [other for other in passed if is_ahead(other)] if self.running is Pass.BACKWARD else []
        upcoming[: len(passed) + 1] = later
        return [other for other in passed if other not in later]

    def before(self, unit: int) -> list[int]:
        """Units that are expected before this one and that the running pass has not needed."""
        return self.upcoming[: self.upcoming.index(unit)] if unit in self.upcoming else []

    def is_inside(self, unit: int | None, other: int) -> bool:
        """Whether a unit is nested in another one, at any depth."""
        while unit is not None:
            unit = self._parents[unit]
            if unit == other:
                return True
        return False

    def end(self, is_held: bool) -> None:
        """The running pass has ended, and predicts the next of its kind. ``is_held``: the user holds full weights.

        A pass that has communicated nothing predicts nothing: this rank may have run it alone.
        """
        if is_held and not self.has_launched and self.running is Pass.FORWARD:
            self._entry = self._entry_before  # nor does it determine where the next backward ends
        if self.running is not None and self.needed and self.has_launched:
            before = self._orders.get(self._kind, ())
            if self.needed.keys() != set(before):
                self._orders[self._kind] = self._changed(before)
            self._recorded.add(self._kind)
        self.abandon()

    def _changed(self, before: Sequence[int]) -> tuple[int, ...]:
        """An order without the units that this pass did not need, and with those that it gathered in addition."""
        order = [unit for unit in before if unit in self.needed]
        last = None
        for unit in self.gathered:
            if unit in self.needed and unit not in order:
                order.insert(0 if last is None else order.index(last) + 1, unit)
            if unit in order:
                last = unit
        return tuple(order)

    def _backward_of(self, forward: Sequence[int]) -> tuple[int, ...]:
        """The order in which a backward of this forward reaches units: reversed, a unit before those nested in it."""
        inside: dict[int | None, list[int]] = {}
        for unit in forward:
            parent = self._parents[unit]
            inside.setdefault(parent if parent in forward else None, []).append(unit)
        found: list[int] = []
        waiting = inside.get(None, [])
        while waiting:
            found.append(waiting.pop())
            waiting += inside.pop(found[-1], [])
        return tuple(found)

    def abandon(self) -> None:
        """The running pass was interrupted; it predicts nothing."""
        self.running, self.is_first, self.announces = None, False, self.checks
        self.upcoming = []

    # Agreement, at the end of the first pass of a kind

    def proposal(self) -> tuple[Sequence[int], Sequence[int]]:
        """The order in which this pass needed units; and, of a backward, that in which groups were complete, before
        those that it did not use."""
        seen = self.turns.seen if self.running is Pass.BACKWARD else {}
        return tuple(self._needs), (*seen, *(number for number in self._reversed if number not in seen))

    def adopt(self, proposal: tuple[Sequence[int], Sequence[int]]) -> None:
        """Use these orders from now on. The first forward also predicts its backward."""
        kind, entry = self._kind
        self._orders[self._kind] = proposal[0]
        if kind is Pass.FORWARD and (Pass.BACKWARD, entry) not in self._recorded:
            self._orders[Pass.BACKWARD, entry] = self._backward_of(proposal[0])
        if kind is Pass.BACKWARD:
            self._reduces[entry] = proposal[1]
