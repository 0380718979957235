"""Real ranks: what communicators cost, what separate ones gain, and whether a rehearsal predicts the step.

    python -m benchmarks.nccl communicators --mesh 2x2 --json PATH    4 ranks, on a mesh of 2 x 2 or of 4
    python -m benchmarks.nccl steps --ranks 2 --json PATH             link, real and rehearsed steps: bound by the wire
    python -m benchmarks.nccl captured --ranks 2 --tokens 16384 ...   eager and captured steps, some compute beside it

All ranks share the first GPU, over NCCL and loopback sockets; with ``--device cpu`` it is Gloo and a smaller model.
Wire and GPU are shared, so no figure here is that of a machine with a GPU per rank.
``steps`` measures all-gathers and reduce-scatters, fits latency and bandwidth, trains for real (systems in turns), and
rehearses the same steps on that link: W processes at a time, which compete for the GPU as the real ranks do, and alone.
Figures are noted as they come, and what a limit in time cuts off is missing in the table.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import functools
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import flatshard
from benchmarks.models import LLAMA_TINY, LlamaConfig
from benchmarks.processes import on_ranks
from benchmarks.systems import Setup, flat, get_system
from benchmarks.table import timed
from benchmarks.validate import fit
from flatshard.rehearsal import Link, Network, rehearse
from flatshard.rehearsal.network import FREE, difference, wire_bytes

MODEL = LlamaConfig(1024, layers=4, heads=16, kv_heads=4, ffn=2816, vocab=4096, max_tokens=1024)  # 53M
SIZES = [1 << power for power in range(10, 27, 2)]  # bytes of the full message: 1 KiB to 64 MiB
FITTED = 1 << 16  # from this size on a launch counts for the fit: units are far larger
EAGER = {
    "fsdp2": get_system("fsdp2"),
    "flatshard, shared groups": functools.partial(flat, separate_groups=False),
    "flatshard, separate groups": functools.partial(flat, separate_groups=True),
}
MESHES = {"4": (4,), "2x2": (2, 2)}
WARMUP = 4  # the fourth may be one that is captured


class Notes:
    """Rows of figures in a file per rank, written as they come."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"{rank}.jsonl")

    def add(self, **row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def noted(folder: str) -> list[list[dict[str, Any]]]:
    """By rank."""
    paths = sorted(Path(folder).glob("*.jsonl"), key=lambda path: int(path.stem))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# Communicators


def meet(name: str, world: int) -> None:
    """Wait for all ranks, without a communicator."""
    store = c10d._get_default_store()
    store.add(f"meet {name}", 1)
    while store.add(f"meet {name}", 0) < world:
        time.sleep(0.01)


def taken(stage: str, world: int, device: str) -> dict[str, Any]:
    """What this process has, and what is taken of the device, which all ranks share."""
    gc.collect()
    synchronize(device)
    if device == "cuda":
        torch.cuda.empty_cache()
    meet(f"before {stage}", world)
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            names[(task / "comm").read_text().strip()] += 1
        except FileNotFoundError:  # it has just ended
            continue
    groups = list(c10d._world.pg_map)
    row = {
        "stage": stage,
        "groups": len(groups),
        "titles": [f"{group.group_desc or group.group_name} of {group.size()}" for group in groups],
        "communicators": sum(has_communicator(group) for group in groups),
        "threads": sum(names.values()),
        "names": dict(names),
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        row |= {"used": total - free, "reserved": torch.cuda.memory_reserved()}
    meet(f"after {stage}", world)
    return row


def has_communicator(group: Any) -> bool:
    """Whether NCCL has made one for it; it does so at first use. False also where torch does not tell."""
    cuda = [device for device in group._device_types if device.type == "cuda"]
    backend = group._get_backend(cuda[0]) if cuda else None
    return bool(backend is not None and backend.name() == "nccl" and getattr(backend, "_is_initialized", bool)())


def blocks(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(device)


def train_blocks(model: nn.Module, device: str, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(8, 512, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def communicators(rank: int, world: int, folder: str, system: str, mesh_name: str, device: str) -> None:
    notes = Notes(folder, rank)
    train_blocks(blocks(device), device)  # what one process needs
    notes.add(**taken("begun", world, device))
    arguments: dict[str, Any] = {}
    fully_shard: Callable[..., Any] = fsdp2_fully_shard
    if system != "fsdp2":
        fully_shard = flatshard.fully_shard
        arguments["schedule"] = flatshard.SchedulePolicy(separate_groups="separate" in system)
    shape = MESHES[mesh_name]
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def sharded(mesh: DeviceMesh) -> nn.Module:
        model = blocks(device)
        for block in model:
            fully_shard(block, mesh=mesh, **arguments)
        fully_shard(model, mesh=mesh, **arguments)
        return model

    model = sharded(mesh)
    notes.add(**taken("sharded", world, device))
    train_blocks(model, device)
    notes.add(**taken("stepped", world, device))
    second = sharded(mesh)
    train_blocks(second, device)
    notes.add(**taken("second model", world, device))
    del model, second, mesh
    notes.add(**taken("dropped", world, device))
    if hasattr(flatshard, "destroy_groups"):
        flatshard.destroy_groups()
        notes.add(**taken("destroyed", world, device))


def communicator_rows(ranks: list[list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By stage: of rank 0 the counts, and what communication takes of the device for all ranks together."""
    rows = {}
    for own in zip(*ranks):
        row = dict(own[0])
        if "used" in row:
            own_bytes = sum(each["reserved"] for each in own)
            first = [each[0] for each in ranks]
            before = first[0]["used"] - sum(each["reserved"] for each in first)
            row["communication_bytes"] = row["used"] - own_bytes - before
        rows[row.pop("stage")] = row
    return rows


def describe_communicators(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"{'mesh, system':34}{'stage':14}{'groups':>7}{'NCCL':>6}{'threads':>9}{'GB, 4 ranks':>13}"]
    for case, rows in found.items():
        for stage, row in rows.items():
            size = f"{row['communication_bytes'] / 1e9:.2f}" if "communication_bytes" in row else "-"
            lines.append(
                f"{case:34}{stage:14}{row['groups']:7}{row['communicators']:6}{row['threads']:9}{size:>13}"
                if "error" not in row
                else f"{case:34}{row['error']}"
            )
    return "\n".join(lines)


# Link and steps


def samples(world: int, device: str) -> dict[str, list[tuple[int, float]]]:
    """Seconds of each kind at each size, of one launch behind the other."""
    found: dict[str, list[tuple[int, float]]] = {"all_gather": [], "reduce_scatter": []}
    group = dist.group.WORLD
    assert group is not None
    for size in SIZES if device == "cuda" else SIZES[:7]:
        full, shard = torch.ones(size // 4, device=device), torch.ones(size // 4 // world, device=device)
        calls: dict[str, Callable[[], dist.Work]] = {
            "all_gather": functools.partial(group._allgather_base, full, shard),
            "reduce_scatter": functools.partial(group._reduce_scatter_base, shard, full),
        }
        for kind, call in calls.items():
            count = max(2, min(20, (1 << 28) // size))  # as in a step, where launches follow each other
            times = []
            for _ in range(6):
                synchronize(device)
                begin = time.perf_counter()
                for _ in range(count):
                    call().wait()
                synchronize(device)
                times.append((time.perf_counter() - begin) / count)
            found[kind].append((size, statistics.median(times[1:])))
    return found


def both_at_once(world: int, device: str) -> float:
    """Seconds of a gather and a reduce in two communicators at once, as a share of those of one after the other."""
    first, second = dist.group.WORLD, dist.new_group(list(range(world)))
    assert first is not None
    full, other = torch.ones(1 << 22, device=device), torch.ones(1 << 22, device=device)
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(2)]

    def run(groups: list[Any], lanes: list[Any]) -> float:
        begin = 0.0
        for number in range(6):
            if number == 1:
                synchronize(device)
                begin = time.perf_counter()
            works = []
            for group, lane, call in zip(groups, lanes, ("_allgather_base", "_reduce_scatter_base")):
                tensor = full if call == "_allgather_base" else other
                pair = (tensor, tensor.chunk(world)[0].clone())
                with torch.cuda.stream(lane):  # None: the current one
                    works.append(getattr(group, call)(*(pair if call == "_allgather_base" else pair[::-1])))
                    if device == "cuda":
                        works.pop().wait()
            for work in works:
                work.wait()
        synchronize(device)
        return time.perf_counter() - begin

    apart = run([first, first], [streams[0], streams[0]])
    return run([first, second], streams) / apart


def link_of(found: dict[str, list[tuple[int, float]]], world: int) -> Link:
    """As rank 0 has measured it, on all ranks."""
    points = [
        (wire_bytes(kind, size, world), seconds)  # type: ignore[arg-type]
        for kind, each in found.items()
        for size, seconds in each
        if size >= FITTED
    ]
    return fit(points)


def from_first(values: list[float], device: str) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(tensor, 0)
    return [float(value) for value in tensor.tolist()]


def in_turns(built: dict[str, Callable[[], Any]], device: str, budget: float) -> dict[str, list[float]]:
    """Milliseconds of steps, as many as fit in so many seconds per system; the same number on all ranks."""
    times: dict[str, list[float]] = {name: [] for name in built}
    counts, rounds = {}, 3
    for name, step in built.items():
        for _ in range(WARMUP):
            step()
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        count = budget / rounds / max(time.perf_counter() - begin, 1e-4) - 1
        counts[name] = round(from_first([count], device)[0] if dist.is_initialized() else count)
    for _ in range(rounds):
        for name, step in built.items():
            step()
            times[name] += [1e3 * seconds for seconds in timed(step, max(2, min(10, counts[name])), device == "cuda")]
    return times


def rehearsed(setup: Setup, network: Network, rank: int, budget: float) -> dict[str, tuple[list[float], float]]:
    """Milliseconds of steps, and on the wire, by system. Each has a rehearsal of its own."""
    found = {}
    for name, make in EAGER.items():
        with rehearse(setup.world, network, rank=rank) as rehearsal:
            step = make(setup)
            entries = rehearsal.medium.traffic
            for _ in range(WARMUP):
                step()
            before = entries.snapshot()
            step()
            wire = sum(entry.wire_seconds for entry in difference(entries.snapshot(), before).values())
            synchronize(setup.device)
            begin = time.perf_counter()
            step()
            synchronize(setup.device)
            count = round(budget / max(time.perf_counter() - begin, 1e-4))
            times = [1e3 * seconds for seconds in timed(step, max(3, min(20, count)), setup.device == "cuda")]
            del step
        found[name] = times, 1e3 * wire
    return found


def setup_of(world: int, tokens: int, device: str) -> Setup:
    if device == "cpu":
        return Setup(LLAMA_TINY, batch=1, seq=32, world=world, device="cpu", dtype=torch.float32)
    length = min(tokens, MODEL.max_tokens)
    return Setup(MODEL, batch=tokens // length, seq=length, world=world)


def steps(rank: int, world: int, folder: str, tokens: int, device: str, budget: float) -> None:
    notes, setup = Notes(folder, rank), setup_of(world, tokens, device)
    found = samples(world, device)
    given = link_of(found, world)
    latency, bandwidth = from_first([given.latency, given.bandwidth], device)
    notes.add(samples=found, latency=latency, bandwidth=bandwidth)
    notes.add(both_at_once=both_at_once(world, device))
    notes.add(real=in_turns({name: make(setup) for name, make in EAGER.items()}, device, budget))
    gc.collect()
    dist.destroy_process_group()
    link = Link(bandwidth, latency)
    notes.add(at_a_time=rehearsed(setup, Network(link, link, ranks_per_node=world), rank, budget))
    notes.add(at_a_time_free=rehearsed(setup, FREE, rank, budget))
    notes.add(at_a_time_limit=in_turns({"limit": get_system("limit")(setup)}, device, budget)["limit"])


def captured(rank: int, world: int, folder: str, tokens: int, device: str, budget: float) -> None:
    notes, setup = Notes(folder, rank), setup_of(world, tokens, device)
    built = {name: make(setup) for name, make in EAGER.items()}
    notes.add(real=in_turns(built, device, budget))
    for name in [name for name in built if name != "fsdp2"] if device == "cuda" else []:
        built[f"{name}, captured"] = flatshard.capture(EAGER[name](setup))
    notes.add(real=in_turns(built, device, budget))
    del built
    gc.collect()
    faulthandler.dump_traceback_later(10, exit=True)  # a communicator cannot be destroyed before graphs that use it


def alone(document: dict[str, Any], setup: Setup, budget: float, write: Callable[[], None]) -> None:
    """Rehearse in this process, with nobody else on the device."""
    link = Link(document["bandwidth"], document["latency"])
    document["alone_limit"] = in_turns({"limit": get_system("limit")(setup)}, setup.device, budget)["limit"]
    write()
    document["alone"] = rehearsed(setup, Network(link, link, ranks_per_node=setup.world), 0, budget)
    write()
    document["alone_free"] = rehearsed(setup, FREE, 0, budget)
    write()


def describe_steps(document: dict[str, Any]) -> str:
    world, lines = document["ranks"], []
    if "latency" in document:
        latency, bandwidth = document["latency"], document["bandwidth"]
        lines += [f"link, {world} ranks: {latency * 1e6:.0f} us + bytes moved / {bandwidth / 1e9:.3f} GB/s"]
        lines += [f"{'bytes':>12}{'gather us':>12}{'reduce us':>12}{'fitted us':>12}"]
        for (size, gather), (_, reduce) in zip(*document["samples"].values()):
            fitted = latency + wire_bytes("all_gather", size, world) / bandwidth
            lines.append(f"{size:12}{gather * 1e6:12.0f}{reduce * 1e6:12.0f}{fitted * 1e6:12.0f}")
    median = statistics.median
    for name in ("alone_limit", "at_a_time_limit"):
        if name in document:
            lines.append(f"compute alone ({name}): {median(document[name]):.1f} ms")
    lines.append(
        f"{'system':36}{'real ms':>9}{'min':>9}{'quartiles':>17}{'wire':>8}"
        f"{'alone':>9}{'/real':>7}{'free':>8}{'W at once':>11}{'/real':>7}{'free':>8}"
    )
    for name, times in document.get("real", {}).items():
        low, _, high = statistics.quantiles(times, n=4)
        line = f"{name:36}{median(times):9.1f}{min(times):9.1f}{f'{low:.1f}..{high:.1f}':>17}"
        for column, width in (("alone", 9), ("at_a_time", 11)):
            if name in document.get(column, {}):
                predicted, wire = document[column][name]
                free = document.get(f"{column}_free", {}).get(name)
                line += f"{wire:8.1f}" if column == "alone" else ""
                line += f"{median(predicted):{width}.1f}{median(predicted) / median(times):7.3f}"
                line += f"{median(free[0]):8.1f}" if free else f"{'-':>8}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["communicators", "steps", "captured"])
    parser.add_argument("--mesh", default="2x2", choices=list(MESHES), help="of communicators")
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4], help="of steps")
    parser.add_argument("--tokens", type=int, default=256, help="of steps: per rank, on a GPU")
    parser.add_argument("--budget", type=float, default=1.5, help="of steps: seconds per system and measurement")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--limit", type=float, default=80, help="seconds, after which what runs is ended")
    parser.add_argument("--json", type=Path, help="write the figures with command, device and date")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    began, end = time.monotonic(), time.monotonic() + options.limit
    told = f"--mesh {options.mesh}" if options.part == "communicators" else f"--ranks {options.ranks}"
    told += "" if options.part == "communicators" else f" --tokens {options.tokens} --budget {options.budget}"
    document: dict[str, Any] = {
        "command": f"python -m benchmarks.nccl {options.part} {told} --device {options.device}",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else None,
        "ranks": 4 if options.part == "communicators" else options.ranks,
    }
    print(f"{document['device']}, torch {torch.__version__}, NCCL {document['nccl']}", flush=True)

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(document) + "\n")

    def run(world: int, body: Callable[..., None], *args: Any, share: float) -> list[list[dict[str, Any]]]:
        """What the ranks have noted, also if they do not come to an end."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                left = share * (end - time.monotonic() - 5)
                on_ranks(world, body, folder, *args, device=options.device, seconds=left)
            except Exception as error:
                document.setdefault("errors", []).append(f"{body.__name__} {args}: {error!r}")
                print(document["errors"][-1], flush=True)
            return noted(folder)

    if options.part == "communicators":
        found = document["rows"] = {}
        for number, system in enumerate(EAGER):
            ranks = run(4, communicators, system, options.mesh, options.device, share=1 / (len(EAGER) - number))
            found[f"{options.mesh}, {system}"] = communicator_rows(ranks)
            write()
        print(describe_communicators(found))
    else:
        body, share = (steps, 0.75) if options.part == "steps" else (captured, 1.0)
        ranks = run(options.ranks, body, options.tokens, options.device, options.budget, share=share)
        for row in ranks[0] if ranks else []:
            document.setdefault("real", {}).update(row.pop("real", {}))
            document |= row
        write()
        print(describe_steps(document), flush=True)
        if "latency" in document:
            alone(document, setup_of(options.ranks, options.tokens, options.device), options.budget, write)
            print(describe_steps(document))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    faulthandler.dump_traceback_later(20, exit=True)


if __name__ == "__main__":
    main()
