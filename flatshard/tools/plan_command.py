"""The command ``flatshard plan``. Its arguments are checked before torch is imported."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshard._sizes import UNITS, parse_bytes
from flatshard.rehearsal.network import PRESETS, get_network
from flatshard.tools.presets import NAMED, OPTIMIZERS, check_source

if TYPE_CHECKING:
    import torch


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Estimate memory and traffic of every sharding strategy for MODEL, show which ones fit, and recommend one. MODEL
    is a named shape (llama-8b, mixtral-8x7b, ...), a Hugging Face config.json (or its folder), or module:callable that
    returns a module. No GPU is needed."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"{', '.join(NAMED)}, a config.json or module:callable")
    add("--devices", type=int, required=True, metavar="W", help="number of devices, one rank each")
    add("--memory", required=True, help="memory of one device, in GB, or with a unit: 80GB, 80GiB")
    add_network(parser)
    add("--optimizer", default="adamw", help=f"optimizer: {', '.join(OPTIMIZERS)} (default adamw)")
    add("--main-dtype", default="float32", help="dtype of main weights and state (default float32)")
    add("--param-dtype", default="bfloat16", help="dtype of compute weights (default bfloat16)")
    add("--reduce-dtype", help="dtype of reduce-scatters (default: --param-dtype; with torch 2.15, that of gradients)")
    add("--grad-dtype", help="dtype of reduced gradients (default: --main-dtype)")
    add("--gather-format", choices=("int8", "float8"), help="encoding of all-gathers (docs/formats.md)")
    add(
        "--reduce-format",
        nargs="+",
        choices=("int8", "bf16_fp32"),
        help="encoding of reduce-scatters; give two for the outer and the inner mesh axis",
    )
    add("--layout", default="tensor", choices=("tensor", "flat", "auto"), help="layout of parameters in buffers")
    add("--units", nargs="+", metavar="CLASS", help="import paths of unit classes (default: automatic)")
    add("--microbatches", type=int, default=1, metavar="N", help="micro-batches per step (default 1)")
    add("--activations", metavar="SIZE", help="memory of activations per rank, if you know it")
    add("--batch", type=int, metavar="ROWS", help="rows per micro-batch and rank, for activations")
    add("--length", type=int, metavar="TOKENS", help="tokens per row, for activations and attention")
    add("--recompute", action="store_true", help="recompute the activations of blocks in backward")
    add(
        "--ep", type=int, metavar="N", help="expert parallelism over N neighbouring ranks (default: plan tries several)"
    )
    add("--experts-per-token", type=int, metavar="N", help="experts per token, if not in the config")
    add("--picture", action="store_true", help="also draw which strategies fit on how many devices")
    add("--spare", type=float, default=0.1, help="fraction of the memory to leave free (default 0.1)")
    add("--tokens", type=float, help="tokens per micro-batch and rank, for step times (default: batch x length)")
    add(
        "--tflops",
        metavar="N",
        help="TFLOP/s that matrix products reach, for step times; 'measured': measure on this machine",
    )
    add(
        "--memory-bandwidth",
        type=float,
        default=3.35,
        metavar="TB/S",
        help="memory bandwidth of a device (default 3.35)",
    )
    add("--host-ms", type=float, default=2.7, help="host ms per unit and micro-batch (default 2.7); 0: CUDA graphs")
    add("--peak-tflops", type=float, default=989.0, metavar="N", help="peak TFLOP/s of a device, for MFU (default 989)")
    add("--json", type=Path, metavar="PATH", help="also write the figures to this file")


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `get_network`."""
    add = parser.add_argument
    add("--network", default="h100-nvlink", help=f"network: {', '.join(PRESETS)} (default h100-nvlink)")
    add("--ranks-per-node", type=int, help="number of ranks in a node (default 8)")
    add("--ranks-per-pod", type=int, help="number of ranks in a pod of h100-pods (default 1024)")
    add("--algorithm", help="growth of latency with ranks: constant, ring, tree or hierarchical")


