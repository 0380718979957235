"""Weights that two units share: one of them keeps the parameter, both gather it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatshard import check_buffers, fully_shard, materialize
from flatshard.engine.units.unit import unit_of
from tests.fsdp2.cases import Launched

VOCAB, DIM = 11, 6


class Language(nn.Module):
    def __init__(self, bias=False, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.head = nn.Linear(DIM, VOCAB, bias=bias)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embed(tokens)
        x = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return checkpoint(self.head, x, use_reentrant=False) if self.recompute else self.head(x)


def _language(**kwargs):
    torch.manual_seed(6)
    return Language(**kwargs)


def _tokens(number):
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(number))


def _loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


ORDERS = {"embedding": ("embed", "body", "head"), "head": ("head", "body", "embed")}


def _trains(rank, world, keeper, reshard, recompute, strategy, micro):
    reference = _language(bias=True)
    model = _language(bias=True, recompute=recompute)
    for name in ORDERS[keeper]:
        fully_shard(getattr(model, name), reshard_after_forward=reshard, strategy=strategy)
    fully_shard(model, reshard_after_forward=reshard, strategy=strategy)
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in (reference, model)]
    for number in range(3):
        tokens = _tokens(number)
        _loss(reference, tokens).backward()
        for last, part in enumerate(tokens.chunk(world)[rank].chunk(micro), start=1 - micro):
            model.set_requires_gradient_sync(last == 0)
            (_loss(model, part) / micro).backward()
        for (name, found), wanted in zip(model.named_parameters(), reference.parameters()):
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), reference(tokens))
        if reshard is not False:
            assert not any(
                group.ticket is not None and not group.source.is_resident for group in unit_of(model.head).needs
            )
    check_buffers(model)
    reference.double()
    model.double()
    assert model.head.weight is model.embed.weight
    output = model(_tokens(9))
    torch.testing.assert_close(output, reference(_tokens(9)))
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    assert torch.equal(state["head.weight"].full_tensor(), state["embed.weight"].full_tensor())
    output.sum().backward()  # state dicts may be taken in between
    model.load_state_dict({name: value + 1 for name, value in state.items()}, assign=True)
    assert model.head.weight is model.embed.weight
    # trained in float32: not as near as float64 could be
    torch.testing.assert_close(model.head.weight.full_tensor(), reference.head.weight.data + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("keeper", "reshard", "recompute", "strategy", "micro"),
    [
        ("embedding", True, False, 3, 1),
        ("embedding", False, True, 3, 2),
        ("embedding", None, False, 1, 1),
        ("head", True, True, 3, 2),
        ("head", False, False, 3, 1),
        ("head", None, False, 2, 2),
    ],
)
def test_training_equals_one_process(ranks, keeper, reshard, recompute, strategy, micro):
    ranks(2, _trains, keeper, reshard, recompute, strategy, micro)


def _alone(rank, world):
    """The unit that borrows, called without the one that lends, and the reverse."""
    reference, model = _language(), _language()
    for name in ("embed", "body", "head"):
        fully_shard(getattr(model, name))
    fully_shard(model)
    _loss(model, _tokens(0)).backward()
    model.zero_grad()
    x = torch.ones(2, DIM)
    for net in (reference, model):
        net.head(x).square().sum().backward()
        net.embed(_tokens(1)).square().sum().backward()
    wanted = reference.embed.weight.grad
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), wanted)
    with Launched(model) as launched:
        _loss(model, _tokens(0)).backward()
    assert launched.reduces == 2  # the tied weight once, with both its gradients; the body


def test_each_of_two_units_can_run_alone(ranks):
    ranks(2, _alone)


class Twice(nn.Module):
    """One module below two units."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(DIM, DIM)
        self.first, self.second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Linear(DIM, DIM))

    def forward(self, x):
        return self.second(self.first(x))


def _module(rank, world):
    torch.manual_seed(1)
    reference = Twice()
    torch.manual_seed(1)
    model = Twice()
    for module in (model.first, model.second, model):
        fully_shard(module)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        reference(x).square().mean().backward()
        model(x.chunk(world)[rank]).square().mean().backward()
    for found, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


def test_a_module_below_two_units(ranks):
    ranks(2, _module)


def _meta(rank, world):
    values = []
    for order in ORDERS.values():
        with torch.device("meta"):
            model = Language(bias=True)
        for name in order:
            fully_shard(getattr(model, name))
        fully_shard(model)
        materialize(model)
        assert model.head.weight is model.embed.weight
        _loss(model, _tokens(0)).backward()
        whole = model.embed.weight.full_tensor()
        other = whole.clone()
        dist.broadcast(other, 0)
        assert torch.equal(whole, other)
        assert whole.std() > 0.1
        values.append(model.head.bias.full_tensor())
    assert torch.equal(values[0], values[1])


def test_materialize(ranks):
    ranks(2, _meta)


def _meta_with_attributes(rank, world, keepers):
    with torch.device("meta"):
        model = _language()
    model.embed.weight.rate = 0.5
    for name in keepers:
        fully_shard(getattr(model, name))
    fully_shard(model)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    assert model.head.weight.rate == 0.5
    model.load_state_dict(_language().state_dict())
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    torch.testing.assert_close(twin(_tokens(0)), _language()(_tokens(0)))


@pytest.mark.parametrize("keepers", [["embed"], ["head"], ["embed", "head"], ["head", "embed"]], ids="-".join)
def test_a_model_keeps_attributes_and_can_be_copied_after_to_empty(ranks, keepers):
    ranks(2, _meta_with_attributes, keepers)


def _kept_after_evaluation(rank, world):
    reference, model = _language(), _language()
    for name in ("embed", "body", "head"):
        fully_shard(getattr(model, name), reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    tokens = _tokens(0)
    _loss(reference, tokens).backward()
    _loss(model, tokens.chunk(world)[rank]).backward()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    norms = [torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9) for net in (model, reference)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    with Launched(model) as launched:  # they have been kept
        _loss(model, tokens)
    return launched.gathers


def test_weights_that_are_kept_are_hidden_after_an_evaluation(ranks):
    assert ranks(2, _kept_after_evaluation) == [0, 0]
