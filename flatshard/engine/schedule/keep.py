"""Which units stay gathered between passes, within a budget of bytes.

A unit that is kept from its forward to its backward, or from the backward of one micro-batch to the forward of the
next, saves one all-gather: the transfer time of its bytes and one latency. Per byte of the budget, the transfer time is
the same for all units, and the latency is larger for smaller units, so small units are kept first. Among units of equal
size, those that are kept for the shortest time come first: the last units of a forward for backward, the first units
for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatshard.engine.units.unit import Unit
from flatshard.policy import SchedulePolicy


def gathered_bytes(unit: Unit) -> int:
    """Device memory of the full weights of a unit, without what this rank holds between passes anyway."""
    return sum(group.gathered_bytes for group in unit.groups)


def plan_kept(units: Sequence[Unit], policy: SchedulePolicy) -> tuple[set[Unit], set[Unit]]:
    """Choose from units in forward order: those that stay for backward, and for the next micro-batch."""
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
