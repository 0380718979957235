"""The bytes to train on, and which of them are in which batch."""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.train.command import check_data
from flatshard.train.settings import Settings
from flatshard.train.stories import stories


def load_bytes(settings: Settings) -> Tensor:
    """The text as one tensor of bytes; a file is mapped, not read. Mistake where there is too little of it."""
    check_data(settings)
    if settings.data is None:
        return torch.frombuffer(bytearray(stories(), "ascii"), dtype=torch.uint8)
    size = settings.data.stat().st_size
    return torch.from_file(str(settings.data), shared=False, size=size, dtype=torch.uint8)


def first_words(text: Tensor, limit: int = 40) -> bytes:
    """The text's first bytes, at most ``limit``, up to a space where there is one."""
    start = bytes(text[:limit].tolist())
    return start[: start.rfind(b" ") + 1] or start


def batch_rows(text: Tensor, settings: Settings, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's (tokens, targets) of a step, both (rows, context).

    The rows of all ranks, one after another, are the same for any number of ranks: they follow from seed and step.
    """
    draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - settings.context, (settings.batch,), generator=draw)
    rows = settings.rows_per_rank(world)
    mine = starts[rank * rows : (rank + 1) * rows]
    window = text[mine[:, None] + torch.arange(settings.context + 1)].long()
    return window[:, :-1], window[:, 1:]
