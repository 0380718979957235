"""Which units stay gathered beyond their own use, under a budget of bytes.

A unit that is kept from its forward to its backward, or from the backward of a micro-batch to the forward of the next,
saves one gather: the time of its bytes on the wire and one latency. Per byte of the budget the first is the same for
all units and the second is the larger the smaller the unit is, so small units are taken first. Of equal ones those are
taken that are kept for the shortest time: the last of a forward, which backward needs first; and the first of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatshard.engine.units.unit import Unit
from flatshard.policy import SchedulePolicy


def gathered_bytes(unit: Unit) -> int:
    """Device memory that the full weights of a unit take, beyond what rests on this rank anyway."""
    return sum(group.gathered_bytes for group in unit.groups)


def arriving_bytes(unit: Unit) -> int:
    """The same from the launch of its gather on until it is used."""
    return sum(group.arriving_bytes for group in unit.groups)


def opening_bytes(unit: Unit) -> int:
    """What its use will take on top of that."""
    return sum(group.opening_bytes for group in unit.groups)


def plan_kept(units: Sequence[Unit], policy: SchedulePolicy) -> tuple[set[Unit], set[Unit]]:
    """Choose, for units in the order of their forwards: those that stay for backward, and for the next micro-batch."""
    in_backward = [unit for unit in units if unit.unshard_in_backward]
    auto = [unit for unit in reversed(in_backward) if unit.intent.reshard_after_forward == "auto"]
    in_forward = [unit for unit in units if unit.unshard_in_forward]
    # Of the latter, those that backward does not gather are gathered at its end.
    return _chosen(auto, policy.keep_for_backward), _chosen(in_forward, policy.keep_for_next)


def _chosen(candidates: Sequence[Unit], budget: int) -> set[Unit]:
    chosen = set()
    for unit in sorted(candidates, key=gathered_bytes):
        size = gathered_bytes(unit)
        if 0 < size <= budget:
            chosen.add(unit)
            budget -= size
    return chosen
