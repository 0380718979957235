"""Saving and loading a sharded model with AdamW state: flatshard.checkpoint beside torch.distributed.checkpoint.

Both write the same tensors from the same processes to the same folder and make sure that they are on disk. They take
turns, several rounds; medians are compared. ``hold`` is how long an asynchronous save keeps the training step.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.processes import on_ranks
from flatshard import fully_shard
from flatshard.checkpoint import load, save


def _model(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def measure(rank: int, world: int, folder: str, width: int, depth: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each operation, one figure per round; the first round is left out."""
    model, optimizer = _model(width, depth)
    times: dict[str, list[float]] = {}

    def dcp_save(path: str) -> None:
        weights, state = get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
        dcp.save({"model": weights, "optim": state}, storage_writer=writer)

    def dcp_load(path: str) -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    for number in range(rounds + 1):
        ours, theirs, third = (f"{folder}/{kind}-{number}" for kind in ("ours", "theirs", "async"))
        found = {
            "dcp save": _timed(lambda path=theirs: dcp_save(path)),
            "save": _timed(lambda path=ours: save(path, model, optimizer)),
            "dcp load": _timed(lambda path=theirs: dcp_load(path)),
            "load": _timed(lambda path=ours: load(path, model, optimizer)),
        }
        begin = time.perf_counter()
        pending = save(third, model, optimizer, asynchronous=True)
        found["hold"] = time.perf_counter() - begin
        pending.wait()
        for name, seconds in found.items():
            if number:
                times.setdefault(name, []).append(seconds)
        dist.barrier()
        if rank == 0:
            for path in (ours, theirs, third):
                shutil.rmtree(path)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; is emptied")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default=platform.machine(), help="a word about it, for the record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder / "flatshard-benchmark"
    times = on_ranks(options.ranks, measure, str(folder), options.width, options.depth, options.rounds)[0]
    shutil.rmtree(folder, ignore_errors=True)
    size = 3 * 4 * options.width**2 * options.depth
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{size / 1e6:,.0f} MB (weights and AdamW state), {options.ranks} processes, {options.rounds} rounds")
    print(f"{'':12}{'ms':>8}{'min':>8}{'MB/s':>8}{'to dcp':>8}")
    for name, median in medians.items():
        reference = medians.get(f"dcp {name.removeprefix('dcp ')}" if name != "hold" else "dcp save", median)
        fastest = min(times[name])
        print(f"{name:12}{1e3 * median:8.0f}{1e3 * fastest:8.0f}{size / 1e6 / median:8.0f}{median / reference:8.2f}")
    if options.json:
        record = {
            "command": f"python -m benchmarks.checkpoint {shlex.join(sys.argv[1:])}",
            "date": str(date.today()),
            "machine": options.machine,
            "torch": torch.__version__,
            "bytes": size,
            "seconds": times,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
