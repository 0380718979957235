"""Weights from two training processes to two others: `sync_weights` beside a loop of ``full_tensor()`` and broadcast.

Both send the same tensors over the same group; they take turns, and medians are compared.

    python -m benchmarks.sync --layers 8 --width 512
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.processes import on_ranks
from flatshard import fully_shard, receive_weights, sync_weights


def _model(width: int, layers: int) -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
    )


def _plain(rank: int, model: nn.Module, group: Any, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        whole = parameter.full_tensor().to(dtype) if rank < 2 else torch.empty_like(parameter, dtype=dtype)
        if rank != 1:
            dist.broadcast(whole, src=0, group=group)
        if rank >= 2:
            parameter.data.copy_(whole)


def _streamed(rank: int, model: nn.Module, group: Any, dtype: torch.dtype) -> None:
    if rank < 2:
        sync_weights(model, group, dtype=dtype)
    else:
        receive_weights(model, group)


def measure(rank: int, world: int, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of both, one figure per round; the first round is left out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "rank"))["rank"]
    group = dist.new_group([0, 2, 3])
    model = _model(width, layers)
    if rank < 2:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    times: dict[str, list[float]] = {"sync_weights": [], "plain loop": []}
    for _ in range(rounds + 1):
        for name, action in (("sync_weights", _streamed), ("plain loop", _plain)):
            dist.barrier()
            began = time.perf_counter()
            action(rank, model, group, torch.bfloat16)
            dist.barrier()
            times[name].append(time.perf_counter() - began)
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    return {"bytes": size, "seconds": medians, "GB/s": {name: size / s / 1e9 for name, s in medians.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(on_ranks(4, measure, options.width, options.layers, options.rounds)[0], indent=2))


if __name__ == "__main__":
    main()
