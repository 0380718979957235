"""A whole model in one call."""

import logging

import pytest
import torch
from torch import nn

import flatshard
from flatshard import shard_model
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from tests.dist.models import Block, loss_of, make_net, train
from tests.dist.test_engine import ROWS, STEPS, full


def _auto(rank, world):
    model = make_net()
    table = shard_model(model)
    names = [name for name, _ in units_below(model)]
    assert names == ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert {row.unit for row in table.rows} == {name or "(root)" for name in names}
    reference = make_net()
    wanted = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, fused=True), STEPS, ROWS, 0, 1)
    losses = torch.tensor(
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), STEPS, ROWS, rank, world)
    )
    torch.distributed.all_reduce(losses)
    torch.testing.assert_close(losses / world, torch.tensor(wanted), rtol=2e-5, atol=2e-5)


def test_auto_finds_blocks_embedding_and_head(ranks):
    assert ranks(2, _auto) == [None] * 2


class Named(nn.Module):
    """As a Hugging Face model: it names its blocks, its head is tied to its embedding."""

    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(depth=2)
        self.net.head.weight = self.net.embed.weight

    def forward(self, tokens):
        return self.net(tokens)


def _named(rank, world):
    model = Named()
    shard_model(model, reshard_after_forward=True)
    assert [name for name, _ in units_below(model)] == ["", "net.embed", "net.blocks.0", "net.blocks.1"]
    assert unit_of(model.net.head) is unit_of(model.net.embed)
    loss_of(model, torch.zeros(2, 5, dtype=torch.long)).backward()
    assert model.net.head.weight is model.net.embed.weight
    assert model.net.head.weight.grad is not None


def test_auto_takes_the_blocks_a_model_names_and_ties_stay_in_one_unit(ranks):
    assert ranks(2, _named) == [None] * 2


class Wrapped(nn.Module):
    """As a layer of PEFT that reads the weight of the layer it wraps."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    def forward(self, tokens):
        return nn.functional.embedding(tokens, 2 * self.base_layer.weight)


def _wrapped(rank, world):
    model = make_net()
    model.embed = Wrapped(model.embed)
    shard_model(model)
    assert [name for name, _ in units_below(model)] == ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    loss_of(model, torch.zeros(2, 5, dtype=torch.long)).backward()


def test_the_unit_of_a_layer_that_is_wrapped_is_its_wrapper(ranks):
    assert ranks(2, _wrapped) == [None] * 2


def _given(rank, world):
    for units in ([Block], ["tests.dist.models.Block"]):
        model = make_net()
        shard_model(model, units=units, mp_policy=flatshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert [name for name, _ in units_below(model)] == ["", "blocks.0", "blocks.1", "blocks.2"]
    for units, error, text in (
        ("Block", ValueError, "list of classes"),
        (["no.such.Class"], ValueError, "cannot import"),
        ([nn.LSTM], ValueError, "contains no module of LSTM"),
        ([int], TypeError, "not a subclass of nn.Module"),
    ):
        model = make_net()
        with pytest.raises(error, match=text):
            shard_model(model, units=units)
        assert unit_of(model.blocks[0]) is None  # nothing has changed
    sharded = make_net()
    shard_model(sharded)
    with pytest.raises(ValueError, match="already"):
        shard_model(sharded)


def test_units_can_be_given_as_classes_and_import_paths(ranks):
    assert ranks(2, _given) == [None] * 2


def _with_optimizer(rank, world):
    """An optimizer with state from before sharding goes on as if nothing had happened."""
    models = make_net(), make_net()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, 2, ROWS, 0, 1)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("flatshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    shard_model(models[0], optimizer=optimizers[0])
    logger.removeHandler(handler)
    assert "blocks.0" in records[0].getMessage()
    train(models[0], optimizers[0], STEPS, ROWS, rank, world)
    train(models[1], optimizers[1], STEPS, ROWS, 0, 1)
    for sharded, plain in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(full(sharded), plain.data, rtol=2e-4, atol=2e-5)


def test_an_optimizer_built_before_is_pointed_at_the_shards_and_keeps_its_state(ranks):
    assert ranks(2, _with_optimizer) == [None] * 2
