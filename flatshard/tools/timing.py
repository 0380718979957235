"""The estimated time of a step, from the order of launches in a dry run.

Compute runs unit by unit, at the rate that matrix products reach. A gather starts when the engine launches it, which is
when its memory is free; a reduce starts when its gradients are complete. Lanes run in order, and each link runs one
collective at a time, as in a rehearsal. Compute waits where the engine waits. Collectives, encoding and decoding take
memory bandwidth from kernels. After the last reduce the optimizer runs, at the speed of memory.
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

# Bytes of device memory that a collective reads or writes for each byte that it sends or receives: in traces of cases
# (a) and (d) of the benchmarks, kernels lose 0.3 to 0.4 ms per GB on a device of 4.8 TB/s.
_MEMORY_PER_WIRE_BYTE = 1.5


@dataclass(frozen=True)
class Speed:
    """The speed of a device, and its work in one micro-batch.

    ``flops``: FLOP/s of matrix products. ``tokens``: tokens per rank, in rows of ``length`` (None: attention is not
    counted). ``recompute``: blocks are recomputed in backward. ``bandwidth``: of device memory, in bytes per second.
    ``host``: seconds that the host takes to launch forward and backward of a unit; 0 for captured steps. ``peak``: peak
    FLOP/s of the device, for the MFU.
    """

    flops: float
    tokens: float
    length: float | None = None
    recompute: bool = False
    bandwidth: float = 3.35e12
    host: float = 2.7e-3
    peak: float = 989e12

    def __post_init__(self) -> None:
        rates = {"tflops": self.flops, "memory-bandwidth": self.bandwidth, "peak-tflops": self.peak}
        for flag, value in {"tokens": self.tokens, **{flag: rate / 1e12 for flag, rate in rates.items()}}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"--{flag} {value:g}: must be more than 0, and finite")
        if not 0 <= self.host < math.inf:
            raise ValueError(f"--host-ms {1e3 * self.host:g}: must be at least 0, and finite")


@dataclass(frozen=True)
class Estimate:
    """The time of a step in seconds: ``total``, which includes ``waits`` of compute for the wire, and ``optimizer``.

    ``exchanges``: wire time of tokens between ranks with different experts. ``host``: time of the host; if it is more
    than the rest, it is the total. ``flops``: model FLOPs on one rank, without recompute.
    """

    total: float
    waits: float
    optimizer: float
    exchanges: float
    host: float
    flops: float


class StepClock:
    """The clock of an estimate. ``now``: the time that compute has reached. ``waits``: how long it has waited."""

    def __init__(self, speed: Speed, network: Network, width: int) -> None:
        self.now = self.waits = self._exchanged = self._model_flops = 0.0
        self._speed, self._network, self._width = speed, network, width
        self._lanes = {"gather": 0.0, "reduce": 0.0}
        self._links: dict[Level, float] = dict.fromkeys(network.links, 0.0)

    def launch(self, lane: str, launches: Sequence[PlannedCollective]) -> float:
        """Launch collectives on a lane, which start after the compute so far; returns the time when they end."""
        self._lanes[lane] = end = self._end_of(max(self._lanes[lane], self.now), launches)
        return end

    def _end_of(self, begin: float, launches: Sequence[PlannedCollective]) -> float:
        for launch in launches:
            level = launch.reach(self._network).level
            self._links[level] = begin = max(begin, self._links[level]) + launch.seconds(self._network)
        return begin

    def wait(self, until: float) -> None:
        """Let compute wait until this time."""
        self.waits += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def move(self, count: int) -> None:
        """Read or write this many bytes outside of matrix products, which wait, also on another stream."""
        self.now += count / self._speed.bandwidth

    def use(self, unit: UnitShape, group: GroupBytes, position: int, backward: bool) -> None:
        """Compute with the group's tensors at this position. Backward counts twice, and once more if recomputed.

        Tokens are sent to the experts of other ranks before, and back after it; compute waits for both.
        """
        again = self._speed.recompute and unit.is_block
        flops = 0.0 if unit.is_embedding else self._flops(group, position)
        self._model_flops += (2 if backward else 1) * flops
        sent = self._tokens(group, position)
        for rounds in ((1, 2) if again else (2,)) if backward else (1,):
            self._exchange(sent)
            self._compute(rounds * flops / self._speed.flops)
            self._exchange(sent)

    def _flops(self, group: GroupBytes, position: int) -> float:
        tokens, length = self._speed.tokens, self._speed.length or 0
        found = [tensor for tensor in group.tensors if tensor.after == position]
        products = sum(2 * tensor.used * math.prod(tensor.shape) for tensor in found if len(tensor.shape) > 1)
        return tokens * (products + sum(2 * tensor.queries * length for tensor in found))  # causal: half of the square

    def _exchange(self, sent: Sequence[PlannedCollective]) -> None:
        self._exchanged += sum(launch.seconds(self._network) for launch in sent)
        self.wait(self._end_of(self.now, sent))

    def _tokens(self, group: GroupBytes, position: int) -> list[PlannedCollective]:
        first, parts = group.tensors[0], group.setup.expert_parts
        if not first.is_expert or first.after != position or parts == 1:
            return []
        size = self._speed.tokens * first.used * first.shape[0] * self._width * group.compute_dtype.itemsize
        return [PlannedCollective("all_to_all", 0, parts, round(size), 1, 1)]

    def _compute(self, seconds: float) -> None:
        moved = 0.0
        for level, link in self._network.links.items():
            beside = min(seconds, self._links[level] - self.now)
            moved += beside * link.bandwidth if beside > 0 else 0.0
        self.now += seconds + _MEMORY_PER_WIRE_BYTE * moved / self._speed.bandwidth

    def repeat(self, times: int, since: tuple[float, ...]) -> None:
        """Repeat what has happened since `totals` were ``since``."""
        now, waits, exchanged, done = (times * (end - begin) for end, begin in zip(self.totals, since))
        self.now += now
        self.waits += waits
        self._exchanged += exchanged
        self._model_flops += done
        self._lanes = {name: free + now for name, free in self._lanes.items()}
        self._links = {level: free + now for level, free in self._links.items()}

    @property
    def totals(self) -> tuple[float, ...]:
        return self.now, self.waits, self._exchanged, self._model_flops

    def finish(self, groups: Sequence[GroupBytes], passes: int) -> Estimate:
        """Add the optimizer's step, which reads and writes its state and main weights, and reads gradients."""
        moved = sum(2 * group.main + group.main_grad + 2 * group.state for group in groups if group.trainable)
        optimizer, host = moved / self._speed.bandwidth, self._speed.host * passes
        return Estimate(
            max(self.now + optimizer, host), self.waits, optimizer, self._exchanged, host, self._model_flops
        )


