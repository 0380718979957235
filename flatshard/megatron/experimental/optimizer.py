"""`fully_shard_optimizer` of Megatron-FSDP's second version."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from flatshard.megatron.experimental.parameter_group import sync_model_weights_from_main_weights
from flatshard.optim import step


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> None:
    """`flatshard.fully_shard_optimizer`, in place. Every step also updates compute weights from main weights."""
    known = "_flatshard_megatron_refresh" in optimizer.__dict__
    step.fully_shard_optimizer(optimizer, precision_aware=precision_aware)
    if not known:
        optimizer.__dict__["_flatshard_megatron_refresh"] = optimizer.register_step_post_hook(_refresh)


def _refresh(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    sync_model_weights_from_main_weights(each for group in optimizer.param_groups for each in group["params"])
