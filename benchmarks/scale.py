"""What a job of thousands of ranks costs before and beside its steps, simulated on one machine.

    python -m benchmarks.scale start        # process groups and first launches of a model, beside FSDP2
    python -m benchmarks.scale store        # a TCPStore with W clients: seconds to connect, requests per second
    python -m benchmarks.scale gloo         # a Gloo group of W ranks: seconds, connections, requests to the store
    python -m benchmarks.scale alarm        # W ranks of the alarm's tree: start, one error, a question, the end
    python -m benchmarks.scale blame        # flight records of W ranks, and what `flatshard blame` takes to read them
    python -m benchmarks.scale checkpoint   # saving and loading 405B on W ranks but for the bytes, beside DCP's planner
                                            # checkpoint-70b, checkpoint-flat: of 70B; with layout="flat"
    python -m benchmarks.scale plan         # layout, padding and `flatshard plan` of 405B and of a 1T mixture
    python -m benchmarks.scale latency      # one collective and one step on 8 to 16,384 ranks, by algorithm
    python -m benchmarks.scale cases        # cases (c) and (e64) of benchmarks.table on thousands of ranks
    python -m benchmarks.scale stragglers   # what a step loses if ranks are slower than others

Every sub-command takes ``--worlds`` and ``--json FILE``.  All ranks of a simulation share the processors of one
machine: seconds are of the processor, for all of them together, unless a column says "per rank".  Counts and bytes are
exact.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import pickle
import resource
import selectors
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_shard

import flatshard
import flatshard.trust.watch as watch_module
from benchmarks.growth import ROWS, Chain
from benchmarks.plan import choice_of, shapes_of
from benchmarks.table import CASES
from flatshard.checkpoint.files import BLOCK, TensorEntry, checked_header, file_facts
from flatshard.checkpoint.manifest import EXTRA, FORMAT, MANIFEST, Manifest, pack_boxes, rank_file
from flatshard.checkpoint.reader import Reader
from flatshard.checkpoint.saving import _publish
from flatshard.checkpoint.state import Snapshot
from flatshard.layout.planner import LayoutName
from flatshard.layout.planner import plan as plan_layout
from flatshard.policy import MixedPrecisionPolicy, SchedulePolicy, placements_for
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import Algorithm, Network, get_network
from flatshard.tools.dry_run import DryRun, memory_of, time_of
from flatshard.tools.group_bytes import GroupBytes, PlannedCollective, TrainingSetup
from flatshard.tools.model_shapes import ModelShape, load_model
from flatshard.tools.plan import compare_strategies
from flatshard.tools.strategy_plan import Machine, Training
from flatshard.tools.timing import Estimate, Speed, StepClock
from flatshard.trust.blame import blame as verdict_of
from flatshard.trust.blame import read_records
from flatshard.trust.record import CAPACITY, FlightRecord
from flatshard.trust.watch import Verdict, Watch, Watched

Row = dict[str, Any]
Rows = Callable[[int], tuple[int, int]]
Simulated = tuple[str, tuple[int, ...], Rows]


@contextmanager
def seconds(row: Row, name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Of the processor, so that it does not matter what else runs on this machine; or by another clock."""
    begin = clock()
    yield
    row[name] = clock() - begin


