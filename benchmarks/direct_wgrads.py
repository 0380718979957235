"""Step time and memory with weight gradients as autograd makes them, and written directly by the linear layers.

    python -m benchmarks.direct_wgrads --case a            the cases are those of benchmarks.table
    python -m benchmarks.direct_wgrads --case tiny         on a CPU

flatshard as one rank of W under the rehearsal backend, each row in a process of its own.  The ways to reduce:

    same        in the compute dtype: the ordinary way copies nothing but padded tensors
    float32     in float32: the ordinary way casts every gradient into staging
    unreduced   in float32, the micro-batches of a step accumulated on their rank and reduced once (needs several)
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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

import flatshard
from benchmarks.systems import Setup, Step, sharded_model, trainer
from benchmarks.table import CASES, NETWORK, timed
from flatshard.rehearsal import rehearse

WAYS = ["same", "float32", "unreduced"]


def build(setup: Setup, way: str, direct: bool) -> Step:
    reduce_dtype = setup.dtype if way == "same" else torch.float32
    policy = flatshard.MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=reduce_dtype)
    model = sharded_model(setup, flatshard.fully_shard, policy)
    if direct:
        flatshard.direct_wgrads(model)
    last = setup.microbatches - 1

    def around(number: int) -> AbstractContextManager[None]:
        if way == "unreduced":
            model.set_requires_gradient_sync(number == last)
        return nullcontext()

    return trainer(setup, model, flatshard.fully_shard_optimizer, around)


def measure(case: str, way: str, direct: bool, steps: int, warmup: int = 3) -> dict[str, float]:
    """Milliseconds and bytes of one row, in this process."""
    setup = CASES[case]
    if way == "unreduced" and setup.microbatches == 1:
        setup = dataclasses.replace(setup, microbatches=4)
    on_gpu = setup.device == "cuda"
    with rehearse(setup.world, NETWORK):
        torch.manual_seed(0)
        step = build(setup, way, direct)
        for _ in range(warmup):
            loss = step()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        durations = timed(step, steps, on_gpu)
        loss = step()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss of {way} is {loss.item()}: its figures mean nothing")
    return {
        "ms": 1e3 * statistics.median(durations),
        "min_ms": 1e3 * min(durations),
        "loss": loss.item(),
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
    }


def run_apart(case: str, way: str, direct: bool, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "row.json")
        command = [sys.executable, "-m", "benchmarks.direct_wgrads", "--case", case, "--ways", way]
        command += ["--steps", str(steps), "--row", str(result), *["--direct"] * direct]
        subprocess.run(command, check=True)
        return json.loads(result.read_text())


def describe(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'gradients':22}{'ms':>9}{'min':>9}{'loss':>9}{'peak GB':>9}{'reserved':>10}"]
    for name, row in rows.items():
        memory = f"{row['peak'] / 1e9:9.2f}{row['reserved'] / 1e9:10.2f}"
        lines.append(f"{name:22}{row['ms']:9.1f}{row['min_ms']:9.1f}{row['loss']:9.4f}{memory}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="a", choices=list(CASES))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures with command, device and date")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        row = measure(options.case, options.ways[0], options.direct, options.steps)
        options.row.write_text(json.dumps(row))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows = {
        f"{way}{', direct' if direct else ''}": run_apart(options.case, way, direct, options.steps)
        for way in options.ways
        for direct in (False, True)
    }
    print(f"{device}, torch {torch.__version__}, case ({options.case})\n{describe(rows)}", flush=True)
    if options.json:
        document = {
            "command": f"python -m benchmarks.direct_wgrads --case {options.case} --steps {options.steps}",
            "date": datetime.date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
            "network": NETWORK.name,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
