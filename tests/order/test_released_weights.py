"""A gradient that reaches a weight after its unit was released: it is right, or an error names the unit and a way."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.order.cases import DIM, backward_of_all, compare, grads_of, make, rows, shard

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


class Block(nn.Module):
    """Leaves a loss of its weights, and one of its activations, as attributes: the model returns neither."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)
        self.of_weight = self.of_rows = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        self.of_weight = self.up.weight.square().sum() * self.down.weight.square().sum()
        self.of_rows = self.down(hidden).square().mean()
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Each takes a way to call backward, and the model's forward for it; what it leaves are gradients of the parameters.


def penalty(backward, model, batches):
    """Double backward: the norm of the gradient of the input."""
    inputs = [x.requires_grad_() for x in batches]
    losses = [model(x).square().sum() for x in inputs]
    grads = [torch.autograd.grad(loss, x, create_graph=True)[0] for loss, x in zip(losses, inputs)]
    backward([grad.square().sum() for grad in grads])


def penalty_and_loss(backward, model, batches):
    inputs = [x.requires_grad_() for x in batches]
    losses = [model(x).square().sum() for x in inputs]
    grads = [torch.autograd.grad(loss, x, create_graph=True)[0] for loss, x in zip(losses, inputs)]
    backward([loss + grad.square().sum() for loss, grad in zip(losses, grads)])


def penalty_around_another_forward(backward, model, batches):
    """As of a critic: the penalty of one batch and the loss of another go back together; an evaluation in between."""
    inputs = [x.requires_grad_() for x in batches]
    grads = [torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0] for x in inputs]
    with torch.no_grad():
        model(batches[0] + 1)
    losses = [model(2 * x.detach()).square().mean() for x in batches]
    backward([loss + grad.square().sum() for loss, grad in zip(losses, grads)])


def forward(model, x, name):
    """The loss, and the losses that the blocks have left."""
    loss = model(x).square().mean()
    return loss, sum(getattr(block, name) for block in model.blocks)


def weights_together(backward, model, batches):
    backward([sum(forward(model, x, "of_weight")) for x in batches])


def weights_after(backward, model, batches):
    losses, others = zip(*(forward(model, x, "of_weight") for x in batches))
    backward(losses)
    backward(others)


def weights_first(backward, model, batches):
    losses, others = zip(*(forward(model, x, "of_weight") for x in batches))
    backward(others)
    backward(losses)


def weights_of_the_last_step(backward, model, batches):
    losses, others = zip(*(forward(model, x, "of_weight") for x in batches))
    backward(losses)
    backward([model(x).square().mean() for x in batches])
    backward(others)


def rows_together(backward, model, batches):
    backward([sum(forward(model, x, "of_rows")) for x in batches])


def rows_alone(backward, model, batches):
    backward([forward(model, x, "of_rows")[1] for x in batches])


WAYS = [
    penalty,
    penalty_and_loss,
    penalty_around_another_forward,
    weights_together,
    weights_after,
    weights_first,
    weights_of_the_last_step,
    rows_together,
    rows_alone,
]


def _late(rank, world, way, choices):
    model, reference = shard(make(Net), **choices), make(Net)
    way(backward_of_all, reference, [rows(r) for r in range(world)])
    said = None
    try:
        way(backward_of_all, model, [rows(rank)])
    except RuntimeError as error:
        said = str(error)
        model.reset()
    else:
        compare(grads_of(model), grads_of(reference), rtol=1e-4, atol=1e-5)
    for each in (model, reference):
        each.zero_grad()
    model(rows(rank)).square().mean().backward()
    backward_of_all([reference(rows(r)).square().mean() for r in range(world)])
    compare(grads_of(model), grads_of(reference), "the step after it:")
    return said


# Under strategy 1 weights rest whole: nothing is released, and a late gradient must not be forgotten.
@pytest.mark.parametrize("choices", [{}, {"strategy": 1}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_late_gradient_is_right_or_its_unit_is_named(interpreters, way, choices):
    said = interpreters(2, _late, way, choices)
    assert (said[0] is None) == (said[1] is None)
    for message in said:
        if message is not None:
            assert not re.search(r"storage of size 0|setStorage|invalid python storage", message), message
            assert re.search(r"blocks\.\d", message), message
            assert re.search(r"reshard_after_forward|unshard|return|output", message), message
