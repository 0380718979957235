"""Loss curves of one process, FSDP2 and flatshard: the same weights, text and global batch, trained the same way.

    python -m benchmarks.convergence --json FILE --plot FILE.png               one rank over NCCL
    python -m benchmarks.convergence --ranks 2 --seconds 120                   ranks share one GPU, over Gloo
    python -m benchmarks.convergence --device cpu --small --steps 20 --ranks 2
    python -m benchmarks.convergence --systems flatshard flatshard-int8-gathers flatshard-int8 flatshard-float8
    python -m benchmarks.convergence --systems flatshard flatshard-int8-gathers --seeds 24 --at-once 12
    python -m benchmarks.convergence --device cpu --small --dtype float32 --batch 8 --lr 1e-3 --seeds 24 --at-once 2 \
        --systems flatshard flatshard-int8-gathers

A model of Llama's shape (99.5 million parameters) reads the bytes of Python's standard library.  Main weights and AdamW
are in float32, weights and gradients in between in bfloat16, or in --dtype.  ``one`` is plain PyTorch in one process.
Kernels are deterministic, so that curves differ by what the systems do; with --nondeterministic also by how kernels
happen to add.
``flatshard-...``: with formats on the wire, those of `benchmarks.systems.FORMATS`.  --rounded: at the end, the loss of
the trained weights over other text, as they are and as each format of gathers rounds them.
Smoothed: the mean of 20 consecutive steps.  Curves are compared over the steps that all systems have done.
--seeds: two runs of the same program end further apart than most systems do, so curves are means over that many seeds,
and what each system ends with is compared seed by seed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flatshard
from benchmarks.models import Llama, LlamaConfig
from benchmarks.processes import on_ranks
from benchmarks.systems import FORMATS, Setup, shard_units

LLAMA_100M = LlamaConfig(768, layers=14, heads=12, kv_heads=12, ffn=2048, vocab=256, max_tokens=512)
# Its matrices are just large enough to be encoded by formats.
LLAMA_SMALL = LlamaConfig(256, layers=2, heads=4, kv_heads=4, ffn=768, vocab=256, max_tokens=32)
SYSTEMS = ["one", "fsdp2", "flatshard"]
WITH_FORMATS = [f"flatshard-{name}" for name in FORMATS]
SMOOTHED, LAST = 20, 100  # steps
ROUNDED, OTHER = ("", "int8-gathers", "float8"), 60  # formats; batches of other text
LOOK_AT_CLOCK = 10  # steps
TEXT_BYTES = 20_000_000


@dataclass(frozen=True)
class Run:
    """``batch`` sequences per step, over all ranks. ``seconds``: stop when so much time is up."""

    model: LlamaConfig
    batch: int
    steps: int
    device: str
    lr: float = 6e-4
    seed: int = 0
    seconds: float = math.inf
    deterministic: bool = True
    rounded: bool = False
    dtype: torch.dtype = torch.bfloat16

    def setup(self, world: int) -> Setup:
        return Setup(self.model, self.batch // world, 0, world, device=self.device, dtype=self.dtype)

    def lr_at(self, number: int) -> float:
        """Linear over the first tenth of the steps, then half a cosine down to a tenth."""
        warmup = max(self.steps // 10, 1)
        if number < warmup:
            return self.lr * (number + 1) / warmup
        progress = (number - warmup) / max(self.steps - warmup, 1)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def text() -> bytes:
    """The sources of the standard library, in the order of their names, up to `TEXT_BYTES`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    read = bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not installed.intersection(path.relative_to(root).parts):
            read += path.read_bytes()
            if len(read) >= TEXT_BYTES:
                break
    return bytes(read[:TEXT_BYTES])


