"""Ranks that use different parts of a unit: with `set_reduce_scatter_unused_params`, each sees the mean of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from tests.order.cases import BOTH, DIM, backward_of_all, compare, compare_filled, grads_of, make, rows, shard

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


class Pair(nn.Module):
    """As many elements as the two heads have: a reduce of one in the place of the other goes unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Heads(nn.Module):
    """Blocks as units, two heads of the root."""

    first = False  # the heads, before the blocks

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))
        self.left, self.right = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        if self.first:
            x = self.heads(x, used)
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.heads(x, used)

    def heads(self, x: torch.Tensor, used: str) -> torch.Tensor:
        made = [head(x) for name, head in (("left", self.left), ("right", self.right)) if name in used]
        return torch.stack(made).sum(0) if made else x


class HeadsFirst(Heads):
    first = True


def _train(rank, world, kind, shard_all, steps, ways):
    """Gradients of every step are those of one process, on both sides; where nobody used a part, the sides agree."""
    models, reference = [make(kind) for _ in ways], make(kind)
    for model, by in zip(models, ways):
        shard_all(model, by).set_reduce_scatter_unused_params(True)
    for step, used in enumerate(steps):
        for model in models:
            model.zero_grad()
            model(rows(rank, step), used[rank % 2]).square().mean().backward()
        reference.zero_grad()
        backward_of_all([reference(rows(r, step), used[r % 2]).square().mean() for r in range(world)])
        found = [grads_of(model) for model in models]
        for title, grads in zip(("ours", "control"), found):
            compare_filled(grads, grads_of(reference), f"{title}, step {step}:")
        compare(found[0], found[-1], f"ours and control, step {step}:")


STEPS = {
    "alike at first": [("left right", "left right"), ("left right", "left"), ("left", "left right"), ("right", "left")],
    "different at once": [("left right", "left"), ("right", "left right"), ("left", "right")],
    "none on one": [("left right", "left right"), ("", "left"), ("right", ""), ("left right", "")],
}


def ways(steps: str) -> tuple[Callable[..., Any], ...]:
    # PyTorch's reduces go out of order where a rank uses no parameter of a unit whose children it uses. Older versions
    # of it cannot do this at all.
    control = steps != "none on one" and hasattr(TorchFSDPModule, "set_reduce_scatter_unused_params")
    return BOTH if control else BOTH[:1]


@pytest.mark.parametrize("kind", [Heads, HeadsFirst])
@pytest.mark.parametrize("steps", list(STEPS))
def test_heads_of_the_root_that_ranks_use_differently(interpreters, steps, kind):
    interpreters(2, _train, kind, shard, STEPS[steps], ways(steps))


class Branches(nn.Module):
    """Units in units: the middle ones have two branches each after the inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Heads() for _ in range(2))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, used)
        return x


def _shard_nested(model, by):
    for block in model.blocks:
        shard(block, by)
    return by(model)


@pytest.mark.parametrize("steps", list(STEPS))
def test_branches_of_a_nested_unit_that_ranks_use_differently(interpreters, steps):
    interpreters(3, _train, Branches, _shard_nested, STEPS[steps], ways(steps))
