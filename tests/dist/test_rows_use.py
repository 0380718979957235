"""Embeddings by rows, used in ways that a training loop seldom does: what held for the table holds."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.utils import parametrize

from flatshard import MixedPrecisionPolicy, fully_shard, shard_model
from flatshard.buffer import DONE
from flatshard.engine.units.unit import unit_of
from tests.dist.test_engine import full
from tests.dist.test_rows import VOCAB, _model, _shard


def _train_on(rank, world, model, plain, loss):
    """A backward of this rank's ``loss`` of the sharded model, and those of all ranks of the plain one."""
    for each in range(world):
        (loss(plain, each) / world).backward()
    loss(model, rank).backward()
    torch.testing.assert_close(full(model.embed.weight.grad), plain.embed.weight.grad)


def _any_shape(rank, world):
    for shape in ((), (3,), (2, 1, 3), (0,)):
        model, plain = _shard(_model()), _model()
        texts = torch.randint(VOCAB, (world, *shape), generator=torch.Generator().manual_seed(1)).int()
        _train_on(rank, world, model, plain, lambda m, r, texts=texts: m.embed(texts[r]).square().sum())


def _changed_in_place(rank, world):
    model, plain = _shard(_model()), _model()
    texts = torch.tensor([[[1, 2], [2, 3]], [[4, 2], [0, 4]]])
    _train_on(rank, world, model, plain, lambda m, r: m.embed(texts[r]).mul_(2).square().sum())


def _forward_itself(rank, world):
    model = _shard(_model())
    assert type(type(model.embed)(2, 3)) is nn.Embedding  # which is no unit
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"forward of '.*mbed.*' was called directly.*call the module"):
            model.embed.forward(torch.tensor([1]))
        model(torch.tensor([[1]])).backward()


def _large_in_float16(rank, world):
    """Two axes: what the first one adds is rounded to float16 for the second, and must not become infinite there."""
    mesh, policy = init_device_mesh("cpu", (1, 2)), MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = _shard(_model(), mesh=mesh, mp_policy=policy)
    (model.embed(torch.tensor([1])).sum() * 60_000).backward()
    assert full(model.embed.weight.grad)[1].eq(60_000).all()


def _in_float64(rank, world):
    model, plain = _shard(_model().double()), _model().double()
    plain.embed(torch.tensor([1])).pow(3).sum().backward()
    model.embed(torch.tensor([1])).pow(3).sum().backward()
    torch.testing.assert_close(full(model.embed.weight.grad), plain.embed.weight.grad, rtol=1e-14, atol=0)


def _read_by_the_lane(rank, world):
    """What a reduce reads on a stream of its own lives until that is over, although the graph is gone."""
    model, held, seats = _shard(_model()), [], []
    group = unit_of(model.embed).groups[0]
    reduce = group.gradients.reduce

    def watched(*given):
        seats.extend((look_up.seats, look_up.served_rows) for _, look_up in group.gradients.arrived_rows)
        made = reduce(*given)
        held.extend(made.held)
        return made

    group.gradients.reduce = watched
    model(torch.tensor([[1, 2]])).backward()
    assert seats
    assert all(any(each is other for other in held) for each in seats[0])


def _after_the_optimizer(rank, world):
    """An optimizer on another stream: what a look-up reads of main is ordered after the event that it is given."""
    model, event = _shard(_model()), torch.Event("cpu")
    model(torch.tensor([[1]])).backward()
    lane = unit_of(model).root.gathers.rows_lane
    with mock.patch.object(type(lane), "ticket", autospec=True, return_value=DONE) as ticket:
        model.set_post_optim_event(event)
        model(torch.tensor([[1]]))
    assert mock.call(lane, event) in ticket.mock_calls


def _unused(rank, world):
    """A rank whose loss leaves a look-up out takes part with zeros, where it is told that this may be."""
    model, plain = _shard(_model(padding_idx=5)), _model(padding_idx=5)
    model.set_reduce_scatter_unused_params(True)

    def loss(model, rank, step):
        found = [model.embed(torch.tensor([rank, 4, 5, 4])), model.embed(torch.tensor([step, 7 + rank]))]
        used = found if step == 2 else found[rank:] if step else found[2 * rank :]
        return sum(each.square().sum() for each in used) + model.head.weight.sum()

    for step in range(4):
        model.set_requires_gradient_sync(step != 1)
        for each in range(world):
            (loss(plain, each, step) / world).backward()
        model.forward = lambda step=step: loss(model, rank, step)
        model().backward()
    torch.testing.assert_close(full(model.embed.weight.grad), plain.embed.weight.grad)


