"""torchtitan's Llama 3, sharded by torchtitan's own code, as one rank of W on this device: FSDP2 beside flatshard.

    python -m benchmarks.titan                                                            1B on a GPU, W = 8
    python -m benchmarks.titan --flavor 8B --seq 8192 --json benchmarks/results/NAME.json
    python -m benchmarks.titan --flavor debugmodel --device cpu --seq 64 --steps 3        a look, without a GPU

Each system runs in a process of its own, over one modelled network: first PyTorch's FSDP2, then the same script after
`flatshard.install()`. Meta device, list units, `to_empty`, `init_weights`, selective recomputation and the loss by
chunks are torchtitan's; attention is PyTorch's, because flex attention would be compiled; AdamW is fused.

With torch 2.11, FSDP2 frees the weight of the last norm before its backward where the loss goes by chunks, and the
process ends: take `--loss whole` there.

torchtitan must be importable. Packages that it imports and that are not used here may be missing (`UNUSED`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp
from torch import nn

import flatshard
from benchmarks.table import NETWORK, timed
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import difference

# Data, logging, quantisation, kernels of other models: each with the modules that are missing where it is.
UNUSED = {
    "datasets": ("datasets", "datasets.distributed"),
    "tensorboard": ("tensorboard", "torch.utils.tensorboard"),
    "tokenizers": ("tokenizers",),
    "torchao": ("torchao", "torchao.float8", "torchao.quantization", "torchao.prototype"),
    "triton": ("triton", "triton.language"),
    "tqdm": ("tqdm",),
    "tyro": ("tyro", "tyro.conf"),
}


def imported(name: str, device: str = "cpu") -> list[Any]:
    """The package of one of torchtitan's models, and its configs."""
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_compat

    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # torch 2.11; torchtitan names it in signatures
        torch.distributed.fsdp.DataParallelMeshDims = Any
    absent = [package for package in UNUSED if importlib.util.find_spec(package) is None]
    missing = {module: mock.MagicMock() for package in absent for module in UNUSED[package]}
    with mock.patch.dict(sys.modules):
        sys.modules.update(missing)
        import torchtitan.tools.utils as tools

        tools.device_type, tools.device_module = device, getattr(torch, device)
        found = [importlib.import_module(f"torchtitan.models.{name}{part}") for part in ("", ".config_registry")]
        kept = {title: module for title, module in sys.modules.items() if title not in missing}
    sys.modules.update(kept)
    return found


def parallelized(
    name: str,
    *,
    device: str = "cpu",
    flavor: str = "debugmodel",
    layers: int | None = None,
    batch: int = 2,
    seq: int = 16,
    precision: str = "float32",
    tied: bool = False,
    compiled: str | None = None,
    offload: bool = False,
    degrees: dict[str, int],
) -> tuple[Any, Any]:
    """One of torchtitan's models, on the meta device, after torchtitan's code to parallelize it; and its config.

    ``compiled``: blocks are, by this backend. ``degrees``: of parallelism; all others are 1.
    """
    models, registry = imported(name, device)
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as theirs
    from torchtitan.models.common.attention import ScaledDotProductAttention

    backend = "partial_dtensor"
    config = getattr(registry, f"{name}_debugmodel")()
    config.model_spec = spec = models.model_registry(flavor, attn_backend="flex")
    config.training.seq_len, config.training.local_batch_size = seq, batch
    config.training.mixed_precision_param, config.training.enable_cpu_offload = precision, offload
    config.parallelism.spmd_backend = backend
    if compiled is not None:
        config.compile = CompileConfig(enable=True, components=["model"], backend=compiled)
    theirs.set_spmd_backend(backend)
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1) | degrees
    world = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"]
    dims = ParallelDims(**degrees, world_size=world, spmd_backend=backend)
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if tied:
        spec.model.enable_weight_tying = True
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    return model, config


