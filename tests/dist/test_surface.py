"""What a unit is to those who ask: its class, and PyTorch's own methods."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from flatshard import FSDPModule, fully_shard, microbatch
from flatshard.engine.units.unit import unit_of
from tests.dist.models import loss_of, make_net
from tests.dist.test_engine import full, shard_net


def _class(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    same = fully_shard(model)
    assert same is model
    assert type(model).__name__ == "FSDPSequential"
    assert isinstance(model, (nn.Sequential,))
    assert isinstance(model, FSDPModule)
    assert isinstance(model, TorchFSDPModule)
    part = model[:2]  # a container makes a new one of its class, which is no unit
    assert type(part) is nn.Sequential
    public = [name for name in vars(TorchFSDPModule) if not name.startswith("_")]
    refused = []
    for name in public:
        assert name in vars(FSDPModule), name
        if vars(FSDPModule)[name].__doc__.startswith("Not supported; raises"):
            refused.append(name)
            with pytest.raises(NotImplementedError, match=name):
                getattr(model, name)()
    return sorted(refused)


def test_a_unit_is_a_subclass_of_its_own_class_and_of_pytorchs_fsdp_module(ranks):
    for refused in ranks(2, _class):
        assert "unshard" not in refused
        assert "set_requires_gradient_sync" not in refused


def _late(rank, world):
    """A part that is added and sharded after the root's first forward is told what the root is told."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    model.append(fully_shard(nn.Linear(4, 4)))
    late = unit_of(model[2])
    model.set_requires_gradient_sync(False)
    assert not late.intent.reduces
    model.set_requires_gradient_sync(True)
    with microbatch(model, is_last=False):
        assert not late.is_last
        model(torch.ones(2, 4)).sum().backward()
    assert late.is_last
    assert model[2].weight.grad is not None


def test_a_unit_that_comes_late_is_told_what_its_root_is_told(ranks):
    ranks(2, _late)


def _unshard(rank, world, strategy):
    model = shard_net(make_net(), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    loss_of(model, torch.zeros(2, 5, dtype=torch.long)).backward()
    optimizer.step()
    block = model.blocks[0]
    wanted = {name: full(parameter) for name, parameter in block.named_parameters()}
    handle = block.unshard(async_op=True)
    handle.wait()
    for name, parameter in block.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, wanted[name])  # what the optimizer wrote, not what was gathered before
    block.reshard()
    assert all(hasattr(parameter, "device_mesh") for parameter in block.parameters())


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_unshard_shows_current_weights(ranks, strategy):
    assert ranks(2, _unshard, strategy) == [None] * 2
