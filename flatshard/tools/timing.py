"""How long a step takes: compute, two lanes and two links, as the engine orders them in a dry run.

Compute goes unit by unit, at the rate that matrix products reach. A gather begins when the engine launches it, that is
when compute has come to where memory for it is free; a reduce, when its gradients are there. Lanes work in order, and a
link serves one collective at a time, as in a rehearsal. Compute waits where the engine waits. What moves meanwhile
takes memory bandwidth from kernels, and so does what encodes and decodes formats. After the last reduce comes the
optimizer, at the speed of memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flatshard.rehearsal.network import Level, Network
from flatshard.tools.group_bytes import GroupBytes, PlannedCollective
from flatshard.tools.model_shapes import ModelShape, UnitShape

# Bytes that are read or written in the device's memory, while kernels run, for a byte that is sent or received: by
# traces of cases (a) and (d), 0.3 to 0.4 ms for each GB on a device of 4.8 TB/s.
_MOVED = 1.5


@dataclass(frozen=True)
class Speed:
    """What a device does, and what it is given in one micro-batch.

    ``flops`` per second of products; ``tokens`` of one rank, in rows of ``length`` (None: attention is not counted);
    ``recompute``: blocks run again in backward. ``bandwidth``: bytes per second of its memory. ``host``: seconds that
    the host takes to launch a unit's forward and backward; 0 for captured steps. ``peak``: FLOP per second that the
    device is sold with, for the MFU.
    """

    flops: float
    tokens: float
    length: float | None = None
    recompute: bool = False
    bandwidth: float = 3.35e12
    host: float = 2.7e-3
    peak: float = 989e12

    def __post_init__(self) -> None:
        if not min(self.flops, self.tokens, self.bandwidth, self.peak) > 0 or self.host < 0:
            raise ValueError("TFLOP/s, tokens and memory bandwidth are more than 0, host time is 0 or more")


@dataclass(frozen=True)
class Estimate:
    """The time of a step, in seconds: ``total``; in it, compute ``waits`` for the wire, and the ``optimizer``.

    ``exchanges``: of tokens among ranks that have different experts, on the wire. ``host``: what the host takes; where
    that is more than the rest, it is the total. ``flops``: of the model on one rank, recompute not counted.
    """

    total: float
    waits: float
    optimizer: float
    exchanges: float
    host: float
    flops: float


class StepClock:
    """``now``: where compute stands. ``waits``: how long it has waited."""

    def __init__(self, speed: Speed, network: Network, width: int) -> None:
        self.now = self.waits = self._exchanged = self._done = 0.0
        self._speed, self._network, self._width = speed, network, width
        self._lanes = {"gather": 0.0, "reduce": 0.0}
        self._links: dict[Level, float] = dict.fromkeys(network.links, 0.0)

    def launch(self, lane: str, launches: Sequence[PlannedCollective]) -> float:
        """When these collectives end, one after another, on a lane that is ordered after compute as it stands."""
        self._lanes[lane] = end = self._carried(max(self._lanes[lane], self.now), launches)
        return end

    def _carried(self, begin: float, launches: Sequence[PlannedCollective]) -> float:
        for launch in launches:
            level = launch.reach(self._network).level
            self._links[level] = begin = max(begin, self._links[level]) + launch.seconds(self._network)
        return begin

    def wait(self, until: float) -> None:
        """Compute waits for something that ends then."""
        self.waits += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def move(self, count: int) -> None:
        """Something that is no product reads and writes so many bytes; products wait, even if it is beside them."""
        self.now += count / self._speed.bandwidth

    def use(self, unit: UnitShape, group: GroupBytes, position: int, backward: bool) -> None:
        """Compute with a group's tensors of one position: once in forward; twice in backward, and again if recomputed.

        Tokens go to the experts of other ranks and come back before compute goes on.
        """
        again = self._speed.recompute and unit.is_block
        flops = 0.0 if unit.is_embedding else self._flops(group, position)
        self._done += (2 if backward else 1) * flops
        sent = self._tokens(group, position)
        for rounds in ((1, 2) if again else (2,)) if backward else (1,):
            self._exchange(sent)
            self._compute(rounds * flops / self._speed.flops)
            self._exchange(sent)

    def _flops(self, group: GroupBytes, position: int) -> float:
        tokens, length = self._speed.tokens, self._speed.length or 0
        found = [tensor for tensor in group.tensors if tensor.after == position]
        products = sum(2 * tensor.used * math.prod(tensor.shape) for tensor in found if len(tensor.shape) > 1)
        return tokens * (products + sum(2 * tensor.queries * length for tensor in found))  # half of a square: causal

    def _exchange(self, sent: Sequence[PlannedCollective]) -> None:
        self._exchanged += sum(launch.seconds(self._network) for launch in sent)
        self.wait(self._carried(self.now, sent))

    def _tokens(self, group: GroupBytes, position: int) -> list[PlannedCollective]:
        first, parts = group.tensors[0], group.setup.expert_parts
        if not first.is_expert or first.after != position or parts == 1:
            return []
        size = self._speed.tokens * first.used * first.shape[0] * self._width * group.wire.itemsize
        return [PlannedCollective("all_to_all", 0, parts, round(size), 1, 1)]

    def _compute(self, seconds: float) -> None:
        moved = 0.0
        for level, link in self._network.links.items():
            beside = min(seconds, self._links[level] - self.now)
            moved += beside * link.bandwidth if beside > 0 else 0.0
        self.now += seconds + _MOVED * moved / self._speed.bandwidth

    def repeat(self, times: int, since: tuple[float, ...]) -> None:
        """What has happened since `marks` were these happens so many times more."""
        now, waits, exchanged, done = (times * (end - begin) for end, begin in zip(self.marks, since))
        self.now += now
        self.waits += waits
        self._exchanged += exchanged
        self._done += done
        self._lanes = {name: free + now for name, free in self._lanes.items()}
        self._links = {level: free + now for level, free in self._links.items()}

    @property
    def marks(self) -> tuple[float, ...]:
        return self.now, self.waits, self._exchanged, self._done

    def finish(self, groups: Sequence[GroupBytes], passes: int) -> Estimate:
        """After the last reduce: the optimizer reads and writes its state and main weights, and reads gradients."""
        moved = sum(2 * group.main + group.main_grad + 2 * group.state for group in groups if group.trainable)
        optimizer, host = moved / self._speed.bandwidth, self._speed.host * passes
        return Estimate(max(self.now + optimizer, host), self.waits, optimizer, self._exchanged, host, self._done)


def measured_flops(model: ModelShape, tokens: float, dtype: torch.dtype | None) -> float:
    """FLOP per second that the products of the largest block reach on this machine, one after another.

    A whole model reaches less: norms, attention and the loss take time and have few FLOPs.
    """
    found = torch.accelerator.current_accelerator()
    device = torch.device("cpu") if found is None else found
    block = max((unit for unit in model.units if not unit.is_embedding), key=lambda unit: unit.numel)
    done = seconds = 0.0
    for tensor in block.tensors:
        if len(tensor.shape) < 2:
            continue
        rows = max(1, round(tokens * tensor.used))
        x = torch.randn(rows, tensor.shape[-1], device=device, dtype=dtype or tensor.dtype)
        weight = torch.randn(tensor.shape[-2:], device=device, dtype=x.dtype)
        seconds += _seconds_of(x, weight.T, device)
        done += 2.0 * rows * weight.numel()
    if not seconds:
        raise ValueError("the model has no matrices to measure; give --tflops a number")
    return done / seconds


def _seconds_of(x: torch.Tensor, weight: torch.Tensor, device: torch.device, least: float = 0.03) -> float:
    """The time of one product: the mean of as many as take ``least`` seconds."""

    def several(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            x @ weight
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - began

    several(1)
    times, taken = 1, several(1)
    while taken < least:
        times *= 2
        taken = several(times)
    return taken / times
