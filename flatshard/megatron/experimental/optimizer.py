"""`fully_shard_optimizer` of Megatron-FSDP's second version."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from flatshard.engine.groups.registry import group_of
from flatshard.megatron.experimental.module import CONTEXTS, FsdpModule, ParameterGroup
from flatshard.optim import step


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> None:
    """`flatshard.fully_shard_optimizer`, in place; compute weights are brought up to date at the end of each step."""
    known = "_flatshard_megatron_refresh" in optimizer.__dict__
    step.fully_shard_optimizer(optimizer, precision_aware=precision_aware)
    if not known:
        optimizer.__dict__["_flatshard_megatron_refresh"] = optimizer.register_step_post_hook(_refresh)


def _refresh(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in groups_of(optimizer):
        group.sync_model_weight_from_main_weight()


def groups_of(optimizer: Optimizer) -> list[ParameterGroup]:
    """The parameter groups of all units that share a context with a parameter of the optimizer.

    Not of those alone that the parameters are of: on another rank the optimizer may hold others.
    """
    found = (group_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    contexts = dict.fromkeys(CONTEXTS[group] for group in found if group is not None and group in CONTEXTS)
    return [
        group
        for context in contexts
        for unit in context.units
        if isinstance(unit, FsdpModule)
        for group in unit.parameter_groups
    ]
