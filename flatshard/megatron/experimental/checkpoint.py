"""Checkpoints of a model and its optimizer by torch.distributed.checkpoint."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from flatshard.megatron.experimental.parameter_group import sync_model_weights_from_main_weights


def save_checkpoint(model: nn.Module, optimizer: Optimizer, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Save main weights and optimizer state by the names of parameters. All ranks call it."""
    save(_state(model, optimizer), checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module, optimizer: Optimizer, checkpoint_dir: str | os.PathLike[str], *, sync_model_weights: bool = True
) -> None:
    """Load what `save_checkpoint` saved, on any number of ranks and with any placements. All ranks call it.

    ``sync_model_weights`` updates compute weights now; otherwise the next forward does.
    """
    state = _state(model, optimizer)
    load(state, checkpoint_id=checkpoint_dir)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if sync_model_weights:
        sync_model_weights_from_main_weights(model.parameters())


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
