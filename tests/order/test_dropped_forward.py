"""A forward with gradients whose backward never comes: the next backward releases and reduces as it goes, as ever."""

from __future__ import annotations

import pytest
import torch

from flatshard.engine.units.unit import unit_of
from tests.order.cases import Chain, backward_of_all, compare, grads_of, make, rows, shard

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]
DEPTH = 5


class Traced(Chain):
    """Says where a backward stands when the gradient of each block's input is there."""

    def __init__(self) -> None:
        super().__init__(DEPTH)
        self.trace = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if x.requires_grad:
                x.register_hook(lambda grad, number=number: self.look(number))
            x = block(x)
        return self.output(self.norm(x))

    def look(self, number: int) -> None:
        root = unit_of(self).root
        self.trace.append((number, root.gather_pool.live_buffers, root.reduce_lane.launched))


def step(model: Traced, rank: int, number: int) -> list[tuple[int, int, int]]:
    """Where the backward stood at each block: the block, buffers gathered, reduces launched by then."""
    model.zero_grad()
    model.trace.clear()
    launched = unit_of(model).root.reduce_lane.launched if unit_of(model).root else 0
    model(rows(rank, number).requires_grad_()).square().mean().backward()
    return [(block, live, reduces - launched) for block, live, reduces in model.trace]


def drop_loss(model, x):
    model(x).sum()


def drop_several(model, x):
    for _ in range(3):
        model(x).sum()


def drop_part(model, x):
    """The graph of one block outlives its forward, and is thrown away later."""
    kept = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
    model(x)
    handle.remove()
    kept.clear()


def drop_raised(model, x):
    handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()


WAYS = [drop_loss, drop_several, drop_part, drop_raised]


def _dropped(rank, world, drop, first):
    clean, model, reference = shard(make(Traced)), shard(make(Traced)), make(Traced)
    for number in range(3):
        expected = step(clean, rank, number)
        if number or first:
            drop(model, rows(rank, 50 + number))
        found = step(model, rank, number)
        reference.zero_grad()
        reference.look = lambda number: None
        backward_of_all([reference(rows(r, number)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference), f"step {number}:")
        assert found == expected, f"(block, gathered, reduced): {found}, and without a dropped forward {expected}"
        # What the blocks below have is reduced when backward comes to the first, and few are gathered at a time.
        assert [block for block, *_ in found] == list(reversed(range(DEPTH)))
        assert found[-1][2] >= DEPTH - 2
        assert max(live for _, live, _ in found) <= 4


@pytest.mark.parametrize("first", [True, False], ids=["at-once", "after-a-step"])
@pytest.mark.parametrize("drop", WAYS)
def test_a_forward_without_backward_does_not_count(interpreters, drop, first):
    interpreters(2, _dropped, drop, first)
