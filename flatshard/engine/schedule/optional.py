"""Optional units: a rank whose batch does not use one takes part in the collectives for it (decision 020).

Every rank launches the all-gather of an optional unit once in every pass, at its place in the program: after the units
that are expected before it, and before those after it. A rank detects that it has skipped the unit when it reaches a
later unit or the end of the pass. Uses in which such a rank could not launch the same collectives are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from flatshard.engine.program import Pass
from flatshard.engine.units.unit import RootProtocol, Unit, unit_with

_roots: weakref.WeakSet[RootProtocol] = weakref.WeakSet()  # that have optional units


class OptionalUnits:
    """The optional units of a root in the running pass. The root owns this object and passes itself to it."""

    def __init__(self, root: RootProtocol, own_groups: bool) -> None:
        """``own_groups``: reduces have separate process groups."""
        self._passed_over: set[int] = set()  # units that the running pass came to nothing of
        self._lingering: tuple[int, bool] | None = None  # a unit after its forward, which may be run again
        self._forward: int | None = None  # that the running backward belongs to
        _check(root, own_groups)
        for group in [group for unit in root.units for group in unit.groups]:
            group.gradients.takes_part = True
        _roots.add(root)

    def begin_pass(self) -> None:
        self._passed_over.clear()
        self._forward = None

    def give_up(self) -> None:
        """The running pass was interrupted."""
        self._lingering = None

    def goes_through(self, forward: int) -> None:
        """The running backward has reached a call in this forward. Raise if it has reached another forward before.

        A rank that skips a unit in one of two forwards cannot know which of them an all-gather of the unit belongs to.
        """
        if self._forward not in (None, forward):
            raise RuntimeError(
                "one backward goes through two forwards of a model with optional units; call backward after each "
                "forward, or put both batches into one"
            )
        self._forward = forward

    def come_to(self, root: RootProtocol, unit: Unit) -> None:
        """The running pass is about to use a unit."""
        self._check_place(root, unit)
        if self._lingering is not None and self._lingering[0] != unit.index:
            self.end_lingering(root)
        self.pass_over(root, root.program.before(unit.index))

    def _check_place(self, root: RootProtocol, unit: Unit) -> None:
        if not unit.is_optional or unit.is_gathered or unit.index in root.program.upcoming:
            return
        if unit.index in self._passed_over or not root.program.is_first:
            raise RuntimeError(
                f"optional unit '{unit.name}' is called after units that are registered after it: ranks that skip it "
                "have gathered it before those. Call units in the order in which they are registered, and an optional "
                "unit in one place only"
            )

    def pass_over(self, root: RootProtocol, indices: Sequence[int], over: bool = False) -> None:
        """The pass skips these units, unless it has used them. ``over``: the pass, or the unit around them, has ended.

        All-gathers and reduces of skipped units are launched in the order of a rank that uses them. So a rank that
        waits for a launch of another rank has itself launched everything that the other rank needs to get there.
        """
        program = root.program
        within: list[Unit] = []  # units that have been passed over, as far as those inside them
        for index in list(indices):
            unit = root.unit_at(index)
            if unit is None or not unit.is_optional or index in self._passed_over:
                continue
            if not over and program.running is Pass.BACKWARD and unit.is_ahead:
                if not unit.is_gathered and unit.unshard_in_backward:
                    root.gather_early(unit)
                continue
            while within and not program.is_inside(index, within[-1].index):
                within.pop().passed_over()
            self._passed_over.add(index)
            unit.pass_over()
            within.append(unit)
        while within:
            within.pop().passed_over()

    def pass_over_inside(self, root: RootProtocol, unit: Unit) -> None:
        """The backward has left a unit, and so the units nested in it."""
        program = root.program
        inside = [index for index in program.upcoming if program.is_inside(index, unit.index)]
        self.pass_over(root, inside, over=True)

    def linger(self, unit: Unit, grads: bool) -> None:
        """Its forward has ended, but may be called again before another unit's: other ranks gather it only once."""
        self._lingering = unit.index, grads

    def end_lingering(self, root: RootProtocol) -> None:
        """Another unit is used, or the forward is over."""
        lingering, self._lingering = self._lingering, None
        unit = None if lingering is None else root.unit_at(lingering[0])
        if unit is not None and lingering is not None:
            unit.leave(keep=False, grads=lingering[1])


def refuse_forward_within(root: RootProtocol) -> None:
    """Raise if a forward starts within the forward of another model that has optional units."""
    for other in _roots:
        if other is not root and other.entry is not None:
            raise RuntimeError(
                "a sharded model is called within the forward of another one that has optional units: ranks that skip "
                "a unit would launch collectives in another order. Call it before or after that forward"
            )


def refuse_backward_of_two(root: RootProtocol) -> None:
    """Raise if a backward that starts also goes through another model with optional units that it may skip."""
    for other in _roots:
        if other is not root and other.is_amid(root.task):
            raise RuntimeError(
                "one backward goes through two sharded models, and the first that it reaches has optional units: ranks "
                "that skip a unit would launch collectives in another order. Make both submodules of one module and "
                "call fully_shard on that, or call backward for each"
            )


def _check(root: RootProtocol, own_groups: bool) -> None:
    """Raise ValueError if a model cannot have optional units."""
    for unit in root.units:
        for group, param, _ in unit.borrowed:
            owner = unit_with(group)
            if owner is not None and (unit.is_optional or owner.is_optional):
                raise ValueError(
                    f"units '{unit.name}' and '{owner.name}' share parameter '{param.name}', and one of them is "
                    "optional: ranks that skip a unit would gather it in another order. Call fully_shard on both "
                    "modules as one list, or without optional=True"
                )
    if any(unit.rows is not None for unit in root.units):
        raise ValueError("rows=True and optional=True cannot be used in one model; leave one of them out")
    if not own_groups:
        raise ValueError(
            "optional=True needs separate process groups for reduces, because ranks that skip a unit launch its reduce "
            "at another place among the gathers; leave out SchedulePolicy(separate_groups=False)"
        )
