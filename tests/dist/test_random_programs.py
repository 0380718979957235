"""Random training scripts on a sharded model do what they do on a whole one in one process."""

from __future__ import annotations

import pytest

from tests.dist.random_programs import run

pytestmark = pytest.mark.xdist_group("interpreters")
SEEDS, BATCH = 45, 15


def _seeds(rank, world, seeds):
    for seed in seeds:
        if rank == 0:
            print(f"seed {seed}", flush=True)  # the last one is that which hangs
        run(seed, rank, world)


def _world(seeds):
    return (2, 3, 2, 2, 4)[seeds[0] // BATCH % 5]


def _batches(first, count):
    return [range(start, start + BATCH) for start in range(first, first + count, BATCH)]


@pytest.mark.parametrize("seeds", _batches(0, SEEDS), ids=str)
def test_random_programs_equal_one_process(interpreters, seeds):
    interpreters(_world(seeds), _seeds, seeds)


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("seeds", _batches(1000, 2010), ids=str)
def test_many_more_random_programs_equal_one_process(interpreters, seeds):
    interpreters(_world(seeds), _seeds, seeds)
