"""Small models for the engine's tests, and the reference: the same model on one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DIM = 12


class Block(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = 20) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head. ``recompute`` is None, "reentrant" or "non-reentrant"."""

    def __init__(self, depth: int = 3, vocab: int = 29, recompute: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


def make_net(seed: int = 0, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    net = Net(**kwargs)
    for parameter in net.parameters():
        parameter.data.normal_(0, 0.2)
    return net


def assert_rows(ours: torch.Tensor, whole: torch.Tensor, **tolerance: Any) -> None:
    """What this rank holds of a DTensor is what it should hold of ``whole``. No collective; other tensors are whole."""
    if isinstance(ours, DTensor):
        boxes = ours.__create_chunk_list__()
        places = zip(boxes[0].offsets, boxes[0].sizes) if boxes else [(0, 0)]
        ours, whole = ours.to_local(), whole[tuple(slice(first, first + count) for first, count in places)]
    torch.testing.assert_close(ours, whole, **tolerance)


def batches(steps: int, rows: int, vocab: int = 29, length: int = 6) -> Iterator[torch.Tensor]:
    rng = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield torch.randint(0, vocab, (rows, length + 1), generator=rng)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    rows: int,
    rank: int,
    world: int,
    micro: int = 1,
    set_to_none: bool = True,
    loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    device: str | None = None,
) -> list[float]:
    """Train on this rank's rows of each batch, in ``micro`` parts; the losses are this rank's."""
    losses = []
    for tokens in batches(steps, rows):
        mine = tokens.chunk(world)[rank].to(device or tokens.device)
        total = 0.0
        for part in mine.chunk(micro):
            loss = loss_fn(model, part) / micro
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(total)
    return losses
