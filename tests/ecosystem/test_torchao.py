"""torchao's optimizers on sharded models. Its quantised weights are in `test_peft.py`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flatshard import fully_shard

pytestmark = [pytest.mark.full, pytest.mark.limit(300)]


def _eight_bits(rank, world):
    """State is quantised in blocks of the shard, and in other blocks in one process: the steps are near, not equal."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    start = copy.deepcopy(model)
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizers = [AdamW8bit(each.parameters(), lr=0.01) for each in (model, reference)]
    for number in range(3):
        rng = torch.Generator().manual_seed(number)
        batches = torch.randn(world, 4, 256, generator=rng)
        model(batches[rank]).square().mean().backward()
        (sum(reference(batch).square().mean() for batch in batches) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, wanted, first in zip(model.parameters(), reference.parameters(), start.parameters()):
        torch.testing.assert_close(parameter.full_tensor(), wanted, rtol=0, atol=5e-3)
        assert (wanted - first).abs().max() > 0.02


def test_adamw_with_eight_bits_of_state_trains_as_on_one_process(ranks):
    pytest.importorskip("torchao")
    ranks(2, _eight_bits)