def loss_by_chunks(model: Any, config: Any) -> Any:
    """torchtitan's loss, which calls the head of the model chunk by chunk: of hidden states, labels and a divisor."""
    from torchtitan.config import CompileConfig

    wrapper = config.loss.build(compile_config=CompileConfig())
    wrapper.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return wrapper


def loss_at_once(logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The same loss of all logits."""
    summed = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return summed / count, None


def measure(system: str, options: argparse.Namespace) -> dict[str, float]:
    """Figures of one system, in this process: milliseconds and bytes."""
    on_gpu = options.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if system == "flatshard":
        flatshard.install()
    with rehearse(options.world, NETWORK) as rehearsal:
        step = _trainer(options)
        for _ in range(3):
            step()
        synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = rehearsal.medium.traffic.snapshot()
        durations = timed(step, options.steps, on_gpu)
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
        memory = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
        begin = time.perf_counter()
        loss = step()
        host = time.perf_counter() - begin
        synchronize()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss of {system} is {loss.item()}: its figures mean nothing")
    return {
        "ms": 1e3 * statistics.median(durations),
        "min_ms": 1e3 * min(durations),
        "host_ms": 1e3 * host,
        "wire_ms": 1e3 * sum(entry.wire_seconds for entry in traffic.values()) / options.steps,
        "launches": sum(entry.launches for entry in traffic.values()) / options.steps,
        "peak": memory[0],
        "reserved": memory[1],
    }


def _trainer(options: argparse.Namespace) -> Any:
    model, config = parallelized(
        "llama3",
        device=options.device,
        flavor=options.flavor,
        batch=options.batch,
        seq=options.seq,
        precision="bfloat16" if options.device == "cuda" else "float32",
        compiled="inductor" if options.compile else None,
        degrees={"dp_shard": options.world},
    )
    model.to_empty(device=options.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_of = loss_at_once if options.loss == "whole" else loss_by_chunks(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape, rng = (options.batch, options.seq), torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 2048, shape, generator=rng).to(options.device) for _ in range(2))
    positions = torch.arange(options.seq, device=options.device).expand(shape)
    count = torch.tensor(float(options.world * tokens.numel()), device=options.device)

    def step() -> torch.Tensor:
        loss, _ = loss_of(model(tokens, positions), labels, count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run_apart(system: str, arguments: list[str]) -> dict[str, float]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "row.json")
        command = [sys.executable, "-m", "benchmarks.titan", *arguments, "--system", system, "--row", str(result)]
        subprocess.run(command, check=True)
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="1B", help="of torchtitan's Llama 3: debugmodel, 1B, 3B, 8B")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="compile the blocks, as torchtitan does")
    parser.add_argument("--loss", default="chunks", choices=["chunks", "whole"], help="chunks: as torchtitan does")
    parser.add_argument("--json", type=Path, help="write the figures with command, device and versions")
    parser.add_argument("--system", choices=["fsdp2", "flatshard"], help="measure this one alone, in this process")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system:
        row = measure(options.system, options)
        options.row.write_text(json.dumps(row)) if options.row else print(json.dumps(row, indent=2))
        return
    arguments = sys.argv[1:]
    rows = {system: run_apart(system, arguments) for system in ("fsdp2", "flatshard")}
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    head = f"torchtitan Llama 3 {options.flavor}, {options.batch} x {options.seq} tokens, W={options.world}"
    print(f"{head}{', compiled' * options.compile}; {device}, torch {torch.__version__}, {NETWORK.name}")
    print(f"{'system':12}" + "".join(f"{name:>12}" for name in rows["fsdp2"]))
    for system, row in rows.items():
        print(f"{system:12}" + "".join(f"{value / (1e9 if value > 1e7 else 1):12.2f}" for value in row.values()))
    if options.json:
        told = {
            "command": f"python -m benchmarks.titan {' '.join(arguments)}".replace(f" --json {options.json}", ""),
            "date": datetime.date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
            "network": NETWORK.name,
        }
        options.json.write_text(json.dumps(told | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