def measured_flops(model: ModelShape, tokens: float, dtype: torch.dtype | None) -> float:
    """FLOP/s that the matrix products of the largest block reach on this machine, one after another.

    A whole model reaches less, because norms, attention and the loss take time and have few FLOPs.
    """
    from torch.utils.benchmark import Timer  # takes long to import, and is seldom needed

    accelerator = torch.accelerator.current_accelerator()
    device = torch.device("cpu") if accelerator is None else accelerator
    block = max((unit for unit in model.units if not unit.is_embedding), key=lambda unit: unit.numel)
    done, seconds, threads = 0.0, 0.0, torch.get_num_threads()

    def clock() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    for tensor in block.tensors:
        if len(tensor.shape) < 2:
            continue
        rows = max(1, round(tokens * tensor.used))
        x = torch.randn(rows, tensor.shape[-1], device=device, dtype=dtype or tensor.dtype)
        weight = torch.randn(tensor.shape[-2:], device=device, dtype=x.dtype)
        timer = Timer("x @ weight.T", timer=clock, globals={"x": x, "weight": weight}, num_threads=threads)
        seconds += timer.blocked_autorange(min_run_time=0.03).mean
        done += 2.0 * rows * weight.numel()
    if not seconds:
        raise ValueError("--tflops measured: the model has no matrices to measure; give a number")
    return done / seconds
