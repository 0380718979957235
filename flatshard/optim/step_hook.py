"""A hook before the step of every optimizer of the process: it checks the parameters, and waits for their gradients."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard.engine import steps
from flatshard.engine.groups.registry import generation, group_of
from flatshard.engine.schedule.reduces import join_reduces
from flatshard.optim.adamw8bit import AdamW8bit
from flatshard.optim.combined import CombinedOptimizer
from flatshard.optim.local_step import STEPPER, LocalStep, refuse_replaced, takeovers, wrap_scalars
from flatshard.optim.refusals import refuse_foreign_blocks, refuse_sharded_matrices, refuse_stepped
from flatshard.optim.step import plan_whole
from flatshard.optim.unsharded import warn_of_unsharded
from flatshard.optim.whole_step import WholeStep

_CHECKED = "_flatshard_checked"  # on an optimizer: when it was checked last, and what was found


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before every step of every optimizer: reads parameters only if they may have changed.

    In a compiled step it is traced, and only counts.
    """
    if isinstance(optimizer, CombinedOptimizer):  # its optimizers are checked in their own steps
        return
    if torch.compiler.is_compiling():
        steps.note()
        return
    steps.taken()  # so that a step before this one counts by itself
    steps.note()
    stepper = optimizer.__dict__.get(STEPPER)
    if stepper is not None and stepper.is_stepping:  # the step of a class has called that of its base
        return
    join_reduces(to_host=not isinstance(stepper, LocalStep))
    now = (generation(), takeovers(), sum(len(group["params"]) for group in optimizer.param_groups))
    if not now[0]:
        return  # nothing has been sharded
    known = optimizer.__dict__.get(_CHECKED)
    if known is None or known[0] != now:
        refuse_replaced(optimizer)
        refuse_stepped(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        warn_of_unsharded(parameters)
        if isinstance(stepper, WholeStep):  # parameters may have been added
            plan_whole(optimizer, stepper)
        if stepper is None:
            managed = [p for p in parameters if group_of(p) is not None]  # others' DTensors are theirs to step
            refuse_sharded_matrices(optimizer, managed)
            if any(isinstance(parameter, DTensor) for parameter in managed):
                refuse_foreign_blocks(optimizer)
            for parameter in managed if not isinstance(optimizer, AdamW8bit) else ():  # which casts them itself
                group = group_of(parameter)
                if group is None or group.own_grad_dtype is not None:  # as the user has asked for
                    continue
                if isinstance(parameter.grad, DTensor) and parameter.grad.dtype != parameter.dtype:
                    raise RuntimeError(
                        f"gradients have dtype {parameter.grad.dtype} and main weights {parameter.dtype}; call "
                        "fully_shard_optimizer(optimizer), which casts them"
                    )
        groups = dict.fromkeys(map(group_of, parameters))
        refs = [weakref.ref(group) for group in groups if group is not None]
        scalars = [p for p in parameters if isinstance(p, DTensor) and p.dim() == 0]
        known = optimizer.__dict__[_CHECKED] = now, refs, scalars
    for ref in known[1]:
        group = ref()
        if group is not None:
            group.steps_taken += 1
    for parameter in known[2] if stepper is None else ():
        wrap_scalars(parameter, optimizer.state)


@functools.cache
def watch_steps() -> None:
    """From now on, check every optimizer of this process before it steps."""
    register_optimizer_step_pre_hook(_before_step)
