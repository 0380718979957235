"""Optimizers of whole matrices on sharded models equal the unsharded ones, bit for bit, given equal gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatshard import fully_shard_optimizer, whole_optimizer
from tests.whole.cases import MAKERS, Net, assert_equal_bits, give, gradients, inside, shard


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2


def train(model: Net, reference: Net, optimizer: Any, wanted: Any, steps: int = 10) -> None:
    for step in range(steps):
        whole = gradients(reference, step)
        for each in (model, reference):
            give(each, whole)
        optimizer.step()
        wanted.step()
        for each in (optimizer, wanted):
            each.zero_grad()
    assert_equal_bits(model, reference)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in wanted.param_groups
    ]


def compare(name: str, how: dict[str, Any], choice: dict[str, Any] | None = None, steps: int = 10) -> Any:
    """Train a sharded model and an unsharded one with the same optimizer of matrices."""
    make = MAKERS[name]
    reference = Net()
    model = shard(copy.deepcopy(reference), **how)
    chosen = is_matrix if name == "muon" else lambda name, parameter: True
    params, others = ([p for n, p in each.named_parameters() if chosen(n, p)] for each in (model, reference))
    optimizer = fully_shard_optimizer(make(params), whole=True, bucket_bytes=600, **(choice or {}))
    train(model, reference, optimizer, make(others), steps)
    return optimizer


def _equal(rank: int, world: int, names: list[str], kinds: list[dict[str, Any]], steps: int) -> None:
    for how in kinds:
        for name in names:
            compare(name, how, steps=steps)


LAYOUTS = [{"layout": layout, "strategy": strategy} for layout in ("tensor", "flat") for strategy in range(4)]


def test_equal_to_unsharded(ranks):
    """Two optimizers, two layouts, over two and three ranks; `test_equal_everywhere` has the others."""
    some = [{"layout": "tensor", "strategy": 3}, {"layout": "flat", "strategy": 1}]
    ranks(2, _equal, ["muon", "spectral"], some, 4)
    ranks(3, _equal, ["muon"], some[1:], 4)


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_everywhere(ranks, world, name):
    if name in ("soap", "shampoo"):
        pytest.importorskip("pytorch_optimizer")
    ranks(world, _equal, [name], LAYOUTS, 10)
