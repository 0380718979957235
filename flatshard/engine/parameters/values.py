"""Checksums of the values that parameters were sharded with, for the ranks to compare before the first launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flatshard.buffer import DBuffer

_BLOCK = 512  # bytes that are summed; each sum is weighted by its place
_SPREAD = 0x1E3779B97F4A7C15  # odd: the product with it differs in its highest bits, too


class Initial:
    """Sums over the values of a group when it was sharded: of its full parameters, and of this rank's parts."""

    def __init__(self, full: Sequence[torch.Tensor], warns: bool) -> None:
        """``warns``: a difference only warns."""
        self.warns = warns
        self.full = [checksum(tensor) for tensor in full]
        self.parts: list[torch.Tensor] = []

    def of_parts(self, main: DBuffer) -> list[torch.Tensor]:
        """Checksums of this rank's current part of each parameter."""
        return [checksum(main.local_view(index)) for index in range(len(self.full))]


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with any byte, and with the order of blocks. Uses little additional memory."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data  # a view as int64 must be aligned
    whole = len(data) // _BLOCK * _BLOCK
    blocks = data[:whole].view(torch.int64).view(-1, _BLOCK // 8).sum(1)
    words = torch.cat([blocks, data[whole:].to(torch.int64)])
    return (words * torch.arange(1, 2 * len(words) + 1, 2, device=words.device)).sum()


def scrambled(sums: torch.Tensor) -> torch.Tensor:
    """Hashes of checksums, in a range that allows negation and reserves the lowest number."""
    return (sums * _SPREAD) >> 2


class Checksum(NamedTuple):
    """The checksum of a parameter on this rank. Ranks without a part of it, and changed parts, are not compared."""

    sum: int  # of what it was sharded with
    has_part: bool
    is_changed: bool  # this rank's part has been written since, or had no values