def train(rank: int, world: int, system: str, run: Run) -> dict[str, Any]:
    """Losses of the global batch, step by step, and the seconds they took; one rank's part of the work."""
    nccl = system != "one" and not dist.is_initialized()  # one rank on a GPU
    if nccl:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    if run.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it
    if run.device == "cpu":  # a CPU without bfloat16 would raise and catch an exception at every product
        torch.backends.mkldnn.set_flags(False)
    corpus = torch.frombuffer(bytearray(text()), dtype=torch.uint8).to(run.device)
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        model = Llama(run.model)
    loss_of, optimizer = build(system, model, run.setup(world))
    draw = torch.Generator().manual_seed(run.seed)
    window = torch.arange(run.model.max_tokens + 1, device=run.device)
    losses: list[Tensor] = []
    begin = time.perf_counter()
    for number in range(run.steps):
        if number % LOOK_AT_CLOCK == 0 and time_is_up(begin, run, world):
            break
        starts = torch.randint(len(corpus) - len(window), (run.batch,), generator=draw).chunk(world)[rank]
        rows = corpus[starts.to(run.device)[:, None] + window].long()
        for group in optimizer.param_groups:
            group["lr"] = run.lr_at(number)
        loss = loss_of(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses).cpu()
    seconds = time.perf_counter() - begin
    if world > 1:
        dist.all_reduce(curve)
        curve /= world
    result = {"losses": curve.tolist(), "seconds": seconds}
    if run.rounded and system.startswith("flatshard"):
        starts = torch.randint(len(corpus) - len(window), (OTHER, run.batch), generator=draw)
        batches = [corpus[each.to(run.device)[:, None] + window].long() for each in starts]
        weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        result["rounded"] = {name or "as they are": rounded(weights, name, run, world, batches) for name in ROUNDED}
    if nccl:
        dist.destroy_process_group()
    return result


def rounded(weights: dict[str, Tensor], formats: str, run: Run, world: int, batches: list[Tensor]) -> float:
    """The mean loss of trained weights, as formats on the wire leave them."""
    with torch.device(run.device):
        model = Llama(run.model)
    model.load_state_dict(weights, strict=False)  # buffers are not trained
    loss_of, _ = build(f"flatshard-{formats}" if formats else "flatshard", model, run.setup(world))
    with torch.no_grad():
        losses = [loss_of(rows[:, :-1], rows[:, 1:]) for rows in batches]
    return float(torch.stack(losses).double().mean())


def build(system: str, model: Llama, setup: Setup) -> tuple[Callable[[Tensor, Tensor], Tensor], torch.optim.Optimizer]:
    """The loss of a rank's rows as a function that can be differentiated, and what updates the weights by it."""
    low = setup.dtype
    loss_of: Callable[[Tensor, Tensor], Tensor] = model
    if system == "fsdp2":
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        shard_units(setup, model, fully_shard, MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low))
        for unit in model.modules() if setup.world > 1 else ():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # Gloo adds, it takes no mean
    elif system.startswith("flatshard"):
        formats = FORMATS.get(system.removeprefix("flatshard-"), {})
        policy = flatshard.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low, **formats)
        shard_units(setup, model, flatshard.fully_shard, policy)
    else:

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            # Differentiating the casts turns their gradients into float32 ones.
            weights = {name: parameter.to(low) for name, parameter in model.named_parameters()}
            return torch.func.functional_call(model, weights, (tokens, targets))

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return loss_of, flatshard.fully_shard_optimizer(optimizer) if system.startswith("flatshard") else optimizer


def time_is_up(begin: float, run: Run, world: int) -> bool:
    """Whether rank 0 says so: all ranks stop at the same step."""
    if math.isinf(run.seconds):
        return False
    if run.device == "cuda":
        torch.cuda.synchronize()
    up = torch.tensor([time.perf_counter() - begin > run.seconds], dtype=torch.uint8)
    if world > 1:
        dist.broadcast(up, 0)
    return bool(up)


