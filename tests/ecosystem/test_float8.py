"""torchao's float8 training, with its gathers in float8: unchanged, and one gather for a unit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard.engine.units.unit import unit_of

WIDTH, STEPS = 32, 3


def build():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))  # noqa: E731
    model = nn.Sequential(block(), block())
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


def train(model, fully_shard, rank, world, precomputes):
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    mesh = init_device_mesh("cpu", (world,))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    if fully_shard is fsdp.fully_shard:
        for unit in (*model, model):
            unit.set_force_sum_reduction_for_comms(True)  # Gloo adds, it takes no mean
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(STEPS, 4 * world, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in data:
        loss = (model(batch.chunk(world)[rank]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses, [parameter.full_tensor() for parameter in model.parameters()]


def _as_on_fsdp2(rank, world, precomputes):
    ours = build()
    found = train(ours, flatshard.fully_shard, rank, world, precomputes)
    wanted = train(build(), fsdp.fully_shard, rank, world, precomputes)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for one, other in zip(found[1], wanted[1]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    gathers = [each.numbytes for each in unit_of(ours).root.gather_lane.history if each.kind == "all_gather"]
    passes = 2 * STEPS  # a forward and a backward each
    matrices, bias = 2 * 2 * WIDTH * WIDTH, 4 * 2 * WIDTH  # a byte per element; float32
    assert gathers == [matrices + bias] * len(ours) * passes


@pytest.mark.parametrize("precomputes", [True, pytest.param(False, marks=pytest.mark.full)])
def test_float8_training_is_that_of_fsdp2(ranks, precomputes):
    pytest.importorskip("torchao")
    ranks(2, _as_on_fsdp2, precomputes)


def _one_amax(rank, world):
    """The largest values of all weights are found by one collective, whatever the number of weights."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    model, mesh = build(), init_device_mesh("cpu", (world,))
    for unit in (*model, model):
        flatshard.fully_shard(unit, mesh=mesh)
    with torch.distributed.tensor.debug.CommDebugMode() as seen:
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert seen.get_total_counts() == 1
    weight = model[0][0].weight
    most = weight.to_local()._tensor.abs().max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    scale = weight._local_tensor._precomputed_scale
    torch.testing.assert_close(scale, torch.finfo(torch.float8_e4m3fn).max / most)


def test_the_largest_values_take_one_collective(ranks):
    pytest.importorskip("torchao")
    ranks(2, _one_amax)
