"""Embeddings by rows: equal to one process that has the whole table, with fewer bytes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flatshard import (
    MixedPrecisionPolicy,
    fully_shard,
    gathered,
    microbatch,
    shard_model,
    summary,
)
from flatshard.engine.units.unit import unit_of
from tests.dist.test_engine import full

VOCAB, WIDTH = 23, 6


class Scaled(nn.Embedding):
    """As some models have it: an embedding with a forward of its own."""

    def forward(self, input):
        return super().forward(input) * 3


class Reader(nn.Module):
    def __init__(self, kind=nn.Embedding, recompute=None, **choices):
        super().__init__()
        self.embed = kind(VOCAB, WIDTH, **choices)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.recompute = recompute

    def forward(self, *texts):
        def read(text):
            return self.mix(self.embed(text)).tanh()

        if self.recompute is not None:
            return sum(self.head(checkpoint(read, t, use_reentrant=self.recompute)).square().mean() for t in texts)
        return sum(self.head(read(text)).square().mean() for text in texts)


def _model(**choices):
    torch.manual_seed(0)
    return Reader(**choices)


def _shard(model, by_rows=True, **choices):
    for part, rows_too in ((model.embed, by_rows), (model.mix, False), (model, False)):
        fully_shard(part, rows=rows_too, **choices)
    return model


def _texts(step, world, texts=1):
    """Of each rank, some: tokens that repeat, within a rank and between ranks."""
    generator = torch.Generator().manual_seed(step)
    return [[torch.randint(VOCAB, (2, 4), generator=generator) for _ in range(texts)] for _ in range(world)]


# sizes of the mesh, and what else
CASES = [
    ((1,), {}),
    ((2,), {}),
    ((3,), {"layout": "flat", "micro": 2}),
    ((4,), {"micro": 3, "sync": False}),
    ((2, 2), {"micro": 2, "texts": 2}),
    ((2,), {"model": {"padding_idx": 5}, "texts": 2}),
    ((2,), {"model": {"kind": Scaled}, "micro": 2}),
    ((2,), {"model": {"recompute": False}}),
    ((2,), {"gradient_scale": "sum"}),
    ((3,), {"even": True, "texts": 2}),
]
DEFAULT = (2, 4, 9)  # cases in every run


def _equals(rank, world, sizes, told):
    told = dict(told)
    made, micro, sync, texts = (told.pop(*pair) for pair in (("model", {}), ("micro", 1), ("sync", True), ("texts", 1)))
    mesh = init_device_mesh("cpu", sizes)
    if told.pop("even", False):  # as captured steps look up
        with mock.patch("flatshard.engine.rows.capturing", return_value=True):
            return _equals(rank, world, sizes, told | {"model": made, "micro": micro, "sync": sync, "texts": texts})
    plain, model = _model(**made), _shard(_model(**made), mesh=mesh, **told)
    factor = world if told.get("gradient_scale") == "sum" else 1
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(3):
        for number in range(micro):
            batch = _texts(micro * step + number, world, texts)
            for other in batch:
                (plain(*other) * factor / world).backward()
            model.set_requires_gradient_sync(sync or number == micro - 1)
            with microbatch(model, is_first=number == 0, is_last=number == micro - 1):
                model(*batch[rank]).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(*batch[0]), plain(*batch[0]))
    torch.testing.assert_close(full(model.embed.weight), plain.embed.weight.detach())


@pytest.mark.parametrize("number", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in range(10)])
def test_training_equals_one_process(ranks, number):
    sizes, told = CASES[number]
    ranks(torch.Size(sizes).numel(), _equals, sizes, told)


def _bytes(rank, world):
    """What travels: tokens and rows, not the table. Ranks may read texts of different lengths."""
    torch.manual_seed(0)
    table = 4096
    model = nn.Sequential(nn.Embedding(table, WIDTH), nn.Linear(WIDTH, 2))
    plain = copy.deepcopy(model)
    fully_shard(model[0], rows=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model)
    texts = [torch.randint(table, (5 + each,)) for each in range(world)]
    model(texts[rank]).sum().backward()
    for text in texts:
        (plain(text).sum() / world).backward()
    torch.testing.assert_close(full(model[0].weight.grad), plain[0].weight.grad)
    root = unit_of(model).root
    sent = [
        operation.numbytes
        for lane in (root.gathers.rows_lane, root.reduce_lane)
        for operation in lane.history
        if operation.name == "0"
    ]
    most = max(map(len, texts)) * world
    assert sent
    assert sum(sent) < 2 * world * 8 + most * (8 + 2 * WIDTH * 4) < table * WIDTH * 4 / 10
    assert "by rows" in str(summary(model))
    # By hand the table is gathered as any other, and forwards look up what main has.
    with gathered(model):
        assert model[0].weight.shape == (table, WIDTH)
        torch.testing.assert_close(model[0].weight.detach(), plain[0].weight.detach())


def test_rows_travel_and_the_table_does_not(ranks):
    ranks(3, _bytes)


def _whole(rank, world):
    torch.manual_seed(0)
    tied = Reader()
    tied.head.weight = tied.embed.weight
    fully_shard(tied.embed, rows=True)
    for refused in (
        lambda: fully_shard(tied),
        lambda: shard_model(Reader(sparse=True), rows=True, units=[nn.Embedding]),
    ):
        with pytest.raises(ValueError, match=r"is tied|sparse"):
            refused()
    for wrong, words in (
        (lambda: fully_shard(nn.Linear(2, 2), rows=True), "needs one nn.Embedding"),
        (lambda: fully_shard(nn.Embedding(4, 4, max_norm=1.0), rows=True), "max_norm"),
        (lambda: fully_shard(nn.Embedding(4, 4), rows=True, strategy="optim"), "shards over the last axis"),
        (lambda: fully_shard(nn.Embedding(4, 4), rows=True, optional=True), "cannot be used with optional=True"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    model = _shard(_model())
    with pytest.raises(IndexError, match=f"token id {VOCAB} is out of range for embedding 'embed' of {VOCAB} rows"):
        model(torch.tensor([[0, VOCAB]]))
    with pytest.raises(TypeError, match="int32 or int64"):
        model.embed(torch.rand(2))
    model(torch.tensor([[0, 1]])).backward()
    with pytest.raises(RuntimeError, match="has a gradient from a tied layer"), gathered(model):
        (model(torch.tensor([[0, 1]])) + model.embed.weight.sum()).backward()


def test_what_cannot_be_by_rows_is_refused_in_words(ranks):
    ranks(2, _whole)