def open_files(count: int) -> None:
    """Raise the limit of open files to what this process is allowed; ValueError if that is not enough."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if count > most:
        raise ValueError(f"{count} open files are needed; this process may have {most}")


# Start


def start(world: int) -> Row:
    """Process groups, and what is sent up to the end of the first pass, beside FSDP2: rank 0 of a rehearsed W."""
    row: Row = {"world": world}
    for name, shard in (("flatshard", flatshard.fully_shard), ("fsdp2", fsdp2_shard)):
        with rehearse(world, "free") as rehearsal:
            with seconds(row, f"{name}_s"):
                mesh = init_device_mesh("cpu", (world,))
                model = Chain(8)
                for block in model.blocks:
                    shard(block, mesh=mesh)
                shard(model, mesh=mesh)
                model(torch.ones(ROWS)).sum().backward()
            sent = rehearsal.medium.traffic.entries
            row[f"{name}_groups"] = len(dist.distributed_c10d._world.pg_map)
            row[f"{name}_launches"] = sum(entry.launches for entry in sent.values())
            row[f"{name}_all_reduces"] = sent["all_reduce"].launches if "all_reduce" in sent else 0
            row[f"{name}_all_reduce_bytes"] = sent["all_reduce"].bytes if "all_reduce" in sent else 0
    return row


class CountingStore:
    """A store that counts the requests and the bytes of one rank."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests, self.bytes = 0, 0

    def _count(self, *texts: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        self._count(key, found)
        return found

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        found: bool = self._store.check(keys)
        return found


class LightClient:
    """A connection to a TCPStore that speaks just enough of its protocol to ask whether a key is there.

    A client of torch's own has the same traffic on the wire; thousands of them in one process take much longer to make.
    """

    _HELLO, _CHECK = struct.pack("<BI", 0, 0x3C85F7CE), 5

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(self._HELLO)

    def ask(self, key: str) -> None:
        self._socket.sendall(struct.pack("<BQQ", self._CHECK, 1, len(key)) + key.encode())

    def is_there(self) -> bool:
        """The answer to the question before."""
        answer = self._socket.recv(1)
        if answer not in (b"\0", b"\1"):
            raise RuntimeError(f"this TCPStore answers {answer!r}: its protocol is another one")
        return answer == b"\0"


def store(world: int) -> Row:
    """Every rank connects to one TCPStore, and all look at a key at once; several times."""
    open_files(2 * world + 200)
    row: Row = {"world": world}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("there", "")
    with seconds(row, "connect_s", time.perf_counter):
        clients = [LightClient(server.port) for _ in range(world)]
        clients[-1].ask("/there")
        assert clients[-1].is_there()
    rounds = []
    for _ in range(9):
        begin = time.perf_counter()
        for client in clients:
            client.ask("/raised")
        assert not any(client.is_there() for client in clients)
        rounds.append(time.perf_counter() - begin)
    row["all_look_s"] = statistics.median(rounds)
    row["looks_per_s"] = world / row["all_look_s"]
    return row


def gloo(world: int) -> Row:
    """Every rank makes a Gloo group, in a thread of its own, as `Exchange` does for messages beside training."""
    row: Row = {"world": world}
    for lazy in (False, True):
        name = "lazy" if lazy else "full"
        open_files(2 * world * world + 200 if not lazy else 8 * world + 200)
        base = dist.HashStore()
        before = len(os.listdir("/proc/self/fd"))
        groups: list[Any] = [None] * world

        def make(rank: int, lazy: bool = lazy, base: Any = base, name: str = name, groups: list[Any] = groups) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy)]
            options._threads = 1
            groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore(name, base), rank, world, options)
            value = torch.ones(1)
            groups[rank].allgather([[torch.zeros(1) for _ in range(world)]], [value]).wait()

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(world)]
        with seconds(row, f"{name}_s", time.perf_counter):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        row[f"{name}_files_per_rank"] = (len(os.listdir("/proc/self/fd")) - before) / world
        row[f"{name}_keys"] = base.num_keys()
        groups.clear()
    return row


