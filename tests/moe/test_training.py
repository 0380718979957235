"""Mixtures of experts train over several meshes as in one process: losses, norms, gradients, weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import flatshard
from flatshard import Experts, Sharding, fully_shard, fully_shard_optimizer, shard_model
from tests.moe.cases import (
    DIM,
    EXPERTS,
    Listed,
    Model,
    Routing,
    Stacked,
    build,
    listed_as_stacked,
    meshes,
    spread,
)

pytestmark = [pytest.mark.sampled(2), pytest.mark.xdist_group("interpreters"), pytest.mark.limit(60)]

# What ranks do from step to step: all experts, those of one rank of `ep` only, capacity, one that nobody ever uses.
ROUTES = [
    Routing(closed=(7,)),
    Routing(closed=(4, 5, 6, 7)),
    Routing(closed=(7,), capacity=2),
    Routing(closed=(0, 1, 2, 7)),
]


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def shard(model: Model, how: str, held: str, dense, sparse):
    """By one call for the model, by units with our own words, or with FSDP2's factor; or, as a control, by FSDP2."""
    edp, ep = sparse["edp"], sparse["ep"]
    apart = None if held == "dtensor" else ep
    if how == "model":
        kind = Listed if held == "modules" else Stacked
        shard_model(model, mesh=dense, experts=Experts([kind], edp, apart))
        return model
    by = torch_fully_shard if how == "control" else fully_shard
    for block in model.blocks:
        experts = block.mixture.experts
        if how == "units":
            sharding = Sharding(1 if held == "dtensor" else 0, apart=apart)
            by(experts, mesh=edp, data_mesh=dense, shard_placement_fn=lambda p, found=sharding: found)
        else:
            by(experts, mesh=edp)
            experts.set_gradient_divide_factor(dense.size())
            experts.set_force_sum_reduction_for_comms(True)  # FSDP2's factor needs it on Gloo
        experts.set_reduce_scatter_unused_params(True)
        by(block, mesh=dense)
    return by(model, mesh=dense)


def whole(tensors: dict[str, torch.Tensor], reference: Model) -> dict[str, torch.Tensor]:
    """By the names of the reference. Collective."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    names = dict(reference.named_parameters())
    return {name: full[name] if name in full else listed_as_stacked(name, full) for name in names}


def _train(rank, world, ep, held, how, wrap):
    dense, sparse = meshes(world, ep)
    reference, model = build(), shard(spread(build(), sparse["ep"], held), how, held, dense, sparse)
    flatshard.check_buffers(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1) for m in (model, reference)]
    if wrap:
        fully_shard_optimizer(optimizers[0])
    for step, routing in enumerate(ROUTES):
        model.route(routing)
        reference.route(routing)
        loss = model(tokens(rank, step))
        loss.backward()
        wanted = torch.stack([reference(tokens(other, step)) for other in range(world)]).mean()
        wanted.backward()
        for parameter in reference.parameters():  # of an expert that no rank has used
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mean = loss.detach() / world
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, wanted.detach())
        grads = whole({n: p.grad for n, p in model.named_parameters()}, reference)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, msg=lambda m, n=f"step {step}, {name}": f"{n}: {m}")
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        assert norm > 0.3
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.3), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = whole(dict(model.named_parameters()), reference)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights[name], parameter.data, rtol=1e-4, atol=1e-5)
    assert grads["blocks.0.mixture.experts.up"].shape[0] == EXPERTS
    assert not grads["blocks.0.mixture.experts.up"][7].any()


@pytest.mark.parametrize(
    ("ep", "held", "how", "wrap"),
    [
        (2, "dtensor", "model", True),
        (2, "plain", "model", False),
        pytest.param(2, "modules", "model", True, marks=pytest.mark.full),
        (4, "plain", "units", False),
        pytest.param(2, "dtensor", "units", True, marks=pytest.mark.full),
        (2, "dtensor", "factor", False),
        pytest.param(2, "dtensor", "control", False, marks=pytest.mark.full),
        *(
            pytest.param(ep, held, how, True, marks=pytest.mark.full)
            for ep in (1, 4)
            for held in ("dtensor", "plain", "modules")
            for how in ("model", "units")
        ),
    ],
)
def test_experts_over_meshes_equal_one_process(interpreters, ep, held, how, wrap):
    interpreters(4, _train, ep, held, how, wrap)
