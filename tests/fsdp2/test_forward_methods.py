"""Methods other than forward, registered so that they gather and release their unit."""

import copy
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from flatshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tests.fsdp2.cases import Launched


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        self.fails = False

    def features(self, x, *, scale=1.0):
        if self.fails:
            raise KeyError("asked to")
        return {"y": torch.tanh(self.first(x)) * scale}

    def forward(self, x):
        return self.second(self.features(x)["y"])


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.tower.features(x, scale=0.5)["y"])


def _pair():
    torch.manual_seed(4)
    return Pair()


def _method(rank, world):
    reference, model = _pair(), _pair()
    fully_shard(model.tower)
    fully_shard(model)
    x = torch.randn(2 * world, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError):  # the tower's weights are not full
        model(x)
    model.reset()
    register_fsdp_forward_method(model.tower, "features")
    assert model.tower.features.__name__ == "features"
    (reference(x).sum() / world).backward()
    for _ in range(2):
        model.zero_grad()
        model(x.chunk(world)[rank]).sum().backward()
    assert model.tower.second.weight.grad is None
    for name, parameter in model.named_parameters():
        if "second" not in name:
            wanted = reference.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, msg=lambda m, n=name: f"{n}: {m}")
    # Within the module's own forward the method is a plain call: gathered once, released once.
    model.tower(x).sum().backward()
    with Launched(model) as launched:
        model.tower(x).sum().backward()
    assert (launched.gathers, launched.reduces) == (1, 1)
    # An exception in it leaves a model that trains on.
    model.tower.fails = True
    with pytest.raises(KeyError):
        model(x)
    model.tower.fails = False
    model.zero_grad()
    model(x.chunk(world)[rank]).sum().backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad)


def test_a_registered_method_is_a_forward(ranks):
    ranks(2, _method)


def _casts(rank, world):
    model = _pair()
    fully_shard(model.tower, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64))
    register_fsdp_forward_method(model.tower, "features")
    assert model.tower.features(torch.ones(1, 4))["y"].dtype == torch.float64
    with pytest.raises(ValueError, match="nothing"):
        register_fsdp_forward_method(model.tower, "nothing")
    before = model.head.forward
    register_fsdp_forward_method(model.head, "forward")  # not a unit
    assert model.head.forward == before
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, before
        assert gone() is None
    finally:
        gc.enable()


def test_a_registered_method_casts_and_holds_no_module(ranks):
    ranks(2, _casts)


class Roller(nn.Module):
    """With a method that runs forwards, and uses parameters in between, as `generate` does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.fails:
            raise KeyError("asked to")
        return self.head(x)

    def roll(self, x):
        for _ in range(3):
            x = torch.tanh(self(x)) + self.head.weight.mean()
        return self.head(x)


def _rolled(rank, world, reshard):
    torch.manual_seed(0)
    model = Roller()
    reference = copy.deepcopy(model)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=reshard)
    register_fsdp_forward_method(model, "roll")
    batches = torch.randn(world, 2, 4, generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model.roll(batches[rank]), reference.roll(batches[rank]))
        (model.roll(batches[rank]).square().mean() + model(batches[rank]).mean()).backward()
        losses = [reference.roll(batch).square().mean() + reference(batch).mean() for batch in batches]
        (sum(losses) / world).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.fails = True
        with pytest.raises(KeyError):
            model.roll(batches[rank])
        model.fails = False


@pytest.mark.parametrize("reshard", [None, True])
def test_a_registered_method_may_run_forwards_of_its_module(ranks, reshard):
    ranks(2, _rolled, reshard)


class Normal:
    """A distribution: an object of a class of its own."""

    def __init__(self, parameters):
        self.mean, self.logvar = parameters.chunk(2, dim=-1)
        self.me = self

    def sample(self):
        return self.mean + torch.exp(0.5 * self.logvar)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 8)

    def encode(self, x):
        return OrderedDict(latent=Normal(self.second(torch.tanh(self.first(x)))))


def _inside_an_object(rank, world):
    torch.manual_seed(4)
    reference = Encoder()
    model = copy.deepcopy(reference)
    fully_shard(model.first)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    x = torch.randn(2 * world, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        reference.encode(x)["latent"].sample().square().mean().backward()
        model.encode(x.chunk(world)[rank])["latent"].sample().square().mean().backward()
        for found, wanted in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


def test_outputs_inside_an_object(ranks):
    ranks(2, _inside_an_object)
