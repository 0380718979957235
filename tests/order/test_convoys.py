"""The groups of a unit, of several dtypes, frozen and trained, encoded or not, are gathered by one launch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.buffer import Pool
from flatshard.engine.roots import unit_of
from tests.order.cases import compare, grads_of, rows

DIM = 16


class Adapted(nn.Module):
    """A frozen matrix in bfloat16, an adapter that is trained, and integers: three groups."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(DIM, DIM, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 3, bias=False), nn.Linear(3, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x.bfloat16()).float() + self.up(self.down(x))
        return self.norm(x + y) * self.counts.sum()


def make(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted() for _ in range(depth)])


def shard(model, **kwargs):
    for module in model:
        fully_shard(module, **kwargs)
    return fully_shard(model, **kwargs)


def gathers_of(model):
    """The names of the units that have been gathered since the last time."""
    history = unit_of(model[0]).scope.gather_lane.history
    found = sorted(operation.name for operation in history if operation.kind == "all_gather")
    history.clear()
    return found


def check(model, rank, world, step):
    """Gradients of a step are those of one process."""
    reference, batches = make(), [rows(r, step, dim=DIM) for r in range(world)]
    model.zero_grad()
    model(batches[rank]).square().mean().backward()
    (sum(reference(batch).square().mean() for batch in batches) / world).backward()
    compare(grads_of(model), grads_of(reference))


IN_BYTES = MixedPrecisionPolicy(gather_format="int8", block=16, encodes=lambda name, parameter: parameter.dim() > 1)
CASES = {
    "plain": {},
    "on the last dim": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
    "kept": {"reshard_after_forward": False},
    "on two axes": {"mesh": (2, 2)},
    "in bytes": {"mp_policy": IN_BYTES},
}


def _train(rank, world, case):
    choices = dict(CASES[case])
    if "mesh" in choices:
        choices["mesh"] = init_device_mesh("cpu", choices["mesh"], mesh_dim_names=("outer", "inner"))
    model = shard(make(), **choices)
    for step in range(3):
        if case == "in bytes":  # of their values, tests/formats tells
            model(rows(rank, step, dim=DIM)).square().mean().backward()
        else:
            check(model, rank, world, step)
        assert gathers_of(model) == sorted([*"012"] * (1 if case == "kept" else 2))


@pytest.mark.parametrize("case", CASES)
def test_one_launch_for_all_groups_of_a_unit(interpreters, case):
    interpreters(4 if "mesh" in CASES[case] else 2, _train, case)


def _break(rank, world):
    """The second group of the second unit finds no memory: what had been held back is launched, and given back."""
    model = shard(make())
    check(model, rank, world, 0)
    allocate, left = Pool.allocate, [5]

    def full(self, *args):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        allocate(self, *args)

    with mock.patch.object(Pool, "allocate", full), pytest.raises(MemoryError):
        model(rows(rank, 1, dim=DIM))
    model.reset()
    assert unit_of(model[0]).scope.gather_pool.live_bytes == 0
    check(model, rank, world, 2)


def test_a_group_that_cannot_be_gathered(interpreters):
    interpreters(2, _break)
