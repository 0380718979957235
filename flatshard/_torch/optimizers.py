"""Optimizers: uses the wrapper of learning-rate schedulers around a step, hooks, and the rule that loads state."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer


def take_scheduler_patch(optimizer: Optimizer) -> bool:
    """Remove the wrapper of a learning-rate scheduler around ``step`` of an instance. Returns whether there was one."""
    if not hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        return False
    del optimizer.__dict__["step"]
    return True


def put_scheduler_patch(optimizer: Optimizer) -> None:
    """Notify a scheduler of steps, if it was created before the class of the optimizer was changed."""
    known = weakref.ref(optimizer)
    step = type(optimizer).step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        found: Any = known()
        found._opt_called = True
        return step(found, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = tracked


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer has hooks of ``register_step_pre_hook``."""
    return bool(optimizer._optimizer_step_pre_hooks)


@contextmanager
def loading_to_host() -> Iterator[None]:
    """Within it, `Optimizer.load_state_dict` loads state to host memory, not to the devices of parameters."""
    name = "_process_value_according_to_param_policy"
    rule = getattr(Optimizer, name)

    def to_host(param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return rule(torch.empty(0, dtype=param.dtype), value, *args, **kwargs)

    with patch.object(Optimizer, name, staticmethod(to_host)):
        yield