def _differently_used(rank, world):
    """Without that, ranks are told that they differ, before they exchange what does not fit."""
    model = _shard(_model())
    first, second = model.embed(torch.tensor([1])), model.embed(torch.tensor([2]))
    with pytest.raises(RuntimeError, match=r"ranks differ.*to reduce [12] look-ups of unit"):
        (first + second * rank if rank else first).sum().backward()


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class OfItsOwn(nn.Embedding):
    def forward(self, input):
        return functional.embedding(input, self.weight)


def _not_the_weight(rank, world):
    """A table that is not what look-ups are to read, and one that is read past them."""
    computed = parametrize.register_parametrization(nn.Embedding(4, 4), "weight", Doubled())
    with pytest.raises(ValueError, match="is not its own parameter"):
        fully_shard(computed, rows=True)
    model = _shard(_model(kind=OfItsOwn))
    with pytest.raises(RuntimeError, match=r"rows=True: only the forward of its nn\.Embedding can read it"):
        model(torch.tensor([[1, 2]]))


def _prefetched(rank, world):
    """What is said to be gathered ahead is not gathered, where nothing would read it."""
    model = _shard(_model())
    model.set_modules_to_forward_prefetch([model.embed, model.mix])
    model.mix.set_modules_to_backward_prefetch([model.embed])
    model(torch.tensor([[1]])).backward()
    gathers = [operation.name for operation in unit_of(model).root.gather_lane.history]
    assert "mix" in gathers
    assert "embed" not in gathers


def _tied(rank, world):
    """`shard_model` looks up by rows what is tied to nothing."""
    model = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Embedding(5, 4), nn.Linear(4, VOCAB))
    model[2].weight = model[0].weight
    shard_model(model, rows=True, units=[nn.Embedding])
    assert [unit_of(each).rows is not None for each in model[:2]] == [False, True]


def _even_and_beyond(rank, world):
    """As captured steps look up."""
    fully_shard(embed := nn.Embedding(VOCAB, 4), rows=True)
    with mock.patch("flatshard.engine.rows.capturing", return_value=True):
        for token in (-1, VOCAB):
            with pytest.raises(IndexError, match=f"token id {token} is out of range for embedding .* of {VOCAB} rows"):
                embed(torch.tensor([token, 3]))


def _held(rank, world):
    """What cannot be done to a table is done to none of the other units either."""
    model = _shard(_model())
    model(torch.tensor([[1]])).backward()
    with pytest.raises(NotImplementedError, match="is sharded with rows=True"):
        model.hold_weights()
    assert not any(group.is_held for unit in unit_of(model).root.units for group in unit.groups)


def _perturbed(rank, world):
    """Something of the user's is added to the rows: autograd gives it the same gradient, and adds to that."""
    model, plain = _shard(_model()), _model()
    added = {each: [torch.zeros(3, 6, requires_grad=True) for _ in range(world)] for each in (model, plain)}

    def loss(model, rank, step):
        before = added[model][rank].view(3, 6)  # whose backward comes after that of the look-up
        return (before + model.embed(torch.tensor([rank, step, 7]))).pow(3).sum()

    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for each in range(world):
            (loss(plain, each, step) / world).backward()
        loss(model, rank, step).backward()
    torch.testing.assert_close(full(model.embed.weight.grad), plain.embed.weight.grad)


USES = [_any_shape, _forward_itself, _large_in_float16, _in_float64, _read_by_the_lane, _after_the_optimizer]
USES += [
    _changed_in_place,
    _unused,
    _differently_used,
    _not_the_weight,
    _prefetched,
    _tied,
    _even_and_beyond,
    _held,
    _perturbed,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__[1:])
def test_used_otherwise(ranks, use):
    ranks(2, use)
