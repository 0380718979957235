"""A first forward under `torch.inference_mode()` leaves nothing behind that training could not write."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

import flatshard
from flatshard import fully_shard, fully_shard_optimizer
from tests.fsdp2.test_extensions import Coded, encode
from tests.fsdp2.test_extensions import build as build_coded
from tests.order.cases import (
    backward_of_all,
    compare,
    grads_of,
    make,
    optimizer_of,
    rows,
    shard,
    weights_of,
)

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


def train_beside(model, reference, rank, world, wrap):
    optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
    if wrap:
        fully_shard_optimizer(optimizers[0])
    for step in range(3):
        model(rows(rank, step)).square().mean().backward()
        backward_of_all([reference(rows(r, step)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference), f"step {step}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(weights_of(model), weights_of(reference), "weights")


def _meta(rank, world, strategy, explicit):
    model, reference = shard(make(device="meta"), strategy=strategy), make()
    with torch.inference_mode():
        if explicit:
            flatshard.materialize(model)
        before = model(rows(rank)).clone()
    made = [name for name, p in model.named_parameters() if p.is_inference()]
    assert not made, f"inference tensors: {made}"
    reference.load_state_dict(weights_of(model))
    torch.testing.assert_close(before, reference(rows(rank)).detach())
    train_beside(model, reference, rank, world, wrap=explicit)


@pytest.mark.parametrize("explicit", [False, True], ids=["by-the-forward", "materialize"])
@pytest.mark.parametrize("strategy", [1, 3])
def test_a_meta_model_evaluated_first_trains(interpreters, strategy, explicit):
    interpreters(2, _meta, strategy, explicit)


def _plain(rank, world, choices):
    model, reference = shard(make(), **choices), make()
    with torch.inference_mode():
        torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
    train_beside(model, reference, rank, world, wrap=True)


@pytest.mark.parametrize("choices", [{}, {"strategy": 1}, {"reshard_after_forward": False}], ids=str)
def test_a_model_evaluated_first_trains(interpreters, choices):
    interpreters(2, _plain, choices)


def _coded(rank, world):
    """Weights of a tensor subclass that says itself how it is gathered."""
    model, reference = build_coded(Coded), build_coded()
    masters = [p.detach().clone() for p in reference.parameters()]
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (model.parameters(), masters)]
    for step in range(3):
        for p, master in zip(reference.parameters(), masters):
            codes, scale = encode(master) if master.dim() > 1 else (master, 1)
            p.data.copy_(codes * scale)
            p.grad = None
        with torch.inference_mode():
            torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
        model(rows(rank, step)).square().mean().backward()
        backward_of_all([reference(rows(r, step)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference), f"step {step}:")
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.full_tensor()  # rounding to bytes would magnify the last bit
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_weights_of_a_subclass_evaluated_first_train(interpreters):
    interpreters(2, _coded)


def _encoded(rank, world):
    """Weights that travel in a byte each, one of them cut on its last dim: beside the same, trained from the start."""

    def build():
        model = make()
        policy = flatshard.MixedPrecisionPolicy(gather_format="int8", block=16, encodes=lambda _, p: p.dim() == 2)
        across = next(p for p in model.parameters() if p.dim() == 2 and p.shape[1] % world == 0)
        return shard(model, mp_policy=policy, shard_placement_fn=lambda p: Shard(1) if p is across else None)

    model, reference = build(), build()
    with torch.inference_mode():
        first = model(rows(rank))
    torch.testing.assert_close(first, reference(rows(rank)).detach(), rtol=0, atol=0)
    for step in range(2):
        for each in (model, reference):
            each(rows(rank, step)).square().mean().backward()
        compare(grads_of(model), grads_of(reference), f"step {step}:")


def test_weights_in_bytes_evaluated_first_train(interpreters):
    interpreters(2, _encoded)
