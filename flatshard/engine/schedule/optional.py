"""Optional units: a rank whose batch does not use one takes part in the collectives for it (decision 020).

Every rank launches the all-gather of an optional unit once in every pass, at its place in the program: after the units
that are expected before it, and before those after it. A rank detects that it has skipped the unit when it reaches a
later unit or the end of the pass. Uses in which such a rank could not launch the same collectives are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.engine.program import Pass
from flatshard.engine.schedule.root import WITH_OPTIONAL, Root
from flatshard.engine.units.unit import Unit, unit_with
from flatshard.policy import SchedulePolicy


class OptionalRoot(Root):
    """A root some of whose units are optional."""

    has_optional = True

    def __init__(self, units: Sequence[Unit], device: torch.device, policy: SchedulePolicy) -> None:
        super().__init__(units, device, policy)
        self._passed_over: set[int] = set()  # units that the running pass came to nothing of
        self._lingering: tuple[int, bool] | None = None  # a unit after its forward, which may be run again
        self._forward: int | None = None  # that the running backward belongs to
        _check(units, self.reduce_lane.own_groups)
        for group in [group for unit in units for group in unit.groups]:
            group.gradients.takes_part = True
        WITH_OPTIONAL.add(self)

    def begin_forward(self, entry: Unit) -> None:
        super().begin_forward(entry)
        self._passed_over.clear()

    def begin_backward(self) -> None:
        before = self.backwards
        super().begin_backward()
        if self.backwards != before:
            self._passed_over.clear()
            self._forward = None

    def end_forward(self, grads: bool) -> None:
        self._end_lingering()
        self._pass_over(self.program.upcoming)
        super().end_forward(grads)

    def end_backward(self) -> None:
        self._pass_over(self.program.upcoming, over=True)
        super().end_backward()

    def recover(self) -> None:
        super().recover()
        self._lingering = None

    def need(self, unit: Unit, gather: bool = True) -> None:
        self._check_place(unit)
        if self._lingering is not None and self._lingering[0] != unit.index:
            self._end_lingering()
        self._pass_over(self.program.before(unit.index))
        super().need(unit, gather)

    def unit_left(self, unit: Unit) -> None:
        if unit.nests:  # the backward has left the units inside it, too
            inside = [index for index in self.program.upcoming if self.program.is_inside(index, unit.index)]
            self._pass_over(inside, over=True)
        super().unit_left(unit)

    def retain(self, unit: Unit) -> None:
        """The last unit depends on what a rank uses, so all units of a recomputed segment stay."""

    def goes_through(self, forward: int) -> None:
        """Raise if the running backward has reached another forward before.

        A rank that skips a unit in one of two forwards cannot know which of them an all-gather of the unit belongs to.
        """
        if self._forward not in (None, forward):
            raise RuntimeError(
                "one backward goes through two forwards of a model with optional units; call backward after each "
                "forward, or put both batches into one"
            )
        self._forward = forward

    def linger(self, unit: Unit, grads: bool) -> None:
        """Its forward has ended, but may be called again before another unit's: other ranks gather it only once."""
        self._lingering = unit.index, grads

    def _end_lingering(self) -> None:
        """Another unit is used, or the forward is over."""
        lingering, self._lingering = self._lingering, None
        unit = None if lingering is None else self.unit_at(lingering[0])
        if unit is not None and lingering is not None:
            unit.leave(keep=False, grads=lingering[1])

    def _check_place(self, unit: Unit) -> None:
        if not unit.is_optional or unit.is_gathered or unit.index in self.program.upcoming:
            return
        if unit.index in self._passed_over or not self.program.is_first:
            raise RuntimeError(
                f"optional unit '{unit.name}' is called after units that are registered after it: ranks that skip it "
                "have gathered it before those. Call units in the order in which they are registered, and an optional "
                "unit in one place only"
            )

    def _pass_over(self, indices: Sequence[int], over: bool = False) -> None:
        """The pass skips these units, unless it has used them. ``over``: the pass, or the unit around them, has ended.

        All-gathers and reduces of skipped units are launched in the order of a rank that uses them. So a rank that
        waits for a launch of another rank has itself launched everything that the other rank needs to get there.
        """
        program, backward = self.program, self.program.running is Pass.BACKWARD
        within: list[Unit] = []  # units that have been passed over, as far as those inside them
        for index in list(indices):
            unit = self.unit_at(index)
            if unit is None or not unit.is_optional or index in self._passed_over:
                continue
            if not over and backward and unit.is_ahead:
                if not unit.is_gathered and unit.unshard_in_backward:
                    self.gathers.launch(unit, is_prefetch=True)
                continue
            while within and not program.is_inside(index, within[-1].index):
                within.pop().passed_over()
            self._passed_over.add(index)
            # Other ranks may use it: launch the same all-gathers.
            self.arrive(unit, gather=unit.unshard_in_backward or not backward)
            within.append(unit)
        while within:
            within.pop().passed_over()


def _check(units: Sequence[Unit], own_groups: bool) -> None:
    """Raise ValueError if a model cannot have optional units. ``own_groups``: reduces have separate process groups."""
    for unit in units:
        for group, param, _ in unit.borrowed:
            owner = unit_with(group)
            if owner is not None and (unit.is_optional or owner.is_optional):
                raise ValueError(
                    f"units '{unit.name}' and '{owner.name}' share parameter '{param.name}', and one of them is "
                    "optional: ranks that skip a unit would gather it in another order. Call fully_shard on both "
                    "modules as one list, or without optional=True"
                )
    if any(unit.rows is not None for unit in units):
        raise ValueError("rows=True and optional=True cannot be used in one model; leave one of them out")
    if not own_groups:
        raise ValueError(
            "optional=True needs separate process groups for reduces, because ranks that skip a unit launch its reduce "
            "at another place among the gathers; leave out SchedulePolicy(separate_groups=False)"
        )
