"""What training says of each of its steps. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One optimizer step. The tensors have no dims and are equal on all ranks; reading one waits for the device.

    ``loss``: mean over the whole batch, before the update, in nats per token. ``grad_norm``: before clipping.
    ``val_loss`` and ``sample``: of the model after the update, where it was time for them.
    """

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    val_loss: Tensor | None = None
    sample: str | None = None
