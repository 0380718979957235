"""One collective as the clocks see it: which bytes move in local memory, and how long the link is taken.

Both clocks (:mod:`clock_cpu`, :mod:`clock_cuda`) carry out the same two movements.  The other ranks are taken to be
twins of this one, which hold the bytes that this rank holds:

    tile   dst = [ src | src | ... | src ]          gathers: reads one shard, writes all of the output
    fold   dst = scale x src[own], all slots read   reductions: reads all of the input, writes one shard

An all-reduce is a fold over one slot, a plain copy is a tile over one slot.  ``dst`` may be a slot of ``src`` or the
other way round (in-place gathers and reduce-scatters), then the own slot keeps its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flatshard.rehearsal.network import Level
from flatshard.rehearsal.torch_private import Work


@dataclass(slots=True)
class Transfer:
    """``pairs`` are (dst, src), all contiguous and on one device; ``seconds`` is the modelled time on ``level``.

    ``on_current_stream`` is for CUDA: run on the stream of the caller and not on one of the group's own.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    sizes: list[int]  # per pair, the bytes of one slot
    level: Level
    seconds: float
    fold: bool = False
    slots: int = 1
    own: int = 0
    scale: float = 1.0
    result: list[torch.Tensor] | None = None
    blocks_host: bool = False
    on_current_stream: bool = False

    def outputs(self) -> list[torch.Tensor]:
        """What the caller gets to see as the result."""
        return [dst for dst, _ in self.pairs] if self.result is None else self.result


class TransferWork(Work):  # type: ignore[misc]
    """What a collective returns; each clock has its own ``wait``, ``is_completed`` and ``get_future``."""

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


class Clock(Protocol):
    """Carries out the transfers of one process group in order, each not before the link is free."""

    def submit(self, transfer: Transfer) -> torch.distributed.Work: ...

    def close(self) -> None: ...
