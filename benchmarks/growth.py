"""How the cost of a step grows: with the number of units, and with the number of ranks.

    python -m benchmarks.growth [--device cuda] [--json FILE] [--plot FILE]

Rank 0 of W on this device, over a network that takes no time: 8, 32 and 128 units at W=8, and W from 8 to 4096 with
32 units.  The units are so small that the host's work is what a step takes.  Host time is the fastest of all steps: on
a CPU the processor time of the thread that trains, on CUDA how long a step takes to return.  ``calls`` are the Python
and C functions that this thread calls in a step, without those of the process group that stands in for NCCL: they do
not depend on how busy the machine is (on CUDA, backward runs on another thread and is left out).  Bytes are measured
and, beside them, by the formula of ``flatshard plan``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.distributed.tensor import DTensor

import flatshard
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.policy import placements_for
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import difference
from flatshard.tools.dry_run import memory_of
from flatshard.tools.group_bytes import TrainingSetup
from flatshard.tools.model_shapes import model_of

UNITS, WORLDS = (8, 32, 128), (8, 64, 512, 4096)
AT_WORLD, AT_UNITS = 8, 32
SYSTEMS = ("plain", "fsdp2", "flatshard")
ROWS = 4096  # of every tensor: the largest number of ranks divides it


class Block(nn.Module):
    """Four vectors and four operations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(ROWS)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.a + self.b) * self.c + self.d


