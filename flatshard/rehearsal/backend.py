"""The process-group backend ``rehearsal``: this process is one rank of W, and the other ranks do not exist.

A collective reads and writes as many bytes in local memory as a real one, with the values of a world in which all ranks
hold the same bytes (:mod:`transfer`), and takes its modelled time on the link (:mod:`network`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.rehearsal.clock_cpu import CpuClock, CpuLink
from flatshard.rehearsal.clock_cuda import CudaClock, CudaLink
from flatshard.rehearsal.network import Kind, Level, Network, Traffic, TrafficTotal, wire_bytes
from flatshard.rehearsal.torch_private import NEW_NAMES, ProcessGroup, premul_factor
from flatshard.rehearsal.transfer import Pairs, Transfer

BACKEND = "rehearsal"
# Reductions of equal values that return this value.
_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BAND, dist.ReduceOp.BOR)

Clock = CpuClock | CudaClock
Tensors = Sequence[Tensor]
_is_contiguous, _nbytes = Tensor.is_contiguous, operator.attrgetter("nbytes")


class Medium:
    """What all groups of one rehearsal share: the network, its links on every device, and the sums of traffic."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.traffic = Traffic()
        self._cpu_links = {level: CpuLink() for level in get_args(Level)}
        self._cuda_links: dict[torch.device, CudaLink] = {}

    def clock(self, device: torch.device) -> Clock:
        """A new clock for one process group on ``device``."""
        if device.type == "cpu":
            return CpuClock(self._cpu_links)
        if device.type != "cuda":
            raise ValueError(f"a rehearsed collective got a tensor on {device}; it supports cpu and cuda")
        if device not in self._cuda_links:
            self._cuda_links[device] = CudaLink(device, self.network.sms)
        return CudaClock(self._cuda_links[device])


