"""The local step and clipping under every strategy and layout: equal to one process, also for persistent weights."""

import itertools

import pytest
import torch
from torch import nn

from flatshard import clip_grad_norm_, find_nonfinite, fully_shard_optimizer, weight_norms
from flatshard.engine.groups.registry import group_of
from tests.dist.models import batches, loss_of, make_net
from tests.dist.test_engine import full, shard_net
from tests.dist.test_strategies import STRATEGIES, mesh_of

pytestmark = pytest.mark.sampled(2)

ROWS = 12


def steps(model, optimizer, rank=0, world=1):
    norms = []
    for tokens in batches(3, ROWS):
        loss_of(model, tokens.chunk(world)[rank]).backward()
        clip = clip_grad_norm_ if world > 1 else nn.utils.clip_grad_norm_
        norms.append(clip(model.parameters(), 0.2).item())
        optimizer.step()
        model.zero_grad()
    return norms


def _strategies(rank, world, cases):
    reference = make_net(depth=1)
    wanted = steps(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    for (axes, strategy, outer), layout in cases:
        model = make_net(depth=1)
        shard_net(model, mesh=mesh_of(axes, world), strategy=strategy, outer_strategy=outer, layout=layout)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert steps(model, optimizer, rank, world) == pytest.approx(wanted, rel=1e-3)
        for (name, p), plain in zip(model.named_parameters(), reference.parameters()):
            note = f"{name} under {strategy}, {outer}, {layout}"
            torch.testing.assert_close(full(p), plain.data, rtol=2e-3, atol=2e-4, msg=note)
            state = optimizer.state[p]
            assert type(state["exp_avg"]) is type(p)
            assert state["exp_avg"].shape == p.shape
        norms = weight_norms(model)
        assert norms == pytest.approx({n: p.norm().item() for n, p in reference.named_parameters()}, rel=1e-2)
        assert find_nonfinite(model) == []


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize("axes", [1, 2])
def test_every_strategy_equals_one_process(ranks, axes, layout):
    cases = list(itertools.product([case for case in STRATEGIES if case[0] == axes], [layout]))
    ranks(4 if axes == 2 else 2, _strategies, cases)


def _refresh(rank, world):
    """PITFALL 19: the optimizer of a rank that holds nothing, or of some parameters only, leaves no rank waiting."""
    model = shard_net(make_net(depth=1), mesh=mesh_of(1, world), strategy="optim")
    # Not the ones without dims: those are replicated, so all ranks must step them.
    held = [p for p in model.blocks.parameters() if p.dim()] if rank == 0 else [model.head.weight]
    optimizer = fully_shard_optimizer(torch.optim.SGD(held, lr=0.1))
    before = {n: full(p).clone() for n, p in model.named_parameters()}
    steps(model, optimizer, rank, world)
    with torch.no_grad():
        loss = loss_of(model, next(batches(1, ROWS)))
    changed = {n for n, p in model.named_parameters() if not torch.equal(full(p), before[n])}
    assert "embed.weight" not in changed
    assert group_of(model.head.weight) is not None
    return loss.item()


def test_compute_weights_are_refreshed_whatever_an_optimizer_holds(ranks):
    losses = ranks(2, _refresh)
    assert losses[0] == losses[1]  # the same compute weights everywhere
