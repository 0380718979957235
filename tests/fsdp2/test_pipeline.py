"""Stages of torch's pipelining that are sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor

from flatshard import fully_shard
from flatshard.engine.unit import unit_of

DIM, MICRO = 6, 4


def _block():
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM))


def _model(blocks):
    torch.manual_seed(8)
    return nn.Sequential(*(_block() for _ in range(blocks)))


def _loss(output, target):
    return (output - target).square().mean()


def _pipeline(rank, world, kind):
    per_rank = 2 if kind is ScheduleInterleavedZeroBubble else 1
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    stages, blocks = [], 2 * 2 * per_rank
    for number in range(per_rank):
        index = pp.get_local_rank() + 2 * number
        part = _model(blocks)[2 * index : 2 * index + 2]
        for block in part:
            fully_shard(block, mesh=dp, reshard_after_forward=False)
        fully_shard(part, mesh=dp, reshard_after_forward=False)
        device = torch.device("cpu")
        stages.append(PipelineStage(part, index, 2 * per_rank, device, group=pp.get_group()))
    schedule = kind(stages if per_rank > 1 else stages[0], MICRO, loss_fn=_loss)
    reference = _model(blocks)
    for step in range(2):
        rng = torch.Generator().manual_seed(step)
        x, y = (torch.randn(world // 2 * MICRO, DIM, generator=rng) for _ in range(2))
        mine, theirs = (t.chunk(world // 2)[dp.get_local_rank()] for t in (x, y))
        inputs = (mine,) if pp.get_local_rank() == 0 else ()
        last = pp.get_local_rank() == 1
        schedule.step(*inputs, **({"target": theirs} if last else {}))
        _loss(reference(x), y).backward()
        for stage in stages:
            names = dict(reference[2 * stage.stage_index : 2 * stage.stage_index + 2].named_parameters())
            for name, parameter in stage.submod.named_parameters():
                assert isinstance(parameter, DTensor)
                wanted = names[name].grad
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted, msg=lambda m, n=name: f"{n}: {m}")
            stage.submod.zero_grad()
            assert not unit_of(stage.submod).scope._reducing
        reference.zero_grad()


@pytest.mark.limit(120)  # the first imports torch's pipelining in every rank
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_a_pipeline_of_sharded_stages_equals_one_process(ranks, kind):
    ranks(4, _pipeline, kind)