def plan(options: argparse.Namespace) -> int:
    """Print the plan; OSError, TypeError and ValueError say what is wrong with the arguments."""
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {options.optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
    given = [each for each in (options.batch, options.length) if each is not None]
    if (options.batch is not None and options.length is None) or min(given, default=1) < 1:
        raise ValueError(f"--batch {options.batch} --length {options.length}: give both, at least 1, for activations")
    if options.tokens is None and options.batch is not None and options.tflops is not None:
        options.tokens = float(options.batch * options.length)
    if (options.tokens is None) != (options.tflops is None):
        missing = "--tflops" if options.tflops is None else "--tokens (or --batch and --length)"
        raise ValueError(f"{missing} is missing: the step time needs both --tokens and --tflops")
    tflops = _tflops(options.tflops)
    for flag, given in (("--ep", options.ep), ("--experts-per-token", options.experts_per_token)):
        if given is not None and given < 1:
            raise ValueError(f"{flag} {given}: must be at least 1")
    network = get_network(options.network, options.ranks_per_node, options.ranks_per_pod, options.algorithm)
    memory = _size("memory", options.memory)
    if not memory:
        raise ValueError(f"--memory {options.memory}: must be more than 0")
    activations = None if options.activations is None else _size("activations", options.activations)
    recomputed: float | None = None
    if options.devices < 1:
        raise ValueError(f"--devices {options.devices}: must be at least 1")
    if not 0 <= options.spare < 1:
        raise ValueError(f"--spare {options.spare:g}: must be a fraction of at least 0 and less than 1")
    check_source(options.model)
    check_writable("json", options.json)

    from flatshard.policy import MixedPrecisionPolicy
    from flatshard.tools.activations import activations_of
    from flatshard.tools.model_shapes import load_model, load_runnable
    from flatshard.tools.plan import MOST_DEVICES, compare_strategies, picture
    from flatshard.tools.strategy_plan import Machine, Training
    from flatshard.tools.timing import Speed, measured_flops

    if options.devices > MOST_DEVICES:
        raise ValueError(f"--devices {options.devices}: must be at most {MOST_DEVICES}")
    named = ("param_dtype", "reduce_dtype", "main_dtype", "grad_dtype")
    dtypes: dict[str, Any] = {name: _dtype(name, getattr(options, name)) for name in named}
    given = options.reduce_format or [None]
    precision = MixedPrecisionPolicy(
        gather_format=options.gather_format, reduce_format=tuple(given) if given[1:] else given[0], **dtypes
    )
    model = load_model(options.model, options.units or "auto", options.experts_per_token)
    if options.batch is not None:
        memory_of = activations_of(*load_runnable(options.model), options.batch, options.length, precision.param_dtype)
        saved, recomputed = (size + (activations or 0) for size in (memory_of.saved, memory_of.recomputed))
        activations, recomputed = (recomputed, None) if options.recompute else (saved, recomputed)
    speed = None
    if tflops == "measured":
        tflops = measured_flops(model, options.tokens, precision.param_dtype) / 1e12
        print(f"measured here: {tflops:,.1f} TFLOP/s\n")
    if tflops is not None:
        rates = 1e12 * options.memory_bandwidth, 1e-3 * options.host_ms, 1e12 * options.peak_tflops
        speed = Speed(1e12 * tflops, options.tokens, options.length, options.recompute, *rates)
    machine = Machine(options.devices, memory, network, options.spare)
    training = Training(
        precision=precision,
        layout=options.layout,
        state=OPTIMIZERS[options.optimizer],
        microbatches=options.microbatches,
        activations=activations,
        recomputed=recomputed,
        recompute=options.recompute,
        speed=speed,
        expert_parts=options.ep,
    )
    comparison = compare_strategies(model, machine, training)
    if options.json:
        options.json.write_text(comparison.to_json())
    print(comparison.table())
    if options.picture:
        print(f"\n{picture(model, machine, training)}")
    return 0


def _tflops(given: str | None) -> Any:
    """A number, "measured", or None."""
    if given is None or given == "measured":
        return given
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"--tflops {given!r}: must be a number of TFLOP/s, or 'measured'") from None


def _size(name: str, given: str) -> float:
    size = parse_bytes(given, "GB")
    if size is None:
        raise ValueError(f"--{name} {given!r}: must be a number of GB, or a number with a unit ({', '.join(UNITS)})")
    return float(size)


def _dtype(name: str, given: str | None) -> torch.dtype | None:
    import torch

    dtype = None if given is None else getattr(torch, given, None)
    if given is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--{name.replace('_', '-')} {given!r}: must be a dtype of torch, for example bfloat16")
    return dtype


def check_writable(name: str, path: Path | None) -> None:
    """ValueError if a file cannot be written, before any work is done."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"--{name} {path}: {error.strerror}") from error