def smoothed(losses: list[float]) -> Tensor:
    """Means of `SMOOTHED` consecutive losses; of all, where there are fewer."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(SMOOTHED, len(losses)), 1).mean(1)


def differences(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Per pair of systems, the largest distances of their curves over the steps that both have done."""
    result = {}
    for one, other in combinations(curves, 2):
        done = min(len(curves[one]), len(curves[other]))
        a, b = curves[one][:done], curves[other][:done]
        result[f"{one} - {other}"] = {
            "smoothed": float((smoothed(a) - smoothed(b)).abs().max()),
            "raw": max(abs(x - y) for x, y in zip(a, b)),
        }
    return result


def mean_curve(runs: list[list[float]]) -> list[float]:
    """The mean, step by step, over the steps that all have done."""
    return [sum(losses) / len(losses) for losses in zip(*runs)]


def end_of(losses: list[float]) -> float:
    """The mean of the last `LAST` steps."""
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def apart(ends: dict[str, dict[int, float]]) -> dict[str, tuple[float, float]]:
    """How far above the first system each other one ends, and the standard error of that, over the seeds of both."""
    first, *others = ends
    result = {}
    for system in others:
        seeds = ends[first].keys() & ends[system].keys()
        pairs = torch.tensor([ends[system][seed] - ends[first][seed] for seed in sorted(seeds)], dtype=torch.float64)
        if len(pairs) > 1:
            result[f"{system} - {first}"] = float(pairs.mean()), float(pairs.std() / len(pairs) ** 0.5)
    return result


