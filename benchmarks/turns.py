"""Systems in turns in one process: by how much one is slower than another, where a table is not exact enough.

    python -m benchmarks.turns --case b --systems flatshard flatshard-int8-gathers
    python -m benchmarks.turns --case a --sms 16   collectives keep 16 multiprocessors for themselves, as NCCL's may

Two processes one after the other differ by 1 or 2% for no reason: another clock, another temperature.  Here all systems
are built first, and then each runs a few steps in every round.  ``ratio`` is to the first system, of the medians of a
round: the mean over rounds, and its standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems import get_system
from benchmarks.table import CASES, NETWORK, timed
from flatshard.rehearsal import Network, rehearse

WARMUP, AGAIN = 4, 2  # steps: at first, and before those that are timed


def measure(case: str, systems: list[str], network: Network, rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Milliseconds of steps, by system and round."""
    setup = CASES[case]
    on_gpu = setup.device == "cuda"
    with rehearse(setup.world, network):
        built = {system: get_system(system)(setup) for system in systems}
        for _ in range(WARMUP):
            for step in built.values():
                step()
        found: dict[str, list[list[float]]] = {system: [] for system in systems}
        for _ in range(rounds):
            for system, step in built.items():
                for _ in range(AGAIN):
                    step()
                found[system].append([1e3 * seconds for seconds in timed(step, steps, on_gpu)])
    return found


def compare(found: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Of each system the median and the least of all steps, and how its rounds compare to those of the first."""
    first = next(iter(found.values()))
    rows = {}
    for system, times in found.items():
        steps = [each for part in times for each in part]
        ratios = [statistics.median(mine) / statistics.median(other) for mine, other in zip(times, first)]
        rows[system] = {
            "ms": statistics.median(steps),
            "min_ms": min(steps),
            "ratio": statistics.mean(ratios),
            "error": statistics.stdev(ratios) / len(ratios) ** 0.5,
        }
    return rows


def describe(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'system':34}{'ms':>9}{'min':>9}{'ratio':>9}{'+-':>9}"]
    lines += [
        f"{name:34}{row['ms']:9.2f}{row['min_ms']:9.2f}{row['ratio']:9.4f}{row['error']:9.4f}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="b", choices=CASES)
    parser.add_argument("--systems", nargs="+", default=["flatshard", "flatshard-int8-gathers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sms", type=int, default=0, help="multiprocessors that a collective keeps")
    parser.add_argument("--json", type=Path, help="write the figures with command, device and date")
    options = parser.parse_args()
    if options.rounds < 2 or options.steps < 1:
        parser.error("--rounds must be at least 2, and --steps 1")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    network = NETWORK
    if options.sms:
        name = f"{NETWORK.name}, {options.sms} multiprocessors kept"
        network = dataclasses.replace(NETWORK, sms=options.sms, name=name)
    print(f"({options.case}) {device}, torch {torch.__version__}, {network.name}", flush=True)
    found = measure(options.case, options.systems, network, options.rounds, options.steps)
    rows = compare(found)
    print(describe(rows))
    if options.json:
        document: dict[str, Any] = {
            "command": f"python -m benchmarks.turns --case {options.case} --rounds {options.rounds} "
            f"--steps {options.steps} --sms {options.sms} --systems {' '.join(options.systems)}",
            "date": datetime.date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
            "network": network.name,
            "rows": rows,
            "ms": found,
        }
        options.json.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
