"""Step time and memory of every system as one rank of W on this device, over one modelled network.

    python -m benchmarks.table --case a            the cases are in CASES below
    python -m benchmarks.table --case all --json benchmarks/results/NAME.json
    python -m benchmarks.table --case a --compile  every system once more, with its blocks compiled
    python -m benchmarks.table --case c --systems limit fsdp2 flatshard flatshard-int8-gathers flatshard-int8
    python -m benchmarks.table --case c --systems limit flatshard fsdp2-hsdp flatshard-hsdp flatshard-hfsdp

Each system runs in a process of its own.  ``ratio`` is to the compute limit of the same run, for compiled rows to the
compiled one.  Host time is how long the Python of a step takes when the device is idle at its start (with thousands of
kernels per step the driver's queue fills and part of the device time shows in it).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import get_args

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.models import LLAMA_1B, LLAMA_8B, LLAMA_TINY
from benchmarks.moe import MOE_TINY, QWEN_MOE
from benchmarks.systems import Setup, get_system
from flatshard.rehearsal import Link, Network, rehearse
from flatshard.rehearsal.network import Algorithm, difference, get_network

NVLINK = Link(360e9, 10e-6)
INFINIBAND = Link(45e9, 25e-6)
NETWORK = Network(NVLINK, INFINIBAND, ranks_per_node=8, name="360 GB/s inside 8, 45 GB/s between")
NETWORKS = {"flat": NETWORK} | {name: get_network("h100-pods", algorithm=name) for name in get_args(Algorithm)}
RECOMPUTED_8B = dataclasses.replace(LLAMA_8B, recompute=True)
CASES = {
    "a": Setup(LLAMA_1B, batch=1, seq=4096, world=8),
    "b": Setup(RECOMPUTED_8B, batch=1, seq=8192, world=8),
    "c": Setup(RECOMPUTED_8B, batch=1, seq=8192, world=64),
    "c16": Setup(RECOMPUTED_8B, batch=1, seq=8192, world=16),
    "c512": Setup(RECOMPUTED_8B, batch=1, seq=8192, world=512),
    "c4096": Setup(RECOMPUTED_8B, batch=1, seq=8192, world=4096),
    "d": Setup(LLAMA_1B, batch=1, seq=2048, world=8, microbatches=4),
    "e": Setup(QWEN_MOE, batch=1, seq=4096, world=8),  # each rank has its own experts
    "e64": Setup(QWEN_MOE, batch=1, seq=4096, world=64),  # experts of a node are sharded over eight nodes
    "e4096": Setup(QWEN_MOE, batch=1, seq=4096, world=4096),
    "f": Setup(LLAMA_1B, batch=1, seq=4096, world=1, offload=True),
    "f8": Setup(LLAMA_1B, batch=1, seq=4096, world=8, offload=True),
    "f-8b": Setup(RECOMPUTED_8B, batch=1, seq=4096, world=1, offload=True),
    "tiny-moe": Setup(MOE_TINY, batch=2, seq=64, world=16, device="cpu", dtype=torch.float32),
    "tiny16": Setup(LLAMA_TINY, batch=2, seq=128, world=16, device="cpu", dtype=torch.float32),
    "tiny": Setup(LLAMA_TINY, batch=2, seq=128, world=8, device="cpu", dtype=torch.float32),
}
DEFAULT_SYSTEMS = ["limit", "fsdp2", "flatshard"]
COMPILED = "+compile"  # ends the name of a row whose blocks are compiled


def measure(case: str, row: str, steps: int, warmup: int = 5, network: str = "flat") -> dict[str, float]:
    """Figures of one system, in this process: milliseconds and bytes. The fourth step may be one that is captured."""
    system = row.removesuffix(COMPILED)
    setup = dataclasses.replace(CASES[case], compiled=row.endswith(COMPILED))
    on_gpu = setup.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    with rehearse(setup.world, NETWORKS[network]) as rehearsal:
        step = get_system(system)(setup)
        for _ in range(warmup):
            loss = step()
        synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = rehearsal.medium.traffic.snapshot()
        durations = timed(step, steps, on_gpu)
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
        memory = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
        host = []
        for _ in range(3):
            begin = time.perf_counter()
            loss = step()
            host.append(time.perf_counter() - begin)
            synchronize()
        passes = min(until_optimizer(step, synchronize) for _ in range(3)) if setup.offload else 0.0
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss of {row} in case {case} is {loss.item()}: its figures mean nothing")
    return {
        "ms": 1e3 * statistics.median(durations),
        "min_ms": 1e3 * min(durations),
        "host_ms": 1e3 * min(host),
        **({"passes_ms": 1e3 * passes} if setup.offload else {}),
        "wire_ms": 1e3 * sum(entry.wire_seconds for entry in traffic.values()) / steps,
        "launches": sum(entry.launches for entry in traffic.values()) / steps,
        "peak": memory[0],
        "reserved": memory[1],
        "tflops": setup.microbatches
        * setup.batch
        * setup.seq
        * setup.model.flops_per_token(setup.seq)
        / statistics.median(durations)
        / 1e12,
    }


def until_optimizer(step, synchronize) -> float:
    """Seconds from the start of a step until the optimizer is called: of forward and backward, if it steps after it."""
    marks = []

    def mark(*_: object) -> None:
        synchronize()
        marks.append(time.perf_counter())

    hook = register_optimizer_step_pre_hook(mark)
    synchronize()
    begin = time.perf_counter()
    step()
    hook.remove()
    return marks[-1] - begin


def timed(step, steps: int, on_gpu: bool) -> list[float]:
    """Seconds of each of ``steps`` consecutive steps; on a GPU between events, without waiting in between."""
    if not on_gpu:
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [late - early for early, late in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [early.elapsed_time(late) * 1e-3 for early, late in pairwise(events)]


HEADER = (
    f"{'system':26}{'ms':>9}{'min':>9}{'ratio':>8}{'host ms':>9}{'wire ms':>9}{'launches':>10}"
    f"{'peak GB':>9}{'reserved':>10}{'TFLOP/s':>9}"
)


def describe(name: str, rows: dict[str, dict[str, float]]) -> str:
    """The line of a system. Its ratio is to the limit among the rows so far."""
    row = rows[name]
    if "error" in row:
        return f"{name:26} failed: {row['error']}"
    base = rows.get(f"limit{COMPILED}" if name.endswith(COMPILED) else "limit", {}).get("ms")
    ratio = f"{row['ms'] / base:.3f}" if base else "-"
    passes = f"  {row['passes_ms']:.1f} until the optimizer" if "passes_ms" in row else ""
    return (
        f"{name:26}{row['ms']:9.1f}{row['min_ms']:9.1f}{ratio:>8}{row['host_ms']:9.1f}{row['wire_ms']:9.1f}"
        f"{row['launches']:10.0f}{row['peak'] / 1e9:9.1f}{row['reserved'] / 1e9:10.1f}{row['tflops']:9.1f}{passes}"
    )


def run_apart(case: str, system: str, steps: int, network: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "row.json")
        command = [sys.executable, "-m", "benchmarks.table", "--case", case, "--systems", system]
        command += ["--steps", str(steps), "--network", network, "--row", str(result)]
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if run.returncode:
            sys.stderr.write(run.stderr)
            return {"error": run.stderr.strip().splitlines()[-1] if run.stderr.strip() else run.returncode}
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="a", choices=[*CASES, "all"], help="all: a to e64")
    parser.add_argument("--systems", nargs="+", default=DEFAULT_SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--compile", action="store_true", help="measure every system with compiled blocks too")
    parser.add_argument("--steps", type=int, default=10)
    told = "flat: of two levels, a latency per launch; else h100-pods, of three, where it grows with the ranks"
    parser.add_argument("--network", default="flat", choices=NETWORKS, help=told)
    parser.add_argument("--json", type=Path, help="write the figures with command, device and date")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.systems:
        try:
            get_system(name.removesuffix(COMPILED))
        except ValueError as error:
            parser.error(str(error))
    if options.row:
        found = measure(options.case, options.systems[0], options.steps, network=options.network)
        options.row.write_text(json.dumps(found))
        return
    systems = options.systems + [name + COMPILED for name in options.systems] * options.compile
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    network = NETWORKS[options.network].name + f", {options.network}" * (options.network != "flat")
    document = {
        "command": f"python -m benchmarks.table --case {options.case} --steps {options.steps} --systems "
        + " ".join(options.systems)
        + f" --network {options.network}" * (options.network != "flat")
        + " --compile" * options.compile,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "network": network,
        "cases": {},
    }
    print(f"{device}, torch {torch.__version__}, {network}")
    for case in ["a", "b", "c", "d", "e", "e64"] if options.case == "all" else [options.case]:
        setup = CASES[case]
        print(
            f"\n({case}) width {setup.model.width}, {setup.microbatches} x {setup.batch} x {setup.seq} tokens, "
            f"W={setup.world}{f', ep={setup.ep}' * (setup.ep > 1)}{', recompute' * setup.model.recompute}\n{HEADER}"
        )
        rows = document["cases"][case] = {}
        for system in systems:
            rows[system] = run_apart(case, system, options.steps, options.network)
            print(describe(system, rows), flush=True)
            if options.json:
                options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
