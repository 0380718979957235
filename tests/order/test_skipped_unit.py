"""A unit that one rank skips in the first step: every rank gets an exception that names it, and no process is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.order.cases import DIM, make, rows, shard

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


class Skipping(nn.Module):
    """Blocks of different sizes, or of one; some of them are left out."""

    def __init__(self, equal: bool, skipped: tuple[int, ...]) -> None:
        super().__init__()
        self.skipped = skipped
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, hidden), nn.Tanh(), nn.Linear(hidden, DIM))
            for hidden in ((5, 5, 5, 5) if equal else (3, 8, 5, 11))
        )
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = x + block(x)
        return self.head(x)


def _skip(rank, world, skipped, equal):
    model = shard(make(Skipping, equal, (skipped,) if rank == 1 else ()))
    try:
        model(rows(rank)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("equal", [True, False], ids=["equal-sizes", "other-sizes"])
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_a_unit_that_one_rank_skips_in_training_is_named_on_all(interpreters, skipped, equal):
    for message in interpreters(3, _skip, skipped, equal):
        assert message is not None
        assert f"blocks.{skipped}" in message
