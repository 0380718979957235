"""The figures of a rehearsal, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, fields
from html import escape
from typing import Any

from flatshard._sizes import format_bytes


@dataclass
class Report:
    """Figures of this rank.  ``traffic`` and ``*_per_step`` are means per step; ``memory`` is in bytes."""

    world: int
    rank: int
    network: str
    ranks_per_node: int
    device: str
    torch: str
    steps: int
    step_seconds: list[float]
    tokens_per_step: float | None = None
    flops_per_step: float | None = None
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    free_network_seconds: list[float] | None = None
    waits: dict[str, float] = field(default_factory=dict)  # seconds per step that compute waited, by unit

    @property
    def median(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def wire(self) -> float:
        """Modelled seconds of communication per step, hidden by compute or not."""
        return sum(entry["wire_seconds"] for entry in self.traffic.values())

    @property
    def exposed(self) -> float | None:
        """Median step time minus that on a free network, at least 0; None without a run on a free network."""
        if self.free_network_seconds is None:
            return None
        return max(0.0, self.median - statistics.median(self.free_network_seconds))

    def to_dict(self) -> dict[str, Any]:
        """The fields and figures derived from them; :meth:`from_dict` reads it."""
        tokens, flops = self.tokens_per_step, self.flops_per_step
        derived = {
            "step_seconds_median": self.median,
            "step_seconds_min": min(self.step_seconds),
            "wire_seconds": self.wire,
            "exposed_seconds": self.exposed,
            "tokens_per_second": tokens / self.median if tokens else None,
            "world_tokens_per_second": self.world * tokens / self.median if tokens else None,
            "flops_per_second": flops / self.median if flops else None,
        }
        return {**asdict(self), "derived": derived}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        return cls(**{item.name: data[item.name] for item in fields(cls)})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def _repr_html_(self) -> str:
        """The table, in a notebook."""
        return f"<pre>{escape(self.table())}</pre>"

    def table(self) -> str:
        """Text for a terminal, 100 columns at most."""
        lines = [
            f"rank {self.rank} of {self.world}, {self.ranks_per_node} ranks per node, network {self.network}; "
            f"{self.device}, torch {self.torch}",
            "",
            f"step time            {_ms(self.median)} median, {_ms(min(self.step_seconds))} min ({self.steps} steps)",
            f"wire time            {_ms(self.wire)} per step",
        ]
        if self.free_network_seconds is not None and self.exposed is not None:
            free = statistics.median(self.free_network_seconds)
            exposed = f"{_ms(self.exposed)} per step" if free < self.median else "not measurable: steps vary by more"
            lines.append(f"exposed              {exposed} (free network: {_ms(free)})")
            if self.exposed > 1.1 * self.wire:
                lines.append("                     more than the wire time: step times vary, or the host takes longer")
        if self.tokens_per_step:
            rate = self.tokens_per_step / self.median
            lines.append(f"tokens/s             {rate:,.0f} per rank, {rate * self.world:,.0f} in all")
        if self.flops_per_step:
            lines.append(f"model FLOP/s         {self.flops_per_step / self.median / 1e12:,.1f} T per rank")
        lines += [
            "",
            f"{'collective':16}{'launches':>10}{'bytes':>12}{'on the wire':>14}{'wire time':>14}   (per step)",
        ]
        for kind, entry in self.traffic.items():
            lines.append(
                f"{kind:16}{entry['launches']:>10.1f}{format_bytes(entry['bytes']):>12}"
                f"{format_bytes(entry['wire_bytes']):>14}{_ms(entry['wire_seconds']):>14}"
            )
        if self.waits:
            lines += ["", "compute waited for     (per step, the longest)"]
            lines += [f"  {name:40}{_ms(seconds):>12}" for name, seconds in list(self.waits.items())[:8]]
        lines += ["", "memory"]
        lines += [f"  {name:20}{format_bytes(size):>12}" for name, size in self.memory.items()]
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if 0 < seconds < 1e-4 else f"{seconds * 1e3:.2f} ms"