class RehearsalGroup(ProcessGroup):  # type: ignore[misc]
    """Rank ``rank`` of ``ranks`` (global ranks).  Methods have the names and arguments of a c10d backend."""

    def __init__(self, rank: int, ranks: Sequence[int], medium: Medium) -> None:
        super().__init__(rank, len(ranks))
        self._own, self._count = rank, len(ranks)
        self._medium = medium
        self._reach = medium.network.reach(ranks)
        self._clocks: dict[torch.device, Clock] = {}
        # A cache: the sizes of a step repeat those of the last.
        self._costs: dict[tuple[Kind, int, int], tuple[TrafficTotal, float, float]] = {}
        self._coalesced: list[dist.Work] | None = None
        self._group_name = self._group_desc = ""

    # C++ groups store name and description in their backend object, which this group does not have.  The camel-case
    # methods are called from C++, the properties from Python.
    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, description: str) -> None:
        self._group_desc = description

    def getGroupDesc(self) -> str:
        return self._group_desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _launch(
        self, kind: Kind, size: int, pairs: Pairs, opts: Any = None, segments: int = 1, fold: bool = False,
        slots: int = 1, scale: float = 1.0, result: list[Tensor] | None = None, sizes: list[int] | None = None,
    ) -> dist.Work:  # fmt: skip
        """Submit one collective of ``size`` bytes to its device's clock.  Other arguments: see :class:`Transfer`."""
        if not all(map(_is_contiguous, itertools.chain(*pairs))):
            raise ValueError(f"{kind}: a tensor is not contiguous; call contiguous() on it first")
        if sizes is None:
            sizes = [dst.nbytes if fold else src.nbytes for dst, src in pairs]
        device = pairs[0][0].device if pairs else self._device()
        key = (kind, size, segments)
        if key not in self._costs:
            took = self._medium.network.seconds(kind, size, self._reach, segments)
            self._costs[key] = self._medium.traffic.entries[kind], wire_bytes(kind, size, self._count), took
        entry, wire, seconds = self._costs[key]
        entry.add(size, wire, seconds)
        clock = self._clocks.get(device)
        if clock is None:
            clock = self._clocks[device] = self._medium.clock(device)
        own = self._own if slots > 1 else 0
        in_line = not getattr(opts, "asyncOp", True)  # as NCCL: a synchronous call runs on the caller's stream
        transfer = Transfer(
            pairs, sizes, self._reach.level, seconds, fold, slots, own, scale, result, kind == "barrier", in_line
        )
        work = clock.submit(transfer)
        if self._coalesced is not None:
            self._coalesced[:] = [work]
        return work

    def _scale(self, opts: Any) -> float:
        """The factor from this rank's value to the reduction of W equal values."""
        op = getattr(opts, "reduceOp", opts)  # some calls pass the ReduceOp itself
        if op is None or op == dist.ReduceOp.SUM:
            return float(self._count)
        if any(op == same for same in _SAME):
            return 1.0
        if op == dist.ReduceOp.PREMUL_SUM:
            return self._count * premul_factor(op)
        raise ValueError(f"{op} cannot be rehearsed; use SUM, AVG, MIN, MAX, BAND, BOR or PREMUL_SUM")

    def _launch_sharded(
        self, kind: Kind, outputs: Tensors, inputs: Tensors, opts: Any, scale: float = 1.0
    ) -> dist.Work:
        """Launch a collective between full tensors and shards of 1/W.  Called often, so the loops run in C."""
        count, gathers = self._count, kind == "all_gather"
        fulls, shards = (outputs, inputs) if gathers else (inputs, outputs)
        sizes = list(map(_nbytes, shards))
        if list(map(_nbytes, fulls)) != [count * own for own in sizes]:
            _refuse_sizes(kind, fulls, shards, count)
        pairs = list(zip(outputs, inputs))
        return self._launch(kind, sum(sizes) * count, pairs, opts, len(pairs), not gathers, count, scale, None, sizes)

    # -- gathers: this rank's shard is written to every slot of the output

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._launch_sharded("all_gather", outputs, inputs, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = [(output, shard) for row, shard in zip(outputs, inputs) for output in row]
        return self._launch("all_gather", sum(map(_size, outputs)), pairs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = [(output, shard) for row in outputs for output, shard in zip(row, inputs)]
        return self._launch("all_gather", sum(map(_size, outputs)), pairs, opts, segments=len(inputs))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = [(output, shard) for row, shard in zip(outputs, inputs) for output in row]
        size = _size(inputs) * self._count
        return self._launch("gather", size, pairs or _in_place(inputs), opts, fold=not pairs)

    # -- reductions: all of the input is read; the output is this rank's slot of it times the scale

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._launch_sharded("reduce_scatter", outputs, inputs, opts, self._scale(opts))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """The form with lists, which is rarely used: it takes its full time, but reads only this rank's slot."""
        pairs = [(output, row[self._own]) for output, row in zip(outputs, inputs)]
        scale = self._scale(opts)
        return self._launch("reduce_scatter", sum(map(_size, inputs)), pairs, opts, fold=True, scale=scale)

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None) -> dist.Work:
        return self.allreduce_coalesced(_listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        scale = self._scale(opts)
        return self._launch(
            "all_reduce", _size(tensors), _in_place(tensors), opts, segments=len(tensors), fold=True, scale=scale
        )

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        scale = self._scale(opts) if opts is None or opts.rootRank == self._own else 1.0
        return self._launch("reduce", _size(tensors), _in_place(tensors), opts, fold=True, scale=scale)

    # -- others: bytes of another rank are replaced by this rank's, or by zeros

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work:
        return self._launch("all_to_all", _size([input]), _repeat(output, input), opts, result=[output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = [pair for output, source in zip(outputs, inputs) for pair in _repeat(output, source)]
        return self._launch("all_to_all", _size(inputs), pairs, opts, result=list(outputs))

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, root: int = 0) -> dist.Work:
        tensors = _listed(tensors)
        return self._launch("broadcast", _size(tensors), _in_place(tensors), opts, fold=True)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        pairs = [(output, row[self._own]) for output, row in zip(outputs, inputs)]
        return self._launch("scatter", _size(outputs) * self._count, pairs or _in_place(outputs), opts, fold=not pairs)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        return self._launch("send", _size(tensors), _in_place(tensors), fold=True)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            tensor.data.zero_()
        return self._launch("recv", _size(tensors), _in_place(tensors), fold=True)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, 0, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._launch("barrier", 0, [])

    def _device(self) -> torch.device:
        """The device of a collective without tensors: the one that this group has used last."""
        if self._clocks:
            return next(reversed(self._clocks))
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    # -- coalescing and shutdown

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """The last work since the start.  Works end in launch order, so all have ended when it has."""
        works, self._coalesced = self._coalesced, None
        return works[0] if works else self.barrier()

    def shutdown(self) -> None:
        for clock in self._clocks.values():
            clock.close()
        self._clocks.clear()

    abort = shutdown


for _old, _new in NEW_NAMES.items():
    setattr(RehearsalGroup, _new, getattr(RehearsalGroup, _old))


def _listed(tensors: Tensors | Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _refuse_sizes(kind: Kind, fulls: Tensors, shards: Tensors, count: int) -> None:
    full_name, shard_name = ("output", "input") if kind == "all_gather" else ("input", "output")
    for full, shard in zip(fulls, shards):
        if full.nbytes != shard.nbytes * count:
            raise ValueError(
                f"{kind}: the {full_name} has {full.numel()} elements of {full.dtype} and the {shard_name} "
                f"{shard.numel()} of {shard.dtype}; for {count} ranks the former must have {shard.numel() * count}"
            )


def _size(tensors: Tensors) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _in_place(tensors: Tensors) -> Pairs:
    return [(tensor, tensor) for tensor in tensors]


def _repeat(output: Tensor, source: Tensor) -> Pairs:
    """Copies that fill ``output`` with ``source``, repeated if it is too short."""
    if output.numel() == source.numel():
        return [(output, source)]
    flat, feed = output.view(-1), source.view(-1)
    if not feed.numel():
        flat.data.zero_()
        return []
    starts = range(0, flat.numel(), feed.numel())
    return [(flat[at : at + feed.numel()], feed[: flat.numel() - at]) for at in starts]
