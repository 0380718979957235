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
        self._skipped: set[int] = set()  # units that the running pass has skipped
        # A unit whose forward has ended, but may be called again; and whether that forward computes gradients.
        self._to_reshard: tuple[int, bool] | None = None
        self._forward: int | None = None  # the number of the forward that the running backward belongs to
        _check(units, self.reduce_lane.own_groups)
        for group in [group for unit in units for group in unit.groups]:
            group.gradients.takes_part = True
        WITH_OPTIONAL.add(self)

    def begin_forward(self, entry: Unit) -> None:
        super().begin_forward(entry)
        self._skipped.clear()

    def begin_backward(self) -> None:
        before = self.backwards
        super().begin_backward()
        if self.backwards != before:
            self._skipped.clear()
            self._forward = None

    def end_forward(self, grads: bool) -> None:
        self._reshard_pending()
        self._skip(self.program.upcoming)
        super().end_forward(grads)

    def end_backward(self) -> None:
        self._skip(self.program.upcoming, over=True)
        super().end_backward()

    def recover(self) -> None:
        super().recover()
        self._to_reshard = None

    def need(self, unit: Unit, gather: bool = True, is_skipped: bool = False) -> None:
        self._check_order(unit)
        if self._to_reshard is not None and self._to_reshard[0] != unit.index:
            self._reshard_pending()
        self._skip(self.program.before(unit.index))
        super().need(unit, gather, is_skipped)

    def unit_left(self, unit: Unit) -> None:
        if unit.nests:  # the backward has left the units inside it, too
            inside = [index for index in self.program.upcoming if self.program.is_inside(index, unit.index)]
            self._skip(inside, over=True)
        super().unit_left(unit)

    def keep_recomputed(self, unit: Unit) -> None:
        """The last unit depends on what a rank uses, so all units of a recomputed segment stay."""

    def check_forward(self, forward: int) -> None:
        """Raise if the running backward has reached another forward before.

        A rank that skips a unit in one of two forwards cannot know which of them an all-gather of the unit belongs to.
        """
        if self._forward not in (None, forward):
            raise RuntimeError(
                "one backward goes through two forwards of a model with optional units; call backward after each "
                "forward, or put both batches into one"
            )
        self._forward = forward

    def reshard_later(self, unit: Unit, grads: bool) -> None:
        """Reshard a unit when another one is used: its forward may be called again, and other ranks gather it once."""
        self._to_reshard = unit.index, grads

    def _reshard_pending(self) -> None:
        pending, self._to_reshard = self._to_reshard, None
        unit = None if pending is None else self.unit_at(pending[0])
        if unit is not None and pending is not None:
            unit.leave(keep=False, grads=pending[1])

    def _check_order(self, unit: Unit) -> None:
        if not unit.is_optional or unit.is_gathered or unit.index in self.program.upcoming:
            return
        if unit.index in self._skipped or not self.program.is_first:
            raise RuntimeError(
                f"optional unit '{unit.name}' is called after units that are registered after it: ranks that skip it "
                "have gathered it before those. Call units in the order in which they are registered, and an optional "
                "unit in one place only"
            )

    def _skip(self, indices: Sequence[int], over: bool = False) -> None:
        """Skip those of these units that the pass has not used. ``over``: the pass, or the unit around them, has ended.

        All-gathers and reduces of skipped units are launched in the order of a rank that uses them. So a rank that
        waits for a launch of another rank has itself launched everything that the other rank needs to get there.
        """
        program, backward = self.program, self.program.running is Pass.BACKWARD
        around: list[Unit] = []  # skipped units whose nested units are being skipped
        for index in list(indices):
            unit = self.unit_at(index)
            if unit is None or not unit.is_optional or index in self._skipped:
                continue
            if not over and backward and unit.is_ahead:
                if not unit.is_gathered and unit.unshard_in_backward:
                    self.gathers.launch(unit, is_prefetch=True)
                continue
            while around and not program.is_inside(index, around[-1].index):
                around.pop().end_skipped()
            self._skipped.add(index)
            # Other ranks may use it: launch the same all-gathers.
            super().need(unit, gather=unit.unshard_in_backward or not backward, is_skipped=True)
            around.append(unit)
        while around:
            around.pop().end_skipped()


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
