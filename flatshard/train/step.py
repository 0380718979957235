"""`Step`: the results of one training step. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One optimizer step. The tensors are scalars and equal on all ranks; reading one waits for the device.

    ``loss``: mean over the whole batch before the update, in nats per token. ``grad_norm``: before clipping.
    ``val_loss`` and ``sample``: of the model after the update; None in steps without validation or sample.
    """

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    val_loss: Tensor | None = None
    sample: str | None = None
