"""Real training on 2 processes of this machine over Gloo: flatshard beside FSDP2 and DDP.  ``make bench`` runs this.

It is small (a minute) and says whether a system got slower, not how fast it is on the hardware it is made for: on a CPU
Gloo's copies and the computation share the cores.  Systems take turns, several rounds, and the medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.models import LLAMA_TINY
from benchmarks.processes import on_ranks
from benchmarks.systems import Setup, get_system

ORDER = ["ddp", "fsdp2", "flatshard"]


def measure(rank: int, world: int, systems: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each system, one figure per step."""
    setup = Setup(LLAMA_TINY, batch=2, seq=128, world=world, device="cpu", dtype=torch.float32)
    runs = {name: get_system(name)(setup) for name in systems}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for name in systems:
        for _ in range(2):
            runs[name]()
    for _ in range(rounds):
        for name in systems:
            dist.barrier()
            for _ in range(steps):
                begin = time.perf_counter()
                runs[name]()
                times[name].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    times = on_ranks(options.ranks, measure, ORDER, options.rounds, options.steps)[0]
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{options.ranks} processes, Gloo, {options.rounds} x {options.steps} steps, 1 thread each")
    print(f"{'system':12}{'ms':>8}{'min':>8}{'to fsdp2':>10}{'to ddp':>8}")
    for name, median in medians.items():
        ratios = f"{median / medians['fsdp2']:>10.2f}{median / medians['ddp']:>8.2f}"
        print(f"{name:12}{1e3 * median:8.1f}{1e3 * min(times[name]):8.1f}{ratios}")


if __name__ == "__main__":
    main()
