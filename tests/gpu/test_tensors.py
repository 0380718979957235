"""On a GPU: weights in host memory, weights cut on another dim than 0, and weights that gather themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from flatshard import CPUOffloadPolicy, clip_grad_norm_, fully_shard, fully_shard_optimizer
from tests.dist.models import make_net, train
from tests.dist.test_engine import ROWS, STEPS, shard_net
from tests.fsdp2.test_extensions import Coded, build


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _offloaded(rank, world, pin):
    plain, host = shard_net(make_net()), shard_net(make_net(), offload_policy=CPUOffloadPolicy(pin_memory=pin))
    for parameter in host.parameters():
        assert parameter.device.type == "cpu"
        assert parameter.to_local().is_pinned() == pin or not parameter.to_local().numel()
    seen: dict[nn.Parameter, torch.Tensor] = {}
    for parameter in host.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad.to_local().clone()}))
    optimizers = [sgd(model) for model in (plain, host)]
    losses = [
        train(model, optimizer, STEPS, ROWS, rank, world, micro=2, device="cuda")
        for model, optimizer in zip((plain, host), optimizers)
    ]
    assert len(seen) == len(list(host.parameters()))
    for parameter in host.parameters():
        assert optimizers[1].state[parameter]["momentum_buffer"].device.type == "cpu"
    for model in (plain, host):
        model.zero_grad()
        model(torch.zeros(2, 3, dtype=torch.int64, device="cuda")).float().sum().backward()
    assert all(torch.equal(seen[p], p.grad.to_local()) for p in seen if p.grad is not None)
    norms = [clip_grad_norm_(model, 1.0).item() for model in (plain, host)]
    return losses, norms


@pytest.mark.parametrize("pin", [True, False])
def test_weights_in_host_memory_train_alike(gpu_ranks, pin):
    for (plain, host), norms in gpu_ranks(2, _offloaded, pin):
        assert host == pytest.approx(plain, rel=1e-4)
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def last_dim(parameter):
    return Shard(parameter.dim() - 1)


def _turned(rank, world):
    models = [shard_net(make_net()), shard_net(make_net(), shard_placement_fn=last_dim)]
    return [train(model, sgd(model), STEPS, ROWS, rank, world, device="cuda") for model in models]


def test_weights_cut_on_the_last_dim_train_alike(gpu_ranks):
    for plain, turned in gpu_ranks(2, _turned):
        assert turned == pytest.approx(plain, rel=1e-4)


def _coded(rank, world):
    models = [build().cuda(), build(Coded).cuda()]
    for model in models:
        for layer in (model[0], model[2]):
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model)
    x = torch.randn(5, 6, device="cuda")
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model(x).detach().cpu() for model in models]


def test_weights_that_gather_themselves(gpu_ranks):
    for plain, coded in gpu_ranks(2, _coded):
        torch.testing.assert_close(coded, plain, rtol=0.05, atol=0.05)
