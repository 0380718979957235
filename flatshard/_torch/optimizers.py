"""Optimizers: uses the wrapper that learning-rate schedulers put around the step of an instance."""

from __future__ import annotations

import functools
import weakref
from typing import Any

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
