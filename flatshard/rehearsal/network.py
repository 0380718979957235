"""The modelled network: how long a collective takes.  Pure arithmetic; no process group, no device.

A launch takes

    latency + hops + segment x (segments - 1) + moved / bandwidth

``hops`` is the latency that grows with the number of ranks (:meth:`Network.hops`).  ``moved`` is what one rank of a
ring sends (:func:`wire_bytes`): ``size x (G - 1) / G`` for an all-gather, a reduce-scatter or an all-to-all of ``size``
bytes among G ranks, twice that for an all-reduce.  So ``bandwidth`` is the "bus bandwidth" that collective benchmarks
print.  There are three levels: a group within one node (one NVLink domain) uses the ``inside`` link; a group within
one pod uses the ``between`` link for all bytes, with as many rails of a node as it has ranks there; others use the
``across`` link.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
]  # fmt: skip
Level = Literal["inside", "between", "across"]
Algorithm = Literal["constant", "ring", "tree", "hierarchical"]

# How often a rank sends (G - 1) / G of the message. For other kinds it sends all of it.
_SHARE_OF_RING = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Link:
    """One level of the network: ``bandwidth`` in bytes per second and per rank, ``latency`` in seconds per launch.

    ``hop``: seconds for one step of an algorithm over this link, from one rank to the next.
    """

    bandwidth: float
    latency: float
    hop: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(
                f"Link(bandwidth={self.bandwidth!r}): must be positive, in bytes per second; math.inf is allowed"
            )
        if not self.latency >= 0 or not self.hop >= 0:
            raise ValueError(f"Link(latency={self.latency!r}, hop={self.hop!r}): must not be negative (seconds)")


@dataclass(frozen=True)
class Reach:
    """How many ranks, nodes and pods a group has."""

    ranks: int
    nodes: int = 1
    pods: int = 1

    @property
    def level(self) -> Level:
        """The link that the group uses."""
        return "across" if self.pods > 1 else "between" if self.nodes > 1 else "inside"


@dataclass(frozen=True)
class Network:
    """The links of a network; nodes have ``ranks_per_node`` consecutive ranks.

    ``segment``: seconds for each further segment (tensor) of one launch.
    ``across``: the link between pods of ``ranks_per_pod`` consecutive ranks; None: all nodes are in one pod.
    ``rails``: network adapters per node. A group uses one for each of its ranks in a node; bandwidths are of one.
    ``algorithm``: how latency grows with the number of ranks, see `hops`.
    ``sms``: how many multiprocessors of a GPU a collective occupies until it ends, as NCCL's kernels do; with 0,
    only the block that waits occupies one.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 8
    segment: float = 2e-6
    sms: int = 0
    name: str = "custom"
    across: Link | None = None
    ranks_per_pod: int = 1024
    rails: int = 1
    algorithm: Algorithm = "constant"

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.rails < 1:
            raise ValueError(f"Network(ranks_per_node={self.ranks_per_node}, rails={self.rails}): must be at least 1")
        if self.across is not None and (self.ranks_per_pod < 1 or self.ranks_per_pod % self.ranks_per_node):
            raise ValueError(
                f"ranks_per_pod={self.ranks_per_pod}: must be a multiple of ranks_per_node={self.ranks_per_node}"
            )
        if not self.segment >= 0:
            raise ValueError(f"Network(segment={self.segment!r}): must not be negative (seconds)")
        if not 0 <= self.sms <= 64:
            raise ValueError(f"Network(sms={self.sms!r}): must be from 0 to 64 (multiprocessors)")
        if self.algorithm not in get_args(Algorithm):
            raise ValueError(f"Network(algorithm={self.algorithm!r}): must be one of {', '.join(get_args(Algorithm))}")

    @property
    def links(self) -> dict[Level, Link]:
        links: dict[Level, Link] = {"inside": self.inside, "between": self.between}
        return links if self.across is None else {**links, "across": self.across}

    def describe(self, world: int) -> str:
        """Its name and the bandwidth of the links that ``world`` ranks use."""
        links = [f"{self.inside.bandwidth / 1e9:g} GB/s inside a node"]
        links += [f"{self.between.bandwidth / 1e9:g} GB/s between nodes"] if world > self.ranks_per_node else []
        if self.across is not None and world > self.ranks_per_pod:
            links.append(f"{self.across.bandwidth / 1e9:g} GB/s between pods of {self.ranks_per_pod}")
        links += [f"{self.rails} rails"] if self.rails > 1 and world > self.ranks_per_node else []
        links += [f"{self.algorithm} latency"] if self.algorithm != "constant" else []
        return f"{self.name} ({', '.join(links)})"

    def reach(self, ranks: Sequence[int]) -> Reach:
        """The number of ranks, nodes and pods of a group of these global ranks."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        per_pod = self.ranks_per_pod // self.ranks_per_node
        return Reach(len(ranks), len(nodes), 1 if self.across is None else len({node // per_pod for node in nodes}))

    def hops(self, kind: Kind, reach: Reach) -> float:
        """Seconds that the steps of the algorithm add to the latency of a launch.

        ``ring``: one step for each rank after the first, in one ring of all ranks. ``tree``: the logarithms of the
        ranks of a node, of the nodes of a pod, and of the pods. ``hierarchical``: a ring in each node, then one of
        nodes, then one of pods. An all-reduce takes twice as many. ``constant``: none.
        """
        if self.algorithm == "constant" or reach.ranks == 1:
            return 0.0
        counts = math.ceil(reach.ranks / reach.nodes), math.ceil(reach.nodes / reach.pods), reach.pods
        if self.algorithm == "ring":
            steps = [reach.ranks - reach.nodes, reach.nodes - reach.pods, reach.pods - 1]
        elif self.algorithm == "tree":
            steps = [math.ceil(math.log2(count)) for count in counts]
        else:
            steps = [count - 1 for count in counts]
        seconds = sum(count * link.hop for count, link in zip(steps, self.links.values()))
        return 2 * seconds if kind == "all_reduce" else seconds

    def bandwidth(self, reach: Reach) -> float:
        """Bytes per second and rank of a group. It uses one rail for each of its ranks in a node, at most all rails."""
        link = self.links[reach.level]
        if reach.level == "inside":
            return link.bandwidth
        rails = max(1, min(self.rails, reach.ranks // reach.nodes))
        return max(link.bandwidth, min(rails * link.bandwidth, self.inside.bandwidth))

    def seconds(self, kind: Kind, size: int, reach: Reach, segments: int = 1) -> float:
        """Seconds of one launch of ``kind`` with a full, unsharded message of ``size`` bytes."""
        if reach.ranks == 1:
            return 0.0
        latency = self.links[reach.level].latency + self.hops(kind, reach) + self.segment * (segments - 1)
        return latency + wire_bytes(kind, size, reach.ranks) / self.bandwidth(reach)


def wire_bytes(kind: Kind, size: int, group_size: int) -> float:
    """Bytes that one rank sends for a collective whose full message has ``size`` bytes."""
    if group_size == 1 or kind == "barrier":
        return 0.0
    share = _SHARE_OF_RING.get(kind)
    return float(size) if share is None else share * size * (group_size - 1) / group_size


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
    """Sums over all process groups of a rehearsal since it began, per kind of collective.  Not thread-safe."""

    entries: dict[Kind, TrafficTotal] = field(default_factory=lambda: defaultdict(TrafficTotal))

    def snapshot(self) -> dict[Kind, TrafficTotal]:
        return {kind: replace(entry) for kind, entry in self.entries.items()}


def difference(late: dict[Kind, TrafficTotal], early: dict[Kind, TrafficTotal]) -> dict[Kind, TrafficTotal]:
    """What was added between two snapshots.  Kinds without launches are left out."""
    pairs = {kind: (now, early.get(kind, TrafficTotal())) for kind, now in late.items()}
    added = {kind: TrafficTotal(*map(operator.sub, astuple(now), astuple(was))) for kind, (now, was) in pairs.items()}
    return {kind: total for kind, total in added.items() if total.launches}


Part = TypeVar("Part", Link, Network)

# Hops: the values that NCCL's tuning assumes for a ring with the simple protocol (docs/scale.md).
_NVLINK = Link(bandwidth=360e9, latency=10e-6, hop=3.4e-6)
_IB400 = Link(bandwidth=45e9, latency=25e-6, hop=14e-6)
FREE = Network(Link(math.inf, 0.0), Link(math.inf, 0.0), segment=0.0, name="free")
PRESETS: dict[str, Network] = {
    "free": FREE,
    "h100-nvlink": Network(_NVLINK, _IB400, name="h100-nvlink"),
    "h100-ib400": Network(_NVLINK, _IB400, name="h100-ib400"),
    "h100-pods": Network(
        _NVLINK, _IB400, across=replace(_IB400, bandwidth=45e9 / 7), rails=8, algorithm="ring", name="h100-pods"
    ),
    "a100-nvlink": Network(Link(230e9, 12e-6, 3.4e-6), Link(22e9, 25e-6, 14e-6), name="a100-nvlink"),
    "ethernet-100": Network(Link(20e9, 20e-6, 5.7e-6), Link(11e9, 50e-6, 14e-6), name="ethernet-100"),
}


def get_network(
    network: str | Network,
    ranks_per_node: int | None = None,
    ranks_per_pod: int | None = None,
    algorithm: Algorithm | None = None,
) -> Network:
    """A preset by name, or ``network`` itself, with the fields that are given replaced."""
    if isinstance(network, str):
        if network not in PRESETS:
            raise ValueError(f"network={network!r}: must be one of {', '.join(PRESETS)}")
        network = PRESETS[network]
    return with_fields(network, ranks_per_node=ranks_per_node, ranks_per_pod=ranks_per_pod, algorithm=algorithm)


def with_fields(known: Part, **numbers: Any) -> Part:
    """A copy of a network or a link, with the fields replaced that are not None."""
    return replace(known, **{name: number for name, number in numbers.items() if number is not None})
