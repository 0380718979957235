"""One collective, as a clock runs it: which bytes move in local memory, and how long the link is busy.

Both clocks (:mod:`clock_cpu`, :mod:`clock_cuda`) run the same two movements.  They assume that every other rank holds
the same bytes as this one:

    tile   dst = [ src | src | ... | src ]          gathers: reads one shard, writes all of the output
    fold   dst = scale x src[own], all slots read   reductions: reads all of the input, writes one shard

An all-reduce is a fold over one slot, a plain copy is a tile over one slot.  ``dst`` may be a slot of ``src``, or
``src`` a slot of ``dst`` (in-place reduce-scatters and gathers); then this rank's slot keeps its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.rehearsal.network import Level
from flatshard.rehearsal.torch_private import Work

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Transfer:
    """``pairs``: (dst, src), all contiguous and on one device.  ``seconds``: the modelled time on the link ``level``.

    ``on_current_stream``: on CUDA, run on the caller's stream instead of the group's.
    """

    pairs: Pairs
    sizes: list[int]  # per pair, the bytes of one slot
    level: Level
    seconds: float
    fold: bool = False
    slots: int = 1
    own: int = 0
    scale: float = 1.0
    result: list[Tensor] | None = None
    blocks_host: bool = False
    on_current_stream: bool = False

    def outputs(self) -> list[Tensor]:
        """The result of the collective."""
        return [dst for dst, _ in self.pairs] if self.result is None else self.result


class TransferWork(Work):  # type: ignore[misc]
    """What a collective returns.  Each clock implements ``wait``, ``is_completed`` and ``get_future``."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._future: torch.futures.Future[Any] | None = None

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_success(self) -> bool:
        return bool(self.is_completed()) and self.exception() is None

    def exception(self) -> BaseException | None:
        return None
