"""What the tests of this folder share: a model, its gradients, and what one process makes of the ranks' losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from flatshard import fully_shard

DIM = 6
BOTH: tuple[Callable[..., Any], ...] = (fully_shard, torch_fully_shard)  # ours, and the control


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks, each of them to be a unit, and a norm and an output of the root."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def make(kind: type[nn.Module] = Chain, *args: Any, device: str = "cpu", **kwargs: Any) -> Any:
    """The same values on every rank and in the reference."""
    torch.manual_seed(0)
    with torch.device(device):
        return kind(*args, **kwargs)


def shard(model: Any, by: Callable[..., Any] = fully_shard, **kwargs: Any) -> Any:
    """Each block a unit, and the root."""
    for block in model.blocks:
        by(block, **kwargs)
    return by(model, **kwargs)


def rows(rank: int, number: int = 0, count: int = 3, dim: int = DIM) -> torch.Tensor:
    """The batch of one rank."""
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(100 * number + rank))


def backward_of_all(losses: Sequence[torch.Tensor]) -> None:
    """In one process: gradients are to be the mean over ranks of those of their losses."""
    (torch.stack(list(losses)).sum() / len(losses)).backward()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def compare(found: dict[str, Any], wanted: dict[str, Any], what: str = "", **tolerance: Any) -> None:
    """Tensors by name, or None. A gradient of zero and none at all are not the same."""
    assert list(found) == list(wanted)
    for name, value in found.items():
        missing = [title for title, given in (("found", value), ("wanted", wanted[name])) if given is None]
        assert len(missing) != 1, f"{what} {name}: {missing[0]} None"
        if value is not None:
            torch.testing.assert_close(
                value, wanted[name], msg=lambda text, name=name: f"{what} {name}: {text}", **tolerance
            )


def compare_filled(found: dict[str, Any], wanted: dict[str, Any], what: str = "", **tolerance: Any) -> None:
    """As `compare`, where a gradient that nobody computed may be one of zero."""
    filled = {n: torch.zeros_like(found[n]) if g is None and found[n] is not None else g for n, g in wanted.items()}
    compare(found, filled, what, **tolerance)


def optimizer_of(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
