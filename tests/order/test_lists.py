"""A list of modules as one unit, as torchtitan shards norm and output: changes reach its modules one after another."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import flatshard
from flatshard.engine.watch.calls import Call
from tests.order.cases import BOTH, backward_of_all, compare, grads_of, make, optimizer_of, rows, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


def shard(model, by):
    for block in model.blocks:
        by(block)
    by([model.norm, model.output])
    return by(model)


def train(models, reference, rank, world, dtype=torch.float32):
    optimizers = [optimizer_of(each.parameters()) for each in (*models, reference)]
    for step in range(3):
        for model in models:
            model(rows(rank, step).to(dtype)).square().mean().backward()
        backward_of_all([reference(rows(r, step).to(dtype)).square().mean() for r in range(world)])
        for title, model in zip(("ours", "control"), models):
            compare(grads_of(model), grads_of(reference), f"{title}, step {step}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for title, model in zip(("ours", "control"), models):
        compare(weights_of(model), weights_of(reference), f"{title}, weights")


def _meta(rank, world, loaded):
    reference = make()
    models = [shard(make(device="meta"), by) for by in BOTH]
    for model in models:
        model.to_empty(device="cpu")
        if loaded:
            set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
            continue
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                torch.nn.init.constant_(parameter, 0.1 * (number % 5 - 2))
    if not loaded:
        for number, parameter in enumerate(reference.parameters()):
            torch.nn.init.constant_(parameter, 0.1 * (number % 5 - 2))
    train(models, reference, rank, world)
    flatshard.check_buffers(models[0])


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "initialised"])
def test_a_list_on_the_meta_device_trains_after_to_empty(interpreters, loaded):
    interpreters(2, _meta, loaded)


def _cast(rank, world):
    """`double()` goes through all modules too, on weights that have values, between steps."""
    model, reference = shard(make(), BOTH[0]), make()
    train([model], reference, rank, world)
    for each in (model, reference):
        each.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    train([model], reference, rank, world, torch.float64)
    flatshard.check_buffers(model)


def test_a_list_is_cast_with_its_model(interpreters):
    interpreters(2, _cast)


def _part(rank, world):
    """One module of the list alone cannot be changed; it is said, by name, and nothing is broken."""
    model, reference = shard(make(), BOTH[0]), make()
    try:
        model.norm.double()
        with torch.no_grad():
            model(rows(rank))
    except (ValueError, RuntimeError) as error:
        assert "weight" in str(error)  # noqa: PT017  (it may also be taken over)
        model.norm.float()
    else:
        model.norm.float()
    train([model], reference, rank, world)


def test_a_part_of_a_list_that_is_cast_alone_is_named(interpreters):
    interpreters(2, _part)


def _forgotten(rank, world):
    """Of [norm, output] the output's input is made of what the norm returns: the graph must not own itself."""
    model = shard(make(), BOTH[0])
    for with_backward in (True, True, False):
        loss = model(rows(rank)).square().mean()
        if with_backward:
            loss.backward()
        del loss
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, Call)]


def test_a_step_leaves_nothing_of_its_graph(interpreters):
    interpreters(2, _forgotten)
