"""The recipe of docs/optimizers.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import flatshard
from tests.whole.cases import Net, shard

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
RECIPE = next(
    code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "CombinedOptimizer" in code
)


def losses(model: Net, tokens: torch.Tensor) -> list[float]:
    names: dict[str, Any] = {"model": model, "torch": torch, "flatshard": flatshard}
    exec(RECIPE, names)
    optimizer = names["optimizer"]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    found = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        flatshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _recipe(rank: int, world: int) -> None:
    tokens = torch.arange(24) % 13
    wanted = losses(Net(), tokens)
    ours = torch.tensor(losses(shard(Net()), tokens.chunk(world)[rank]))
    torch.distributed.all_reduce(ours)
    torch.testing.assert_close(ours / world, torch.tensor(wanted), rtol=2e-3, atol=2e-3)
    assert wanted[-1] < wanted[0]


def test_the_recipe_runs(ranks):
    assert len([line for line in RECIPE.splitlines() if line]) <= 10
    ranks(2, _recipe)