class Chain(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(system: str, units: int, world: int, device: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and a function that runs one training step of it."""
    with torch.device(device):
        model = Chain(units)
    if system != "plain":
        shard = fsdp2_shard if system == "fsdp2" else flatshard.fully_shard
        mesh = init_device_mesh(device, (world,))
        for block in model.blocks:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if system == "flatshard":
        flatshard.fully_shard_optimizer(optimizer)
    data = torch.randn(1, ROWS, device=device, requires_grad=True)

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return model, step


def measure(system: str, units: int, world: int, device: str, steps: int, warmup: int = 3) -> dict[str, float]:
    """Figures of one system: microseconds, calls, launches and bytes."""
    gc.collect()
    on_gpu = device == "cuda"
    with rehearse(world, "free") as rehearsal:
        model, step = build(system, units, world, device)
        for _ in range(warmup):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        earlier = rehearsal.medium.traffic.snapshot()
        gc.disable()  # a collection costs as much as there are objects, whoever made them
        seconds = [timed(step, on_gpu) for _ in range(steps)]
        launched = difference(rehearsal.medium.traffic.snapshot(), earlier).values()
        row = {
            "host_us": 1e6 * min(seconds),
            "calls": calls(step),
            "launches": sum(entry.launches for entry in launched) / steps,
        }
        gc.enable()
        if system == "flatshard":
            row |= bytes_of(model, step)
            formula = memory_of(model_of(Chain(units), [Block]), TrainingSetup((world,), placements_for(3, None, 1)))
            row["formula_bytes"] = formula.resting.total + formula.most_gathered
    return row


def timed(step: Callable[[], None], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    clock = time.perf_counter if on_gpu else time.thread_time
    begin = clock()
    step()
    return clock() - begin


def calls(step: Callable[[], None]) -> int:
    """How many functions, of Python and of C, this thread calls in a step.

    Calls of the rehearsal, which NCCL makes in C++, are left out, and so are those of a thread that has to wait.
    """
    count = 0
    rehearsal = Path(flatshard.rehearsal.__file__).parent.glob("*.py")
    left_out = threading.__file__, torch.futures.__file__, *map(str, rehearsal)

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        file = frame.f_code.co_filename
        if file == "<string>" and frame.f_back is not None:  # what a dataclass has made: its caller's
            file = frame.f_back.f_code.co_filename
        count += event in ("call", "c_call") and file not in left_out

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return count


def bytes_of(model: nn.Module, step: Callable[[], None]) -> dict[str, float]:
    """Main weights and optimizer state, and the peak of gathered weights."""
    mains = [group.main.local for _, unit in units_below(model) for group in unit.groups]
    entries = step.optimizer.state.values()  # type: ignore[attr-defined]
    state = [value.to_local() for entry in entries for value in entry.values() if isinstance(value, DTensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in (*mains, *state)}
    root = unit_of(model).root
    assert root is not None
    return {"bytes": sum(storages.values()) + root.gather_pool.peak_bytes}


def sweep(systems: list[str], device: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """All points, the systems in turns; of each figure of time the least over all rounds."""
    points = dict.fromkeys([*((units, AT_WORLD) for units in UNITS), *((AT_UNITS, world) for world in WORLDS)])
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for number in range(rounds):
        for units, world in points:
            for system in systems:
                if system == "plain" and world != AT_WORLD:
                    continue  # it knows of no ranks
                row = measure(system, units, world, device, steps)
                known = rows.setdefault(
                    (system, units, world), {"system": system, "units": units, "world": world, **row}
                )
                known["host_us"] = min(known["host_us"], row["host_us"])
                if number == rounds - 1:
                    print(describe(known), flush=True)
    return list(rows.values())


def describe(row: dict[str, Any]) -> str:
    text = f"{row['system']:10}{row['units']:5} units  W={row['world']:<6}{row['host_us'] / 1e3:9.2f} ms of the host"
    text += f"{row['calls']:9} calls{row['launches']:7.0f} launches"
    if "bytes" in row:
        text += f"{row['bytes'] / 1e6:9.3f} MB, by the formula {row['formula_bytes'] / 1e6:.3f}"
    return text


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    colors = {"plain": "grey", "fsdp2": "tab:orange", "flatshard": "tab:blue"}
    for system in dict.fromkeys(row["system"] for row in rows):
        color = colors[system]
        mine = [row for row in rows if row["system"] == system]
        by_units = sorted((row["units"], row["host_us"] / 1e3) for row in mine if row["world"] == AT_WORLD)
        axes[0].plot(*zip(*by_units), "o-", color=color, label=system)
        by_world = sorted((row["world"], row["host_us"] / 1e3) for row in mine if row["units"] == AT_UNITS)
        if len(by_world) > 1:
            axes[1].plot(*zip(*by_world), "o-", color=color, label=system)
        else:
            axes[1].axhline(by_world[0][1], linestyle=":", color=color, label=system)
    sharded = sorted((row for row in rows if "bytes" in row and row["units"] == AT_UNITS), key=lambda row: row["world"])
    worlds = [row["world"] for row in sharded]
    axes[2].plot(worlds, [row["formula_bytes"] / 1e6 for row in sharded], "-", color="grey", label="formula")
    axes[2].plot(worlds, [row["bytes"] / 1e6 for row in sharded], "o", color="tab:blue", label="flatshard, measured")
    axes[0].set(xlabel="units", ylabel="host time per step (ms)", title=f"W = {AT_WORLD}", xlim=0, ylim=0)
    axes[1].set(xlabel="ranks", ylabel="host time per step (ms)", title=f"{AT_UNITS} units", xscale="log", ylim=0)
    axes[2].set(xlabel="ranks", ylabel="MB of a rank", title=f"{AT_UNITS} units", xscale="log", yscale="log")
    for each in axes:
        each.grid(alpha=0.3)
        each.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures with command, device and date")
    parser.add_argument("--plot", type=Path, help="draw them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    title = f"{device}, torch {torch.__version__}, {datetime.date.today()}"
    print(title)
    rows = sweep(options.systems, options.device, options.steps, options.rounds)
    if options.json:
        document = {
            "command": f"python -m benchmarks.growth --device {options.device} --steps {options.steps} --rounds "
            f"{options.rounds}",
            "date": datetime.date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(rows, title, options.plot)


if __name__ == "__main__":
    main()
