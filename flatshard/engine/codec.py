"""How main weights become bytes on the wire. The full parameters are views of what the wire delivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes this rank's part of main into its part of the gathered buffer."""

    wire_dtype: torch.dtype
    sends_main: bool  # main's own bytes are the wire format: nothing needs to be encoded

    def encode(self, wire: Sequence[torch.Tensor], main: Sequence[torch.Tensor]) -> None:
        """Write the wire format of each run of ``main`` into the run of ``wire`` beside it."""


class Identity:
    """Compute in main's dtype."""

    sends_main = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.wire_dtype = dtype

    def encode(self, wire: Sequence[torch.Tensor], main: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(wire), list(main))


class Cast(Identity):
    """Compute in another dtype than main's: one cast of the local part, before the gather."""

    sends_main = False


def codec_for(main: torch.dtype, compute: torch.dtype) -> Codec:
    return Identity(main) if main == compute else Cast(compute)
