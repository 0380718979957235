"""How a rank's shard of main weights is encoded for an all-gather, and how gathered data are decoded.

With a `Cast`, full weights are views of the gathered buffer: each shard is written to its place in it, and nothing is
decoded. `Blocks` gathers a buffer of bytes, which is decoded into the buffer of full weights. Tensor subclasses have
their own codecs: extensions.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.buffer import DBuffer
from flatshard.engine.weights.formats import Formats


class Cast:
    """Full weights are views of the gathered buffer: main's own values, or each shard cast before the all-gather."""

    def __init__(self, main: torch.dtype, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sends_main = main == dtype  # main is sent without a cast

    def encode(self, main: Sequence[torch.Tensor], wire: Sequence[torch.Tensor]) -> None:
        """Write each run of ``main`` into the corresponding run of ``wire``."""
        torch._foreach_copy_(list(wire), list(main))


class Blocks:
    """Some tensors are sent as one byte per element and a scale per block; the others are cast as by a `Cast`.

    All tensors of a group are sent in one buffer of bytes, with as many pieces as main.
    """

    def __init__(self, formats: Formats, dtype: torch.dtype) -> None:
        self.dtype, self.formats = dtype, formats
        self._coder = formats.gather_coder(dtype)
        self.layout = self._coder.wire.bytes  # of the buffer of bytes

    def encode(self, main: DBuffer, wire: DBuffer) -> None:
        """Write this rank's shard of main to its place in a buffer of bytes."""
        (piece,) = wire.runs(main.held)
        self._coder.encode(main.runs(), main.held, piece)

    def decode(self, wire: DBuffer, full: DBuffer) -> None:
        """Decode all pieces into a buffer of full weights."""
        self._coder.decode(wire.runs()[0].view(1, -1), full.held, full.local)
