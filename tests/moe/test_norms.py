"""Norms and clipping of models whose parameters live on several meshes."""

from __future__ import annotations

import math

import pytest
import torch

import flatshard
from flatshard import Experts, shard_model
from tests.dist.test_clip import collectives
from tests.moe.cases import Listed, Stacked, build, meshes, spread
from tests.moe.test_training import tokens, whole

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(60)]


def trained(rank, world, ep, held):
    """A model with gradients, and the same in one process."""
    dense, sparse = meshes(world, ep)
    reference, model = build(), spread(build(), sparse["ep"], held)
    kind, apart = Listed if held == "modules" else Stacked, None if held == "dtensor" else sparse["ep"]
    shard_model(model, mesh=dense, experts=Experts([kind], sparse["edp"], apart))
    model(tokens(rank, 0)).backward()
    torch.stack([reference(tokens(other, 0)) for other in range(world)]).mean().backward()
    return model, reference


def _norms(rank, world, ep, held):
    model, reference = trained(rank, world, ep, held)
    grads = {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
    for order in (2.0, 3.0, math.inf):
        wanted = torch.nn.utils.get_total_norm(grads.values(), order)
        count, stop = collectives()
        found = flatshard.clip_grad_norm_(model, 1e9, order)
        stop()
        torch.testing.assert_close(found, wanted)
        assert [kind for kind, _ in count] == ["all_reduce"] * 2  # one per mesh
    if held != "modules":
        for order in (2.0, math.inf):
            found, weights = flatshard.grad_norms(model, order), flatshard.weight_norms(model, order)
            assert found == pytest.approx({name: grad.norm(order).item() for name, grad in grads.items()}, rel=1e-5)
            assert weights == pytest.approx(
                {name: p.detach().norm(order).item() for name, p in reference.named_parameters()}, rel=1e-5
            )
    flatshard.clip_grad_norm_(model, 0.1)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    clipped = whole({name: parameter.grad for name, parameter in model.named_parameters()}, reference)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(clipped[name], parameter.grad)


@pytest.mark.parametrize(
    ("ep", "held"), [(2, "dtensor"), (4, "plain"), pytest.param(4, "modules", marks=pytest.mark.full)]
)
def test_one_norm_over_several_meshes_by_one_collective_each(interpreters, ep, held):
    interpreters(4, _norms, ep, held)


def _nonfinite(rank, world):
    model, _ = trained(rank, world, 2, "plain")
    name = "blocks.1.mixture.experts.down"
    local = model.get_parameter(name).grad.to_local()
    if rank == 3:
        local[0, 0] = math.nan
    assert flatshard.find_nonfinite(model) == [(name, 3)]
    assert math.isnan(flatshard.clip_grad_norm_(model, 1.0))
    assert math.isnan(flatshard.grad_norms(model)[name])


def test_an_expert_with_a_gradient_that_is_not_finite_is_named(interpreters):
    interpreters(4, _nonfinite)
