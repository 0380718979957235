"""Parameters put into sharded modules: an optimizer that is given them afterwards trains them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatshard import fully_shard_optimizer
from tests.order.cases import backward_of_all, compare, grads_of, make, optimizer_of, rows, shard, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]
PLACES = ("blocks.1.up", "output")  # a part of a unit, and of the root; neither is a unit itself


def changed(parameter):
    """Other values, cut as the parameter is."""
    return 0.5 * parameter.detach() + 0.1


def by_setattr(module):
    module.weight = nn.Parameter(changed(module.weight))


def by_register(module):
    module.register_parameter("weight", nn.Parameter(changed(module.weight)))


def by_dictionary(module):
    module._parameters["weight"] = nn.Parameter(changed(module.weight))


def by_assigned_state(module):
    module.load_state_dict({name: changed(p) for name, p in module.named_parameters()}, assign=True)


def by_all_at_once(module):
    for name, _ in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(changed(getattr(module, name))))


WAYS = [by_setattr, by_register, by_dictionary, by_assigned_state, by_all_at_once]


def train(model, reference, rank, world, wrap):
    given = list(model.parameters())
    optimizers = [optimizer_of(given), optimizer_of(reference.parameters())]
    if wrap:
        fully_shard_optimizer(optimizers[0])
    before = weights_of(model)
    for step in range(3):
        model(rows(rank, step)).square().mean().backward()
        backward_of_all([reference(rows(r, step)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference), f"step {step}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = weights_of(model)
    compare(after, weights_of(reference), "weights")
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still, f"these did not move: {still}"
    other = [name for (name, ours), theirs in zip(model.named_parameters(), given) if ours is not theirs]
    assert not other, f"other objects than the optimizer has: {other}"


def _assign(rank, world, way, later, wrap, choices):
    model, reference = shard(make(), **choices), make()
    if later:
        train(model, reference, rank, world, wrap)
    for each in (model, reference):
        for place in PLACES:
            way(each.get_submodule(place))
    train(model, reference, rank, world, wrap)


@pytest.mark.parametrize("later", [False, True], ids=["at-first", "after-steps"])
@pytest.mark.parametrize("way", WAYS)
def test_assigned_parameters_are_trained(interpreters, way, later):
    interpreters(2, _assign, way, later, later, {})


@pytest.mark.parametrize("choices", [{"strategy": 1}, {"layout": "flat"}], ids=str)
def test_so_they_are_under_other_choices(interpreters, choices):
    interpreters(2, _assign, by_setattr, False, True, choices)


def _evaluated_between(rank, world):
    """The forward that sees them first comes after the optimizer has taken them, and is an evaluation."""
    model, reference = shard(make()), make()
    for each in (model, reference):
        for place in PLACES:
            by_setattr(each.get_submodule(place))
    given = list(model.parameters())
    optimizer = optimizer_of(given)
    with torch.no_grad():
        torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
    model(rows(rank)).sum().backward()
    without = [name for (name, _), p in zip(model.named_parameters(), given) if p.grad is None]
    assert not without, f"what the optimizer has of these has no gradient: {without}"
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_on_the_parameters_that_the_optimizer_has(interpreters):
    interpreters(2, _evaluated_between)
