"""Random models, choices and programs over NCCL equal one process, and fit a batch that they see again and again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flatshard import fully_shard_optimizer
from tests.dist import test_random_models, test_random_strategies
from tests.dist.random_models import DIM, build, rows_of
from tests.dist.test_random_models import optimizer_of, shard
from tests.order import test_optional, test_random_use

pytestmark = pytest.mark.limit(120)


@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, 30), (4, 45)])
def test_random_models_equal_one_process(ranks, world, first):
    ranks(world, test_random_models._seeds, list(range(first, first + 5)))


@pytest.mark.parametrize(("world", "first", "count"), [(2, 20_000, 16), (4, 40_000, 14)])
def test_random_choices_equal_one_process(ranks, world, first, count):
    ranks(world, test_random_strategies._seeds, list(range(first, first + count)))


@pytest.mark.parametrize(("world", "first"), [(2, 0), (4, 10)])
def test_ranks_that_use_different_parts_launch_alike(ranks, world, first):
    ranks(world, test_random_use._seeds, list(range(first, first + 8)), False)


@pytest.mark.parametrize(("world", "count"), [(2, 8), (4, 6)])
def test_ranks_that_skip_optional_units_launch_what_the_others_do(ranks, world, count):
    ranks(world, test_optional._seeds, range(count))


def _fits(rank, world, seeds):
    """The mean loss of one batch in each of some steps on it, by seed."""
    found = []
    for seed in seeds:
        case = build(seed)
        model, optimizer = shard(case), fully_shard_optimizer(optimizer_of(case))
        rows, target = torch.randn(2, 6 * world, DIM, generator=torch.Generator().manual_seed(seed))
        losses = []
        for _ in range(15):
            loss = (rows_of(model(rows.chunk(world)[rank])) - target.chunk(world)[rank]).square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            losses.append(mean.item())
        found.append(losses)
    return found


@pytest.mark.parametrize(("world", "seeds"), [(2, range(3, 7)), (4, range(10, 12))])
def test_random_models_fit_one_batch(ranks, world, seeds):
    for found in ranks(world, _fits, list(seeds)):
        for losses in found:
            assert losses[-1] < 0.9 * losses[0], losses
