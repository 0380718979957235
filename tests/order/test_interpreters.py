"""The bench of interpreters itself: what is its own in each of them, and what a failing one leaves."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests.bench import RankError

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


def _itself(rank, world):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return os.getpid(), hash("a name"), sys.flags.hash_randomization, total


def test_each_rank_has_its_own_hashes_and_keeps_them(interpreters):
    first, again = interpreters(4, _itself), interpreters(4, _itself)
    pids, hashes, randomized, totals = zip(*first)
    assert len(set(pids)) == len(set(hashes)) == 4
    assert all(randomized)
    assert all(total == 6 for total in totals)
    assert [found[:2] for found in again] == [found[:2] for found in first]


def _raise(rank, world):
    raise KeyError("of this rank")


@pytest.mark.full
def test_a_rank_that_fails_shows_its_traceback_and_is_replaced(interpreters):
    before = interpreters(1, _itself)
    with pytest.raises(RankError, match=r"(?s)rank 0 of 1 raised KeyError.*in _raise"):
        interpreters(1, _raise)
    after = interpreters(1, _itself)
    assert [found[1] for found in before] == [found[1] for found in after]
    assert not {found[0] for found in before} & {found[0] for found in after}
