"""Who owns which matrix, and which travel together: pure integers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flatshard.optim.assignment import (
    Box,
    Holders,
    Matrix,
    assign,
    matrices_of,
    newton_schulz,
)
from flatshard.optim.matrices import in_buckets


def llama(layers: int, width: int, ffn: int, kv: int) -> list[tuple[int, int]]:
    block = [(width, width), (kv, width), (kv, width), (width, width), (ffn, width), (ffn, width), (width, ffn)]
    return block * layers


ONE = llama(16, 2048, 8192, 512)
EIGHT = llama(32, 4096, 14336, 1024)


@pytest.mark.parametrize(("shapes", "world"), [(ONE, 4), (ONE, 8), (EIGHT, 8), (EIGHT, 32), (EIGHT, 64)])
def test_owners_are_balanced(shapes, world):
    """Within a tenth of the mean, or as well as can be: of more matrices than ranks, somebody has two."""
    costs = [newton_schulz(shape) for shape in shapes]
    order, owners = assign(costs, [0] * len(costs), world)
    assert sorted(order) == list(range(len(shapes)))
    loads = [0.0] * world
    for cost, owner in zip(costs, owners):
        loads[owner] += cost
    dearest = sorted(costs, reverse=True)
    least = max(dearest[0], dearest[world - 1] + dearest[world] if len(costs) > world else 0.0)
    assert max(loads) <= max(1.1 * sum(costs) / world, least)
    assert assign(costs, [0] * len(costs), world) == (order, owners)


def test_what_travels_together_is_sent_by_many():
    order, _ = assign([1.0] * 6, [0, 0, 0, 1, 1, 1], 2)
    assert order == [0, 3, 1, 4, 2, 5]


def test_matrices_of_a_parameter():
    assert [(m.label, m.shape) for m in matrices_of((6, 4), None, True)] == [("", (6, 4))]
    assert [m.label for m in matrices_of((6, 4), (2, 4), False)] == ["[0:2]", "[2:6]"]
    assert [m.label for m in matrices_of((2, 6, 4), 2, True)] == ["[0, 0:3]", "[0, 3:6]", "[1, 0:3]", "[1, 3:6]"]
    assert [(m.label, m.shape, m.box.sizes) for m in matrices_of((2, 6, 4), None, True)] == [
        ("[0]", (6, 4), (1, 6, 4)),
        ("[1]", (6, 4), (1, 6, 4)),
    ]
    assert [(m.label, m.shape) for m in matrices_of((8, 3, 2, 2), None, True)] == [("", (8, 12))]
    assert [(m.label, m.shape) for m in matrices_of((2, 6, 4), None, False)] == [("", (2, 6, 4))]
    for split in (4, (3, 2), (6, 0)):
        with pytest.raises(ValueError, match="rows"):
            matrices_of((6, 4), split, True)


def test_buckets_are_bounded():
    """No owner has more than the bound of a bucket, and no rank holds more than twice of it in pieces."""
    world = 4
    matrix = Matrix("", Box((0, 0), (8, 4)), (8, 4))
    even = Holders(tuple(Box((2 * r, 0), (2, 4)) for r in range(world)), (0,) * world)
    at_one = Holders(tuple(Box((8 * (r != 2), 0), (8 * (r == 2), 4)) for r in range(world)), (0,) * world)
    for holders in (even, at_one):
        loads = [SimpleNamespace(matrix=matrix, holders=holders, width=8, owner=number % world) for number in range(24)]
        buckets = in_buckets(loads, 512)
        assert [each for bucket in buckets for each in bucket] == loads
        for bucket in buckets:
            for rank in range(world):
                assert sum(8 * matrix.box.numel for each in bucket if each.owner == rank) <= 512
                assert sum(8 * int(each.holders.counts(matrix.box)[rank]) for each in bucket) <= 1024
        assert len(buckets) == (3 if holders is even else 6)
