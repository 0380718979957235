"""Does a rehearsal predict?  Measured against real runs of 2 and 4 processes over Gloo on this machine.

For every W: measure Gloo's collectives, fit latency and bandwidth, rehearse with these two numbers, run the same
training for real, and print both step times.  What is held fixed: one compute thread per process, and W processes at a
time on this machine's cores also in the rehearsal (each the same rank of W, none talking to another), so that both runs
compete for the cores in the same way.  What differs is what is to be validated: the communication.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks.models import LLAMA_TINY
from benchmarks.processes import on_ranks
from benchmarks.systems import Setup, get_system
from flatshard.rehearsal import Link, Network, rehearse
from flatshard.rehearsal.network import wire_bytes

SIZES = [1 << power for power in (12, 16, 18, 20, 22, 24)]
SYSTEM_KINDS = {"ddp": ["all_reduce"], "fsdp2": ["all_gather", "reduce_scatter"]}


def collectives(rank: int, world: int) -> dict[str, list[tuple[int, float]]]:
    """Median seconds of each kind at each size (bytes of the full message)."""
    result: dict[str, list[tuple[int, float]]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    group = dist.group.WORLD
    for size in SIZES:
        full = torch.ones(size // 4)
        shard = torch.ones(size // 4 // world)
        calls = {
            "all_gather": lambda full=full, shard=shard: group._allgather_base(full, shard),
            "reduce_scatter": lambda full=full, shard=shard: group._reduce_scatter_base(shard, full),
            "all_reduce": lambda full=full: group.allreduce([full]),
        }
        for kind, call in calls.items():
            times = []
            for _ in range(max(5, min(40, (1 << 24) // size * 3))):
                dist.barrier()
                begin = time.perf_counter()
                call().wait()
                times.append(time.perf_counter() - begin)
            result[kind].append((size, statistics.median(times)))
    return result


def fit(samples: list[tuple[float, float]]) -> Link:
    """Latency and bandwidth by least squares of the relative error of ``latency + wire bytes / bandwidth``."""
    x = torch.tensor([[1.0, wire] for wire, _ in samples], dtype=torch.float64)
    y = torch.tensor([seconds for _, seconds in samples], dtype=torch.float64)
    latency, per_byte = torch.linalg.lstsq(x / y[:, None], torch.ones_like(y)[:, None]).solution.flatten().tolist()
    return Link(bandwidth=1 / per_byte, latency=max(latency, 0.0))


def train(rank: int, world: int, system: str, steps: int) -> list[float]:
    """Seconds of each step after three of warm-up."""
    setup = Setup(LLAMA_TINY, batch=2, seq=128, world=world, device="cpu", dtype=torch.float32)
    step = get_system(system)(setup)
    marks = []
    for _ in range(steps + 3):
        step()
        marks.append(time.perf_counter())
    return [late - early for early, late in pairwise(marks[2:])]


def train_rehearsed(rank: int, world: int, system: str, steps: int, link: Link) -> list[float]:
    with rehearse(world, Network(link, link, ranks_per_node=world)):
        return train(rank, world, system, steps)


def quiet(rounds: int, runs: dict[str, Callable[[], list[list[float]]]]) -> dict[str, float]:
    """The fastest step of each run in ms, as seen by its slowest rank: what it takes when nothing else disturbs.

    The runs take turns, so that a busy while of the machine meets all of them.
    """
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = min(best[name], 1e3 * max(min(times) for times in run()))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    steps, rounds = options.steps, options.rounds
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores, torch {torch.__version__}, {rounds} rounds of {steps} steps"
    )
    print(" W  system  latency us   GB/s  free ms  predicted  measured   error")
    for world in options.worlds:
        tables = [on_ranks(world, collectives)[0] for _ in range(rounds)]
        for system, kinds in SYSTEM_KINDS.items():
            samples = []
            for kind in kinds:
                for same_size in zip(*(table[kind] for table in tables)):
                    samples.append((wire_bytes(kind, same_size[0][0], world), min(s for _, s in same_size)))
            link = fit(samples)
            ms = quiet(
                rounds,
                {
                    "free": partial(on_ranks, world, train_rehearsed, system, steps, Link(math.inf, 0.0), gloo=False),
                    "predicted": partial(on_ranks, world, train_rehearsed, system, steps, link, gloo=False),
                    "measured": partial(on_ranks, world, train, system, steps),
                },
            )
            print(
                f"{world:2}{system:>8}{link.latency * 1e6:12.0f}{link.bandwidth / 1e9:7.2f}{ms['free']:9.1f}"
                f"{ms['predicted']:11.1f}{ms['measured']:10.1f}{ms['predicted'] / ms['measured'] - 1:+8.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