class Turns:
    """In the place of the loop's thread: what a rank has to do, it does at once."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def do(self, action: Callable[[], None], wait: float = 0.0) -> None:
        action()


class Ranks:
    """Ranks that watch over each other, in one thread; each has its own connections, over loopback sockets."""

    def __init__(self, world: int) -> None:
        open_files(3 * world + 200)
        os.environ.pop("MASTER_ADDR", None)
        self.turns, self.heard = Turns(), Counter[int]()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores = [CountingStore(server) for _ in range(world)]
        self.watches = [self._watch(rank, world) for rank in range(world)]

    def _watch(self, rank: int, world: int) -> Any:
        group = Watched(lambda name: self.stores[rank], None, rank, world)
        watch = Watch(group, "simulated", self.turns, Verdict())  # type: ignore[arg-type]
        hear = watch._hear

        def counted(message: dict[str, Any]) -> None:
            self.heard[rank] += 1
            hear(message)

        watch._hear = counted  # type: ignore[method-assign]
        return watch

    def run(self, wait: float = 0.05) -> None:
        """Until nobody has anything to say."""
        selector = self.turns.selector
        while ready := selector.select(0.0) or (wait and selector.select(wait)):
            for key, _ in ready:
                key.data()

    def most_heard(self) -> int:
        """Messages of the rank that has heard most, since this was asked the last time."""
        found = max(self.heard.values(), default=0)
        self.heard.clear()
        return found


def alarm(world: int) -> Row:
    """The watch of a job: its start, one error, a question that all ranks ask at once, and the end of all."""
    row: Row = {"world": world}
    watch_module.GRACE = math.inf  # ranks that take turns on one processor take longer than those that have one each
    ranks = Ranks(world)
    with seconds(row, "start_s"):
        for watch in ranks.watches:
            watch.open()
        while [watch for watch in ranks.watches if not watch._find_others()]:
            ranks.run(0.0)
    row["store_requests_per_rank"] = max(store.requests for store in ranks.stores)
    row["store_requests"] = sum(store.requests for store in ranks.stores)
    row["store_bytes"] = sum(store.bytes for store in ranks.stores)
    row["connections_per_rank"] = max(len(watch._links._links) for watch in ranks.watches)
    with seconds(row, "error_s"):
        ranks.watches[world // 2].tell("ValueError: no data")
        ranks.run()
    assert all(watch.verdict.reason for watch in ranks.watches if watch.group.rank != world // 2)
    row["error_messages_per_rank"] = ranks.most_heard()
    if world <= 1024:  # in all it is the square of W, which one processor does not do in minutes
        with seconds(row, "question_s"):
            for watch in ranks.watches:
                if watch._survey.begin():
                    watch._answer({"ask": watch.group.rank})
            ranks.run()
        assert all(watch._survey.is_complete() for watch in ranks.watches)
        row["question_messages_per_rank"] = ranks.most_heard()
        row["question_s_per_rank"] = row["question_s"] / world
    with seconds(row, "end_s"):
        for watch in reversed(ranks.watches):
            watch.close()
            ranks.run(0.0)
    row["end_messages_per_rank"] = ranks.most_heard()
    return row


# Failure


def blame(world: int) -> Row:
    """Records of which each holds as many launches as fit; one rank has stopped before the others."""
    row: Row = {"world": world}
    with tempfile.TemporaryDirectory() as folder:
        with seconds(row, "write_s"):
            for rank in range(world):
                record = FlightRecord()
                record.keep_in(Path(folder), rank, world=world, pid=rank, host=f"node-{rank // 8}", looked=1.0)
                gather, reduce = record.group(f"gather 0-{world - 1}"), record.group(f"reduce 0-{world - 1}")
                for number in range(CAPACITY - (rank == world // 3)):
                    group = gather if number % 3 else reduce
                    record.append(group, 0 if number % 3 else 1, f"model.layers.{number % 126}", 1 << 28, _ENDED)
                record._path = None  # it is left there
        row["bytes_per_rank"] = (Path(folder) / "rank-0.ring").stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with seconds(row, "read_s"):
            records = read_records(Path(folder))
        with seconds(row, "blame_s"):
            said = verdict_of(records)
        row["memory_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert f"rank {world // 3} launched nothing more" in said, said
    row["said"] = len(said)
    return row


class _Ended:
    is_on_device = False

    def has_ended(self) -> bool:
        return True


_ENDED = _Ended()


# Checkpoints


def checkpoint(world: int, model: str = "llama-405b", layout: LayoutName = "tensor") -> Row:
    """A save of so many ranks, and ranks that load it: all but the bytes of tensors. Beside DCP's planner, up to 256.

    Weights and the two moments of AdamW in float32. Files are sparse, of their true sizes, with true headers.
    ``same``: a rank of as many that loads. ``all``: one that needs something of every file.
    """
    row: Row = {"world": world, "model": model, "layout": layout}
    tensors = _tensors(model, world, layout)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "step")
        actions: dict[str, tuple[Callable[..., Row], Any]] = {
            "flatshard": (_publish_simulated, folder),
            "flatshard_same": (_read_simulated, folder),
            "flatshard_all": (_open_simulated, folder),
            **({"dcp": (_dcp_plan, None)} if world <= 256 else {}),
        }
        for name, (action, where) in actions.items():
            row |= {f"{name}_{key}": value for key, value in in_child(action, world, tensors, where).items()}
    return row


def in_child(action: Callable[..., Row], *given: Any) -> Row:
    """What it returns in a process of its own, and the memory that it has taken there beyond what was there before."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def run() -> None:
        before = _resident()
        found = action(*given)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        send.send({**found, "memory_mb": (peak - before) / 2**20})

    child = context.Process(target=run)
    child.start()
    send.close()
    try:
        found: Row = receive.recv()
    except EOFError:
        raise RuntimeError(f"{action.__name__}{given} has ended without a result, for want of memory maybe") from None
    child.join()
    return found


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _tensors(model: str, world: int, layout: LayoutName) -> list[Simulated]:
    """Weights, and the state of AdamW: name, shape, and which rows a rank has: the first, and how many."""
    cut: list[tuple[tuple[int, ...], Rows]] = []
    known: dict[int, Any] = {}  # units of equal shapes have one layout
    for unit in load_model(model).units:
        planned = plan_layout([tensor.shape for tensor in unit.tensors], world, layout=layout)
        rows = known.setdefault(id(planned), [cache(partial(planned.rows, slot, pieces=1)) for slot in planned.slots])
        cut += zip([slot.shape for slot in planned.slots], rows)
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return [(f"{kind}/layers.{at}.weight", *each) for kind in kinds for at, each in enumerate(cut)]


