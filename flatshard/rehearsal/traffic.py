"""Sums of the modelled communication, per kind of collective."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import astuple, dataclass, field, replace

from flatshard.rehearsal.network import Kind


@dataclass
class TrafficTotal:
    """``bytes``: of full messages (all-gather outputs, reduce-scatter inputs).  ``wire_bytes``: that a rank sends."""

    launches: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    wire_seconds: float = 0.0

    def add(self, size: int, wire: float, seconds: float) -> None:
        self.launches += 1
        self.bytes += size
        self.wire_bytes += wire
        self.wire_seconds += seconds


@dataclass
class Traffic:
    """Sums over all process groups of a rehearsal since it began.  Not thread-safe."""

    entries: dict[Kind, TrafficTotal] = field(default_factory=lambda: defaultdict(TrafficTotal))

    def snapshot(self) -> dict[Kind, TrafficTotal]:
        return {kind: replace(entry) for kind, entry in self.entries.items()}


def difference(late: dict[Kind, TrafficTotal], early: dict[Kind, TrafficTotal]) -> dict[Kind, TrafficTotal]:
    """What was added between two snapshots.  Kinds without launches are left out."""
    pairs = {kind: (now, early.get(kind, TrafficTotal())) for kind, now in late.items()}
    added = {kind: TrafficTotal(*map(operator.sub, astuple(now), astuple(was))) for kind, (now, was) in pairs.items()}
    return {kind: total for kind, total in added.items() if total.launches}
