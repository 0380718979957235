"""A model, and the same model in one process, for the tests of PyTorch's methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatshard import fully_shard
from flatshard.engine.units.unit import unit_of

DIM, DEPTH = 6, 3


class Chain(nn.Module):
    """Blocks, each a unit, and a head that the root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM)) for _ in range(DEPTH)
        )
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def chain() -> Chain:
    torch.manual_seed(3)
    return Chain()


def sharded_chain(**kwargs: Any) -> Chain:
    model = chain()
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def rows(world: int, number: int = 0) -> torch.Tensor:
    """A batch for all ranks."""
    return torch.randn(2 * world, DIM, generator=torch.Generator().manual_seed(number))


def mine(rank: int, world: int, number: int = 0) -> torch.Tensor:
    return rows(world, number).chunk(world)[rank]


def reference_grads(world: int, numbers: tuple[int, ...] = (0,)) -> dict[str, torch.Tensor]:
    """What one process gets of the whole batches: the mean over ranks of what each of them sums."""
    model = chain()
    for number in numbers:
        (model(rows(world, number)).sum() / world).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_grads(model: nn.Module, wanted: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    for name, parameter in model.named_parameters():
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(found, factor * wanted[name], msg=lambda m, n=name: f"{n}: {m}")


class Launched:
    """How many collectives of each lane a body launches."""

    def __init__(self, model: nn.Module) -> None:
        self._root = unit_of(model).root

    def __enter__(self) -> Launched:
        self._before = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        self.gathers, self.reduces = (now - before for now, before in zip(self._now(), self._before))

    def _now(self) -> tuple[int, int]:
        return self._root.gather_lane.launched, self._root.reduce_lane.launched
