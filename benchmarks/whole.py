"""Muon on whole matrices beside AdamW on shards, and beside the plain way, as one rank of W over a modelled network.

    python -m benchmarks.whole --case a a64 b c --json benchmarks/results/NAME.json

``adamw``: fused, on shards. ``muon``: torch's Muon on the matrices of the blocks by `flatshard.whole_optimizer`, AdamW
for all else. ``gathered``: the plain way: every rank gathers every gradient with ``full_tensor()`` and computes every
update, of which it keeps its rows. Columns: milliseconds of the optimizer's step, and of a training step; ``wire``,
what the optimizer sends, by the network's model; ``own``, the same Muon on plain tensors of the matrices that the rank
owns. The rehearsed rank is the first, which owns as much as any.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatshard
import flatshard.optim
from benchmarks.models import LLAMA_1B
from benchmarks.systems import Setup, accumulation, adamw, sharded_model
from benchmarks.table import CASES as TABLE
from benchmarks.table import NETWORK, timed
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import difference

CASES = {
    **{name: TABLE[name] for name in ("a", "b", "c", "tiny")},
    "a64": Setup(LLAMA_1B, batch=1, seq=4096, world=64),
}


def is_whole(name: str, parameter: torch.Tensor) -> bool:
    return "blocks" in name and parameter.dim() == 2


def muon(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw")


def rest(model: nn.Module) -> torch.optim.Optimizer:
    return flatshard.fully_shard_optimizer(adamw([p for n, p in model.named_parameters() if not is_whole(n, p)]))


class Gathered(torch.optim.Optimizer):
    """Muon the plain way. Its arithmetic is torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = newton_schulz(p.grad.lerp(buffer, group["momentum"]).full_tensor())
                rows = p.to_local().shape[0]
                first = rows * p.device_mesh.get_local_rank()
                p.to_local().add_(update[first : first + rows], alpha=-group["lr"])


def newton_schulz(gradient: torch.Tensor) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.bfloat16()
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if turned else x


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: flatshard.fully_shard_optimizer(adamw(list(model.parameters()))),
    "muon": lambda model: flatshard.optim.CombinedOptimizer(
        [flatshard.whole_optimizer(muon, model, is_whole), rest(model)]
    ),
    "gathered": lambda model: flatshard.optim.CombinedOptimizer(
        [Gathered([p for n, p in model.named_parameters() if is_whole(n, p)]), rest(model)]
    ),
}


def measure(case: str, row: str, steps: int, warmup: int = 3) -> dict[str, float]:
    """Figures of one optimizer, in this process: milliseconds and bytes."""
    setup = CASES[case]
    on_gpu = setup.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    policy = flatshard.MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype)
    with rehearse(setup.world, NETWORK) as rehearsal:
        model = sharded_model(setup, flatshard.fully_shard, policy)
        optimizer = OPTIMIZERS[row](model)
        accumulate = accumulation(setup, model)

        def step() -> None:
            accumulate()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(warmup):
            step()
        synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        whole = timed(step, steps, on_gpu)
        accumulate()
        synchronize()
        before = rehearsal.medium.traffic.snapshot()
        alone = timed(optimizer.step, steps, on_gpu)
        synchronize()
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    found = {
        "step_ms": 1e3 * statistics.median(alone),
        "training_ms": 1e3 * statistics.median(whole),
        "wire_ms": 1e3 * sum(entry.wire_seconds for entry in traffic.values()) / steps,
        "launches": sum(entry.launches for entry in traffic.values()) / steps,
        "peak": peak,
        "state": flatshard.summary(model, optimizer).state[0],
    }
    if row == "muon":
        shapes, share = owned(optimizer)
        found["share"] = share
        found["own_ms"] = 1e3 * statistics.median(arithmetic(setup.device, shapes, steps, on_gpu))
    return found


def owned(together: Any) -> tuple[list[tuple[int, ...]], float]:
    """The shapes that this rank owns, and their cost to the mean of all ranks."""
    stepper = together.optimizers[0].__dict__["_flatshard_stepper"]
    costs = {each.name: stepper.options.cost(each.matrix.shape) for each in stepper.matrices}
    mine = [each for each in stepper.matrices if each.is_owned]
    mean = sum(costs.values()) / mine[0].owner_group.size
    return [each.matrix.shape for each in mine], sum(costs[each.name] for each in mine) / mean


def arithmetic(device: str, shapes: list[tuple[int, ...]], steps: int, on_gpu: bool) -> list[float]:
    """Seconds of Muon's step on plain tensors of these shapes."""
    matrices = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimizer = muon(matrices)
    optimizer.step()
    return timed(optimizer.step, steps, on_gpu)


def describe(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'':10}{'step':>9}{'wire':>9}{'own':>9}{'step/(own+wire)':>17}{'training':>10}{'/adamw':>8}"
        f"{'launches':>10}{'peak GB':>9}{'state GB':>10}"
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:10} failed: {row['error']}")
            continue
        own = row.get("own_ms")
        bound = f"{row['step_ms'] / (own + row['wire_ms']):.2f}" if own else "-"
        base = rows.get("adamw", {}).get("training_ms")
        ratio = f"{row['training_ms'] / base:.3f}" if base else "-"
        lines.append(
            f"{name:10}{row['step_ms']:9.1f}{row['wire_ms']:9.1f}{f'{own:.1f}' if own else '-':>9}{bound:>17}"
            f"{row['training_ms']:10.1f}{ratio:>8}"
            f"{row['launches']:10.0f}{row['peak'] / 1e9:9.1f}{row['state'] / 1e9:10.2f}"
        )
    return "\n".join(lines)


def run_apart(case: str, row: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "row.json")
        command = [sys.executable, "-m", "benchmarks.whole", "--case", case, "--rows", row, "--steps", str(steps)]
        run = subprocess.run([*command, "--row", str(result)], stderr=subprocess.PIPE, text=True)
        if run.returncode:
            sys.stderr.write(run.stderr)
            return {"error": run.stderr.strip().splitlines()[-1] if run.stderr.strip() else run.returncode}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=["a"], choices=list(CASES))
    parser.add_argument("--rows", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures with command, device and date")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        options.row.write_text(json.dumps(measure(options.case[0], options.rows[0], options.steps)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, {NETWORK.name}")
    document: dict[str, Any] = {
        "command": f"python -m benchmarks.whole --case {' '.join(options.case)} --steps {options.steps}",
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "network": NETWORK.name,
        "cases": {},
    }
    for case in options.case:
        rows = {row: run_apart(case, row, options.steps) for row in options.rows}
        document["cases"][case] = rows
        setup = dataclasses.asdict(CASES[case])
        print(
            f"\n({case}) width {setup['model']['width']}, {setup['seq']} tokens, W={setup['world']}\n{describe(rows)}"
        )
        if options.json:
            options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
