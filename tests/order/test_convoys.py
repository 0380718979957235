"""The groups of a unit, of several dtypes, frozen and trained, encoded or not, are gathered by one launch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from flatshard import MixedPrecisionPolicy, fully_shard, microbatch
from flatshard.buffer import Pool, collectives
from flatshard.engine.units.unit import unit_of
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
    history = unit_of(model[0]).root.gather_lane.history
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
    "kept": {"reshard_after_forward": False},
    "on the last dim": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_one_launch_for_all_groups_of_a_unit(interpreters, case):
    interpreters(4 if "mesh" in CASES[case] else 2, _train, case)


def _no_memory(left):
    """Within, that many buffers can still be had."""
    allocate = Pool.allocate

    def full(self, *args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        allocate(self, *args, **kwargs)

    return mock.patch.object(Pool, "allocate", full)


def _break(rank, world):
    """The second group of the second unit finds no memory: what had been held back is given back."""
    model = shard(make())
    check(model, rank, world, 0)
    with _no_memory(4), pytest.raises(MemoryError):
        model(rows(rank, 1, dim=DIM))
    model.reset()
    assert unit_of(model[0]).root.gather_pool.live_bytes == 0
    check(model, rank, world, 2)


def test_a_group_that_cannot_be_gathered(interpreters):
    interpreters(2, _break)


def _break_one(rank, world):
    """On one rank: it says so at once, and has launched nothing that has not the size of what the others launch."""
    model = shard(make())
    check(model, rank, world, 0)
    root = unit_of(model[0]).root
    launched = root.gather_lane.launched
    if rank == 1:
        with _no_memory(2), pytest.raises(MemoryError):
            model[1].unshard()
        assert not unit_of(model[1]).is_gathered
        assert root.gather_pool.live_bytes == 0
    assert root.gather_lane.launched == launched
    check(model, rank, world, 1)


def test_a_group_that_one_rank_cannot_gather(interpreters):
    interpreters(2, _break_one)


def _break_launch(rank, world, choices):
    """The one launch fails on all ranks. Weights that rest there are not up to date, and do not count as such."""
    model = shard(make(), **choices)
    check(model, rank, world, 0)
    reference = make()
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.add_(1)
    x = rows(rank, 1, dim=DIM)
    failing = mock.patch.object(collectives.Gather, "launch_now", side_effect=MemoryError)
    with microbatch(model, is_last=False), failing, pytest.raises(MemoryError):
        model(x)
    with microbatch(model, is_first=False):
        torch.testing.assert_close(model(x), reference(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_a_launch_that_fails(interpreters, strategy):
    interpreters(2, _break_launch, {"strategy": strategy})
