"""Ranks that see each other's memory, two on one GPU: they train as over a backend, which carries nothing of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatshard
from flatshard import MixedPrecisionPolicy, SchedulePolicy, _torch, fully_shard, microbatch
from flatshard.experimental import WirePolicy
from flatshard.train.model import Llama, LlamaConfig

CONFIG = LlamaConfig(64, layers=3, heads=4, kv_heads=2, ffn=96, vocab=101, max_tokens=16)


def _train(rank: int, choices: dict[str, Any], schedule: SchedulePolicy) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    mesh = init_device_mesh("cuda", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, schedule=schedule, **choices)
    fully_shard(model, mesh=mesh, schedule=schedule, **choices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        for micro in range(2):
            tokens = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(10 * step + micro + 5 * rank))
            with microbatch(model, is_first=micro == 0, is_last=micro == 1):
                loss = model(tokens[:, :-1].cuda(), tokens[:, 1:].cuda())
                loss.backward()
            losses.append(loss.item())
        flatshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.to_local().cpu() for p in model.parameters() if isinstance(p, DTensor)]


def _both(rank: int, world: int, choices: dict[str, Any]) -> list[Any]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    calls = {"gather": 0, "reduce": 0}

    def counted(kind: str, call: Any) -> Any:
        def called(*args: Any) -> Any:
            calls[kind] += 1
            return call(*args)

        return called

    _torch.all_gather_one = counted("gather", _torch.all_gather_one)
    _torch.reduce_scatter_one = counted("reduce", _torch.reduce_scatter_one)
    found: list[Any] = []
    for peers in (False, True):
        before = dict(calls)
        trained = _train(rank, choices, WirePolicy(peers=peers))
        found.append((*trained, {kind: calls[kind] - before[kind] for kind in calls}))
    return found


@pytest.mark.limit(200)
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"strategy": 2},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, gather_format="int8")},
    ],
    ids=["float32", "bfloat16", "zero-2", "int8"],
)
def test_peers_train_as_a_backend_does_without_it(gpu_ranks, choices):
    for backend, peers in gpu_ranks(2, _both, choices):
        assert backend[0] == peers[0]
        assert all(torch.equal(one, other) for one, other in zip(backend[1], peers[1], strict=True))
        assert backend[2]["gather"] > 20
        assert backend[2]["reduce"] > 10
        # It carries which nodes the ranks are on, and what does not belong to units.
        assert peers[2]["gather"] <= 4
        assert peers[2]["reduce"] == 0
