"""Host time of an optimizer step and of clipping: DTensor parameters against ``fully_shard_optimizer``.

    python -m benchmarks.optimizer [--device cuda] [--layers 4 16 64]

The model has the tensors of a Llama of ``--layers`` blocks (16: the 1B model), each made small, so that what is timed
is the host: on CUDA the calls return before the device is done; on a CPU the little arithmetic is part of the figure.
One process holds everything; more ranks change the size of the shards, not the work of the host.  ``plain`` is the
same model unsharded: fused AdamW on plain tensors, and torch's clipping.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.nn.utils import clip_grad_norm_ as torch_clip

import flatshard
from benchmarks.models import Llama, LlamaConfig


def model_of(layers: int, device: str, shard: Callable[..., object] | None) -> nn.Module:
    model = Llama(LlamaConfig(width=32, layers=layers, heads=2, kv_heads=1, ffn=64, vocab=64, max_tokens=64)).to(device)
    if shard is not None:
        for unit in (model.embed, *model.blocks, model.head):
            shard(unit)
        shard(model)
    return model


def measure(layers: int, device: str, name: str, steps: int) -> tuple[int, float, float]:
    """Parameters, and the medians of microseconds in ``step`` and in clipping."""
    shard = {"plain": None, "fsdp2": fsdp2_shard}.get(name, flatshard.fully_shard)
    model = model_of(layers, device, shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clip: Callable[..., torch.Tensor] = torch_clip
    if name == "flatshard+":
        flatshard.fully_shard_optimizer(optimizer)
        clip = flatshard.clip_grad_norm_
    tokens = torch.randint(64, (1, 17), device=device)
    stepping, clipping = [], []
    for _ in range(steps + 3):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        clipping.append(timed(device, lambda: clip(model.parameters(), 1.0)))
        stepping.append(timed(device, optimizer.step))
        optimizer.zero_grad()
    count = sum(1 for _ in model.parameters())
    return count, 1e6 * statistics.median(stepping[3:]), 1e6 * statistics.median(clipping[3:])


def timed(device: str, call: Callable[[], object]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


SYSTEMS = {
    "plain": "unsharded, plain tensors",
    "fsdp2": "PyTorch FSDP2, DTensor parameters",
    "flatshard": "flatshard, DTensor parameters",
    "flatshard+": "flatshard, fully_shard_optimizer and its clip_grad_norm_",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    print(f"fused AdamW on {options.device}, torch {torch.__version__}: median of {options.steps}, microseconds")
    print(f"{'layers':>7}{'parameters':>12}{'step':>10}{'clip':>10}   system")
    for layers in options.layers:
        for name, title in SYSTEMS.items():
            count, step, clip = measure(layers, options.device, name, options.steps)
            print(f"{layers:>7}{count:>12}{step:>10.0f}{clip:>10.0f}   {title}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
