"""The modelled network: what a collective costs on the wire.  Pure arithmetic; no process group, no device.

A launch is charged

    latency + segment x (segments - 1) + moved / bandwidth

where ``moved`` is what one rank of a ring sends (:func:`wire_bytes`): ``size x (G - 1) / G`` for a gather, a
reduce-scatter or an all-to-all of ``size`` bytes among G ranks, twice that for an all-reduce.  So ``bandwidth`` is the
"bus bandwidth" that collective benchmarks print.  A group that lies inside one node is charged at the ``inside`` link
and any other group, for all its bytes, at the ``between`` link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
]  # fmt: skip
Level = Literal["inside", "between"]

# Fraction of `size` that a rank puts on its link, as a function of the group size.
_SHARE_OF_RING = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Link:
    """One level of the network: ``bandwidth`` in bytes per second and per rank, ``latency`` in seconds per launch."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth must be positive (bytes per second; math.inf is allowed), got {self.bandwidth}"
            )
        if not self.latency >= 0:
            raise ValueError(f"latency must not be negative (seconds), got {self.latency}")


@dataclass(frozen=True)
class Network:
    """Two links, how many consecutive ranks share a node, and what every further segment of one launch costs (s).

    ``sms``: how many multiprocessors of a GPU a collective keeps from other kernels until the wire is done, as NCCL's
    kernels do; 0 for those of copy engines, which keep none.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 8
    segment: float = 2e-6
    sms: int = 0
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")
        if not self.segment >= 0:
            raise ValueError(f"segment must not be negative (seconds), got {self.segment}")
        if not 0 <= self.sms <= 64:
            raise ValueError(f"sms must be from 0 to 64 (multiprocessors that a collective keeps), got {self.sms}")

    def describe(self, world: int) -> str:
        """Its name and the bandwidth of the links that ``world`` ranks use."""
        links = [f"{self.inside.bandwidth / 1e9:g} GB/s inside a node"]
        links += [f"{self.between.bandwidth / 1e9:g} GB/s between nodes"] if world > self.ranks_per_node else []
        return f"{self.name} ({', '.join(links)})"

    def level(self, ranks: Sequence[int]) -> Level:
        """The link that a group of these global ranks is charged at."""
        node = ranks[0] // self.ranks_per_node
        return "inside" if all(rank // self.ranks_per_node == node for rank in ranks) else "between"

    def seconds(self, kind: Kind, size: int, group_size: int, level: Level, segments: int = 1) -> float:
        """Wire time of one launch of ``kind`` over ``size`` bytes (of the full, unsharded message)."""
        if group_size == 1:
            return 0.0
        link = self.inside if level == "inside" else self.between
        return link.latency + self.segment * (segments - 1) + wire_bytes(kind, size, group_size) / link.bandwidth


def wire_bytes(kind: Kind, size: int, group_size: int) -> float:
    """Bytes that one rank sends for a collective whose full message has ``size`` bytes."""
    if group_size == 1 or kind == "barrier":
        return 0.0
    share = _SHARE_OF_RING.get(kind)
    return float(size) if share is None else share * size * (group_size - 1) / group_size


_NVLINK = Link(bandwidth=360e9, latency=10e-6)
FREE = Network(Link(math.inf, 0.0), Link(math.inf, 0.0), segment=0.0, name="free")
PRESETS: dict[str, Network] = {
    "free": FREE,
    "h100-nvlink": Network(_NVLINK, Link(bandwidth=45e9, latency=25e-6), name="h100-nvlink"),
    "h100-ib400": Network(_NVLINK, Link(bandwidth=45e9, latency=25e-6), name="h100-ib400"),
    "a100-nvlink": Network(Link(230e9, 12e-6), Link(22e9, 25e-6), name="a100-nvlink"),
    "ethernet-100": Network(Link(20e9, 20e-6), Link(11e9, 50e-6), name="ethernet-100"),
}


def get_network(network: str | Network, ranks_per_node: int | None = None) -> Network:
    """A preset by name, or ``network`` itself; with another number of ranks per node if one is given."""
    if isinstance(network, str):
        if network not in PRESETS:
            raise ValueError(f"unknown network {network!r}; presets are {', '.join(PRESETS)}, or pass a Network")
        network = PRESETS[network]
    return network if ranks_per_node is None else replace(network, ranks_per_node=ranks_per_node)
