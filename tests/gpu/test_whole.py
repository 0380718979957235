"""On a GPU: a step on whole matrices equals the unsharded one, and takes the memory that it says."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from flatshard import fully_shard, fully_shard_optimizer, whole_optimizer
from flatshard.optim import AdamW8bit, CombinedOptimizer
from flatshard.rehearsal import Link, Network, rehearse
from tests.whole.cases import Net, assert_equal_bits, give, gradients, inside, muon, shard
from tests.whole.test_step import Plain

NETWORK = Network(Link(360e9, 10e-6), Link(45e9, 25e-6), ranks_per_node=8, name="modelled")


def _equal(rank: int, world: int, eight: bool) -> None:
    reference = Net().cuda()
    model = shard(copy.deepcopy(reference))
    for each in (model, reference):
        rest = [p for n, p in each.named_parameters() if not inside(n, p)]
        second = AdamW8bit(rest) if eight else torch.optim.AdamW(rest, foreach=False)
        optimizer = CombinedOptimizer(
            [whole_optimizer(muon, each, inside, split={"*qkv*": 3}, bucket_bytes=500), second]
        )
        for step in range(5):
            give(each, gradients(reference, step))
            optimizer.step()
    assert_equal_bits(model, reference)


@pytest.mark.parametrize("eight", [False, True])
def test_equal_to_unsharded(gpu_ranks, eight):
    gpu_ranks(2, _equal, eight)


@pytest.mark.parametrize("world", [8, 64])
def test_memory_is_that_of_a_few_buckets(world):
    rows, columns, count = 1024, 2048, 3 * world
    with rehearse(world, NETWORK), torch.device("cuda"):
        model: Any = nn.Sequential(*[nn.Linear(columns, rows, bias=False) for _ in range(count)])
        fully_shard(model)
        plain = Plain(model.parameters())
        optimizer = fully_shard_optimizer(plain, whole=True, bucket_bytes=8 * rows * columns)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for _ in range(2):  # the rehearsal's own meter begins after the second step, and then resets the peak
            optimizer.step()
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests have left would be freed during the step
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
    stepper = optimizer.__dict__["_flatshard_stepper"]
    assert len(stepper.buckets) > 1
    pair = 8 * rows * columns  # a matrix and its gradient
    assert pair <= taken <= 5.5 * pair + (1 << 20)


def test_a_step_cannot_be_captured(gpu_ranks):
    gpu_ranks(1, _captured)


def _captured(rank: int, world: int) -> None:
    model = shard(Net())
    optimizer = whole_optimizer(muon, model, inside)
    give(model, gradients(model, 0))
    optimizer.step()
    give(model, gradients(model, 0))
    with pytest.raises(NotImplementedError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
