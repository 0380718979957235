"""Replicated, sharded, tensor- and expert-parallel at once, on eight ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import Experts, fully_shard_optimizer, shard_model
from tests.moe.cases import Routing, Stacked, build, spread
from tests.moe.test_training import ROUTES, tokens


class _Copy(torch.autograd.Function):
    """What enters a part of the features on each rank: its gradients add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """What leaves it adds up."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def parallelized(model, dense, sparse):
    """Experts are cut over `ep`, and each of them, as the other layers, over `tp`."""
    tp = sparse["tp"].get_group()
    parallelize_module(
        model,
        dense["tp"],
        {"inside": ColwiseParallel(output_layouts=Replicate()), "output": RowwiseParallel(input_layouts=Replicate())},
    )
    for block in model.blocks:
        parallelize_module(block.mixture.shared, dense["tp"], ColwiseParallel(output_layouts=Replicate()))
        experts = block.mixture.experts
        for name, dim in (("up", 2), ("down", 1)):
            cut = distribute_tensor(getattr(experts, name).data, sparse["ep", "tp"], [Shard(0), Shard(dim)])
            setattr(experts, name, nn.Parameter(cut))
        block.mixture.group = sparse["ep"].get_group()
        experts.register_forward_pre_hook(lambda module, args: (_Copy.apply(args[0], tp), args[1]))
        experts.register_forward_hook(lambda module, args, output: _Sum.apply(output, tp))
    return model


def _with_tensor_parallelism(rank, world):
    dense = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    sparse = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("edp", "ep", "tp"))
    model = parallelized(build(), dense, sparse)
    shard_model(model, mesh=dense["replicate", "shard"], experts=Experts([Stacked], sparse["edp"]))
    assert model.inside.weight.device_mesh.ndim == model.blocks[0].mixture.experts.up.device_mesh.ndim == 3
    train_beside(model, rank // 2, 4)


def _copies_of_experts(rank, world):
    """Experts and the rest both have copies on two halves of the ranks, which shard them."""
    dense = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    sparse = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "edp", "ep"))
    model = spread(build(), sparse["ep"], "plain")
    shard_model(model, mesh=dense, experts=Experts([Stacked], sparse["replicate", "edp"], sparse["ep"]))
    up = model.blocks[0].mixture.experts.up
    assert up.placements[0] == Replicate()
    assert up.to_local().shape[0] == 2  # of eight
    train_beside(model, rank, 8)


def train_beside(model, place, places):
    """Steps of a model whose data is that of ``place`` among ``places``, and of the whole batch in one process."""
    reference = build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, reference)]
    fully_shard_optimizer(optimizers[0])
    for step, routing in enumerate((Routing(), *ROUTES)):
        model.route(routing)
        reference.route(routing)
        model(tokens(place, step)).backward()
        torch.stack([reference(tokens(other, step)) for other in range(places)]).mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.3), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.limit(240)
@pytest.mark.parametrize("body", [_with_tensor_parallelism, _copies_of_experts])
def test_hsdp_with_tensor_and_expert_parallelism_equals_one_process(ranks, body):
    ranks(8, body)