def _publish_simulated(world: int, tensors: Sequence[Simulated], path: Path) -> Row:
    """What ranks have written becomes a manifest."""
    row: Row = {}
    kinds = {key: ("F32", shape) for key, shape, _ in tensors}
    names = {"dict": [(key, {"tensor": key}) for key in kinds]}
    folder = path.parent / ".saving-step"
    folder.mkdir()
    with seconds(row, "ranks_s"):
        messages = [_message(folder, tensors, rank) for rank in range(world)]
    row["message_kb"] = max(map(len, messages)) / 1024
    with seconds(row, "coordinator_s"):
        taken = Snapshot(0, world, names, None, None, kinds)
        _publish(path, folder, taken, map(json.loads, messages), None)
    row["index_mb"] = (path / MANIFEST).stat().st_size / 2**20
    return row


def _message(folder: Path, tensors: Sequence[Simulated], rank: int) -> bytes:
    """What a rank says of what it has written. Checksums are random, as long as true ones are."""
    boxes = {}
    for key, shape, rows in tensors:
        low, count = rows(rank)
        if count:
            boxes[key] = (low, *[0] * (len(shape) - 1)), (count, *shape[1:])
    header, size = _simulated_header(tuple((key, sizes) for key, (_, sizes) in boxes.items()))
    (folder / rank_file(rank)).write_bytes(header)
    os.truncate(folder / rank_file(rank), size)
    return json.dumps({"file": file_facts(size, header), **pack_boxes([key for key, _, _ in tensors], boxes)}).encode()


