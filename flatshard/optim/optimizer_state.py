"""What checkpoints save and load of an optimizer, and what captured steps read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.optim.combined import CombinedOptimizer
from flatshard.optim.local_step import STEPPER, LocalStep
from flatshard.optim.whole_step import CAPTURED, WholeStep


def saved_state(optimizer: Optimizer) -> Mapping[Any, Any]:
    """The state of an optimizer by parameter, with the same entries on all ranks, to be saved. All ranks call it."""
    state: dict[Any, Any] = {}
    for each, stepper in _steppers(optimizer):
        state.update(stepper.saved_state(each) if isinstance(stepper, WholeStep) else each.state)
    return state


def _steppers(optimizer: Optimizer) -> list[tuple[Optimizer, Any]]:
    """An optimizer, or those that it combines, each with its stepper, if any."""
    parts = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    return [(each, each.__dict__.get(STEPPER)) for each in parts]


def owner_of_entries(optimizer: Optimizer) -> Callable[[torch.Tensor, Iterable[str]], dict[str, bool] | None]:
    """Says which entries of the state of a parameter this rank is to have; None of one that is not whole.

    ValueError for entries of a parameter that was split in another way.
    """
    steppers: dict[torch.Tensor, WholeStep] = {}
    for each, stepper in _steppers(optimizer):
        if isinstance(stepper, WholeStep):
            stepper.plan(each)
            steppers.update(dict.fromkeys(stepper.parts, stepper))

    def owned(parameter: torch.Tensor, keys: Iterable[str]) -> dict[str, bool] | None:
        stepper = steppers.get(parameter)
        return None if stepper is None else stepper.owned(parameter, keys)

    return owned


def state_devices(optimizer: Optimizer) -> dict[torch.Tensor, torch.device]:
    """Where the state of each parameter is to be loaded to."""
    devices: dict[torch.Tensor, torch.device] = {}
    for each, stepper in _steppers(optimizer):
        offloads = isinstance(stepper, LocalStep) and stepper.offload_state
        parameters = (p for group in each.param_groups for p in group["params"])
        devices.update({p: torch.device("cpu") if offloads else p.device for p in parameters})
    return devices


def _captured(optimizer: Optimizer) -> LocalStep | None:
    local: LocalStep | WholeStep | None = optimizer.__dict__.get(STEPPER)
    if isinstance(local, WholeStep):
        raise NotImplementedError(CAPTURED)
    if local is not None and local.offload_state:
        raise ValueError(
            f"{type(optimizer).__name__} has offload_state=True, which cannot be captured; leave it out, or call "
            "optimizer.step() outside of the captured step"
        )
    return local


def is_settled(optimizer: Optimizer) -> bool:
    """Before a step is captured: whether it need not read changes of its state."""
    local = _captured(optimizer)
    return local is None or local.settle()


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The local tensors that a step of an optimizer reads and writes."""
    local = _captured(optimizer)
    states = optimizer.state if local is None else local.flat_state  # which does not count as reading the state
    values = [_torch.held_of(value) for state in states.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def state_places(optimizer: Optimizer) -> list[object]:
    """The addresses of an optimizer's state, to detect later changes."""
    return [id(optimizer.__dict__["state"]), *[tensor.data_ptr() for tensor in state_tensors(optimizer)]]
