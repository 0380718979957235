"""What docs/from-fsdp2.md says of flatshard and PyTorch's fully_shard, where no other test shows it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from flatshard import fully_shard


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _evaluated(rank, world):
    found = []
    for shard in (fully_shard, torch_fully_shard):
        model = chain()
        shard(model[0])
        shard(model)
        with torch.no_grad():
            model(torch.ones(2, 4))
        found.append(all(isinstance(parameter, DTensor) for parameter in model.parameters()))
    return found


def test_after_an_evaluation_all_parameters_are_sharded(ranks):
    assert ranks(2, _evaluated) == [[True, False]] * 2


def _ignored(rank, world):
    model, reference = chain(), chain()
    kept = model[2].weight
    fully_shard(model, ignored_params={kept})
    assert model[2].weight is kept
    assert not isinstance(kept, DTensor)
    data = torch.arange(8.0 * world).reshape(2 * world, 4) / 8
    model(data.chunk(world)[rank]).sum().backward()
    (reference(data).sum() / world).backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), reference[0].weight.grad)
    mine = chain()
    mine(data.chunk(world)[rank]).sum().backward()
    torch.testing.assert_close(kept.grad, mine[2].weight.grad)  # this rank's own


def test_ignored_parameters_are_left_alone(ranks):
    ranks(2, _ignored)