def describe(curves: dict[str, list[float]], steps: int) -> str:
    lines = ["step".rjust(6) + "".join(name.removeprefix("flatshard-").rjust(16) for name in curves)]
    done = max(len(losses) for losses in curves.values())
    for number in sorted({0, *(done * part // 10 for part in range(1, 10)), done - 1}):
        cells = (f"{losses[number]:16.4f}" if number < len(losses) else f"{'-':>16}" for losses in curves.values())
        lines.append(f"{number + 1:6}" + "".join(cells))
    for name, losses in curves.items():
        if len(losses) < steps:
            lines.append(f"{name} stopped after {len(losses)} of {steps} steps: its time was up")
    lines.append(f"{'largest difference':48}{'smoothed':>11}{'raw':>10}")
    for pair, distance in differences(curves).items():
        lines.append(f"{pair:48}{distance['smoothed']:11.5f}{distance['raw']:10.5f}")
    return "\n".join(lines)


def plot(curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=[2, 1])
    styles = {"one": "-", "fsdp2": "--", "flatshard": ":", **dict.fromkeys(WITH_FORMATS, "-")}
    colors = {name: f"C{number}" for number, name in enumerate(curves)}
    for name, losses in curves.items():
        upper.plot(range(1, len(losses) + 1), losses, styles[name], color=colors[name], label=name, linewidth=1.5)
    upper.set(ylabel="loss (nats per byte)", title=title)
    upper.legend()
    first = next(iter(curves))
    for name, losses in list(curves.items())[1:]:
        done = min(len(losses), len(curves[first]))
        apart = smoothed(losses[:done]) - smoothed(curves[first][:done])
        lower.plot(range(done - len(apart) + 1, done + 1), apart, styles[name], color=colors[name])
    lower.axhspan(-0.01, 0.01, alpha=0.15, color="grey")
    lower.set(xlabel="step; the grey band is within 0.01", ylabel=f"to {first}, mean of {SMOOTHED} steps")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a model for trying the script out")
    parser.add_argument("--ranks", type=int, default=1, help="processes of FSDP2 and flatshard")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds, from --seed on")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="per system; it stops when they are over")
    parser.add_argument("--nondeterministic", action="store_true", help="let kernels add in any order")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=[*SYSTEMS, *WITH_FORMATS])
    parser.add_argument("--rounded", action="store_true", help="what rounding the trained weights costs by itself")
    parser.add_argument("--json", type=Path, help="write the curves with command, device and date")
    parser.add_argument("--plot", type=Path, help="draw the curves and their differences")
    options = parser.parse_args()
    if options.ranks < 1 or options.batch % options.ranks:
        parser.error(f"--batch {options.batch} cannot be divided by --ranks {options.ranks}")
    if min(options.seeds, options.at_once) < 1:
        parser.error("--seeds and --at-once must be at least 1")
    config = LLAMA_SMALL if options.small else LLAMA_100M
    deterministic = not options.nondeterministic
    told = options.batch, options.steps, options.device, options.lr, options.seed, options.seconds
    run = Run(config, *told, deterministic, options.rounded, getattr(torch, options.dtype))
    source = text()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Llama(config).parameters())
    document = {
        "command": f"python -m benchmarks.convergence --device {options.device} --ranks {options.ranks} --steps "
        f"{options.steps} --batch {options.batch} --lr {options.lr} --seed {options.seed}"
        + f" --systems {' '.join(options.systems)}" * (options.systems != SYSTEMS)
        + f" --seeds {options.seeds} --at-once {options.at_once}" * (options.seeds > 1)
        + " --small" * options.small
        + f" --dtype {options.dtype}" * (options.dtype != "bfloat16")
        + " --nondeterministic" * options.nondeterministic
        + " --rounded" * options.rounded,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "parameters": parameters,
        "text": {"bytes": len(source), "sha256": hashlib.sha256(source).hexdigest()},
    }
    title = f"{parameters / 1e6:.1f}M parameters, {options.batch} x {config.max_tokens} bytes a step"
    title += f", {options.ranks} rank{'s' * (options.ranks > 1)}, {device}"
    title += f", means of {options.seeds} seeds" * (options.seeds > 1)
    print(f"{title}, torch {torch.__version__}\ntext: {document['text']}", flush=True)
    results: dict[tuple[str, int], dict[str, Any]] = {}
    seeds = range(options.seed, options.seed + options.seeds)
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = {}
        for seed in seeds:
            for system in options.systems:
                ranks = 1 if system == "one" else options.ranks
                gloo = system != "one" and (ranks > 1 or options.device == "cpu")
                waiting = pool.submit(on_ranks, ranks, train, system, replace(run, seed=seed), gloo=gloo)
                runs[waiting] = system, seed
        for waiting in as_completed(runs):
            (system, seed), result = runs[waiting], waiting.result()[0]
            results[system, seed] = result
            end = f", the last {LAST} at {end_of(result['losses']):.5f}"
            print(f"{system}, seed {seed}: {len(result['losses'])} steps in {result['seconds']:.0f} s{end}", flush=True)
            if "rounded" in result:
                print(f"  then: {', '.join(f'{name} {loss:.6f}' for name, loss in result['rounded'].items())}")
            if options.json:
                options.json.write_text(json.dumps({**document, **figures(options.systems, results)}) + "\n")
    told = figures(options.systems, results)
    print(describe(told["losses"], options.steps))
    for pair, (mean, error) in told.get("ends apart", {}).items():
        print(
            f"{pair}: the last {LAST} steps end {mean:+.5f} apart, standard error {error:.5f}, of {options.seeds} seeds"
        )
    if options.plot:
        plot(told["losses"], title, options.plot)


def figures(systems: list[str], results: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """What is written down of runs by system and seed; of several seeds the mean curves, and what each ended with."""
    by_system = {
        system: {seed: runs for (name, seed), runs in sorted(results.items()) if name == system} for system in systems
    }
    done = {system: runs for system, runs in by_system.items() if runs}
    curves = {system: mean_curve([run["losses"] for run in runs.values()]) for system, runs in done.items()}
    found: dict[str, Any] = {
        "seconds": {system: sum(run["seconds"] for run in runs.values()) / len(runs) for system, runs in done.items()},
        "rounded": {
            system: [run["rounded"] for run in runs.values() if "rounded" in run] for system, runs in done.items()
        },
        "differences": differences(curves),
        "losses": curves,
    }
    if len({seed for _, seed in results}) > 1:
        found["ends"] = {
            system: {seed: end_of(run["losses"]) for seed, run in runs.items()} for system, runs in done.items()
        }
        found["ends apart"] = apart(found["ends"])
    return found


if __name__ == "__main__":
    main()