@lru_cache(maxsize=8)  # most ranks have equal parts
def _simulated_header(parts: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[bytes, int]:
    """The header of a file with these parts, and the size of the file."""
    entries = {key: TensorEntry(torch.float32, sizes) for key, sizes in parts}
    blocks = sum(-(-entry.nbytes // BLOCK) for entry in entries.values())
    sums = np.random.default_rng(0).integers(2**64, size=blocks, dtype=np.uint64).tolist()
    header = checked_header(entries, sums, BLOCK, {"format": FORMAT, EXTRA: "null"})
    return header, len(header) + sum(entry.nbytes for entry in entries.values())


def _read_simulated(world: int, tensors: Sequence[Simulated], path: Path) -> Row:
    """A rank that loads on as many ranks: the manifest, and where all that it needs is."""
    row: Row = {}
    with seconds(row, "s"):
        manifest = Manifest(path)
        with Reader(manifest) as reader:
            for key, shape, rows in tensors:
                low, count = rows(world // 2)
                zeros = [0] * (len(shape) - 1)
                _locate(manifest, reader, key, (low, *zeros), (count, *shape[1:]))
    row["files"] = len(manifest.opened)
    return row


def _open_simulated(world: int, tensors: Sequence[Simulated], path: Path) -> Row:
    """A rank that loads a column of every tensor, up to where all files are open and known."""
    row: Row = {}
    with seconds(row, "s"):
        manifest = Manifest(path)
        with Reader(manifest) as reader:
            for key, shape, _ in tensors:
                _locate(manifest, reader, key, [0] * len(shape), (shape[0], *[1] * (len(shape) - 1)))
                if len(manifest.opened) == world:
                    break
    row["files"] = len(manifest.opened)
    return row


def _locate(manifest: Manifest, reader: Reader, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    entry = manifest.tensors[key]
    for chunk in entry.chunks_within(offsets, sizes):
        reader._file(chunk.file, key)
        entry.located(chunk)


def _dcp_plan(world: int, tensors: Sequence[Simulated], _: None) -> Row:
    """The ranks' plans as their planner makes them, and the coordinator's part, to the bytes of the index."""
    row: Row = {}
    properties = TensorProperties(dtype=torch.float32)
    plans = []
    with seconds(row, "ranks_s"):
        for rank in range(world):
            items = []
            for key, shape, rows in tensors:
                low, count = rows(rank)
                if count:
                    first = torch.Size([low, *[0] * (len(shape) - 1)])
                    chunk = ChunkStorageMetadata(first, torch.Size([count, *shape[1:]]))
                    data = TensorWriteData(chunk, properties, torch.Size(shape))
                    items.append(WriteItem(MetadataIndex(key, first), WriteItemType.SHARD, tensor_data=data))
            plans.append(pickle.dumps(SavePlan(items, planner_data={key: (key,) for key, _, _ in tensors})))
    row["message_kb"] = max(map(len, plans)) / 1024
    with seconds(row, "coordinator_s"):
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        local = [pickle.loads(plan) for plan in plans]
        plans.clear()
        final, metadata = planner.create_global_plan(local)
        metadata.storage_data = {
            item.index: _StorageInfo(f"__{rank}_0.distcp", 0, 1)
            for rank, plan in enumerate(final)
            for item in plan.items
        }
        text = pickle.dumps(metadata)
    row["index_mb"] = len(text) / 2**20
    del local, final, metadata
    with seconds(row, "read_s"):
        pickle.loads(text)
    return row


# Layout, plan and the model of the network

_MIXTURE = {  # of a trillion parameters, 32 billion of them for a token
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 7168, "num_hidden_layers": 61, "head_dim": 128,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_experts": 384, "num_experts_per_tok": 8,
}  # fmt: skip


def plan(world: int) -> Row:
    """What a rank stores beyond its share, and what `flatshard plan` advises, on a network of three levels."""
    row: Row = {"world": world}
    for name, source, parts in (("405b", "llama-405b", 1), ("1t", _mixture(), 8)):
        with seconds(row, f"{name}_model_s"):
            shape = load_model(source)
        with seconds(row, f"{name}_layout_s"):
            waste = padding(shape, world, parts)
        row[f"{name}_padding_percent"] = 100 * waste
        speed = Speed(500e12, 8192, 8192, recompute=True)
        training = Training(MixedPrecisionPolicy(torch.bfloat16, main_dtype=torch.float32), speed=speed)
        machine = Machine(world, 141e9, get_network("h100-pods"))
        with seconds(row, f"{name}_plan_s"):
            found = compare_strategies(shape, machine, training)
        rows = {each.name: each for each in found.rows if each.step is not None}
        row[f"{name}_advice"] = found.advice
        row[f"{name}_mesh"] = "x".join(map(str, rows[found.advice].mesh)) if found.advice in rows else ""
        row[f"{name}_step_s"] = {each.name: round(each.step.total, 2) for each in rows.values() if each.fits}
        row[f"{name}_formats"] = found.formats
    return row


def _mixture() -> str:
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(_MIXTURE))
    return folder


def padding(model: ModelShape, world: int, parts: int = 1) -> float:
    """Elements that ranks store beyond those of the tensors, as a part of them; experts are in ``parts`` parts."""
    setup = TrainingSetup((world,), placements_for("optim_grads_params", None, 1), expert_parts=parts)
    kept = held = 0
    for unit in model.units:
        for expert in (False, True):
            tensors = [tensor for tensor in unit.tensors if tensor.is_expert is expert]
            if tensors:
                group = GroupBytes(tensors, setup.of_experts() if expert else setup)
                kept += group.layout.payload
                held += group.layout.num_shards * group.layout.shard_numel
    return held / kept - 1


def latency(world: int) -> Row:
    """One all-gather of 64 kB, of a block of 8B (436 MB) and of one of 405B (6.4 GB), and a step of 8B, in one pod."""
    row: Row = {"world": world}
    for algorithm in get_args(Algorithm):
        network = replace(get_network("h100-ib400", algorithm=algorithm), rails=8)
        reach = network.reach(range(world))
        for name, size in (("64kB", 1 << 16), ("436MB", 436 << 20), ("6.4GB", 6_400 << 20)):
            row[f"{algorithm}_{name}_ms"] = 1e3 * network.seconds("all_gather", size, reach)
        row[f"{algorithm}_8b_step_s"] = _clocked("llama-8b", (world,), network, lambda now: now)
    return row


def cases(world: int) -> Row:
    """Cases (c) and (e64) of benchmarks.table on so many ranks: launches, wire and step by the formula of `plan`."""
    row: Row = {"world": world}
    for name in ("c", "e64"):
        setup = replace(CASES[name], world=world)
        shape, choice = shapes_of(setup), choice_of(setup)
        launches = memory_of(shape, choice).launches
        row[f"{name}_launches"] = sum(launch.times for launch in launches)
        speed = Speed(600e12, setup.batch * setup.seq, setup.seq, setup.model.recompute, 4.8e12, 0.0)
        for algorithm in get_args(Algorithm):
            network = replace(get_network("h100-ib400", algorithm=algorithm), rails=8)
            wire = [
                launch.times * network.seconds(launch.kind, launch.size, launch.reach(network), launch.segments)
                for launch in launches
            ]
            row[f"{name}_{algorithm}_wire_s"] = sum(wire)
            row[f"{name}_{algorithm}_step_s"] = time_of(shape, choice, speed, network).total
    return row


def stragglers(world: int, model: str = "llama-8b") -> Row:
    """What a step takes longer where one rank is slower, or all are by chance, in `plan`'s model of a step.

    Every unit of compute of every rank is clocked. A collective begins when the last of its ranks has come to it.
    """
    row: Row = {"world": world, "model": model}
    nodes = max(world // 8, 1)
    chance = np.random.default_rng(0)

    def one(share: float) -> Callable[[Any], Any]:
        factors = np.ones(world)
        factors[world // 2] += share
        return lambda taken: taken * factors

    cases: dict[str, Callable[[Any], Any]] = {
        "even": lambda taken: taken * np.ones(world),
        "one_5": one(0.05),
        "one_20": one(0.2),
        "jitter_5": lambda taken: taken * (1 + 0.05 * np.abs(chance.standard_normal(world))),
    }
    policies: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "zero3": ((world,), {}),
        "zero3_ahead": ((world,), {"schedule": SchedulePolicy(max_gathered=8, max_reducing=8)}),
        "zero3_4_microbatches": ((world,), {"microbatches": 4}),
        "hsdp": ((nodes, world // nodes), {}),
    }
    for policy, (mesh, more) in policies.items():
        taken = {name: _clocked(model, mesh, get_network("h100-pods"), case, **more) for name, case in cases.items()}
        row[f"{policy}_step_s"] = taken["even"]
        for name in ("one_5", "one_20", "jitter_5"):
            row[f"{policy}_{name}_percent"] = 100 * (taken[name] / taken["even"] - 1)
    return row


def _clocked(model: str, mesh: tuple[int, ...], network: Network, slower: Callable[[Any], Any], **more: Any) -> float:
    """Seconds of a step of which each rank takes ``slower(seconds)`` for what takes ``seconds`` on the others."""
    shape = load_model(model)
    placements = placements_for("optim_grads_params", "no_shard" if len(mesh) == 2 else None, len(mesh))
    precision = MixedPrecisionPolicy(torch.bfloat16, main_dtype=torch.float32)
    setup = TrainingSetup(mesh, placements, precision, **more)
    speed = Speed(500e12, 8192, 8192, host=0.0)
    clock = RanksClock(speed, network, shape.width, mesh, slower)
    return float(np.max(DryRun(shape, setup).timed(clock, setup.microbatches).total))


class RanksClock(StepClock):
    """The clock of all ranks of a mesh: each has its own time, and they meet in collectives."""

    def __init__(
        self, speed: Speed, network: Network, width: int, mesh: tuple[int, ...], slower: Callable[[Any], Any]
    ) -> None:
        super().__init__(speed, network, width)
        self._mesh, self._slower = mesh, slower

    def _end_of(self, begin: Any, launches: Sequence[PlannedCollective]) -> Any:
        for launch in launches:
            level = launch.reach(self._network).level
            free = np.broadcast_to(np.maximum(begin, self._links[level]), math.prod(self._mesh)).reshape(self._mesh)
            met = np.broadcast_to(free.max(axis=launch.axis, keepdims=True), self._mesh).ravel()
            self._links[level] = begin = met + launch.seconds(self._network)  # type: ignore[assignment]
        return begin

    def launch(self, lane: str, launches: Sequence[PlannedCollective]) -> float:
        self._lanes[lane] = end = self._end_of(np.maximum(self._lanes[lane], self.now), launches)
        return end

    def wait(self, until: Any) -> None:
        self.waits += np.maximum(0.0, until - self.now)
        self.now = np.maximum(self.now, until)

    def _compute(self, seconds: float) -> None:
        self.now = self.now + self._slower(seconds)

    def finish(self, groups: Sequence[GroupBytes], passes: int) -> Estimate:
        self.now = float(np.max(self.now))
        return super().finish(groups, passes)


COMMANDS: dict[str, tuple[Callable[..., Row], tuple[int, ...]]] = {
    "start": (start, (8, 64, 512, 4096)),
    "store": (store, (64, 256, 1024, 4096)),
    "gloo": (gloo, (8, 16, 32, 64)),
    "alarm": (alarm, (64, 256, 1024, 4096)),
    "blame": (blame, (64, 512, 4096)),
    "checkpoint": (checkpoint, (16, 64, 256, 4096)),
    "checkpoint-70b": (partial(checkpoint, model="llama-70b"), (16, 64, 256, 4096)),
    "checkpoint-flat": (partial(checkpoint, layout="flat"), (16, 64, 256, 4096)),
    "plan": (plan, (4096, 16384)),
    "latency": (latency, (8, 64, 512, 4096, 16384)),
    "cases": (cases, (64, 512, 4096)),
    "stragglers": (stragglers, (64, 512, 4096)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--worlds", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run, worlds = COMMANDS[options.command]
    rows = []
    for world in options.worlds or worlds:
        rows.append(run(world))
        print(
            "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
        )
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known[options.command] = rows
        options.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
