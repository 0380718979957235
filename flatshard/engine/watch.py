"""What tells a unit where a backward stands: hooks on the tensors that go into its forward and come out of it."""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from flatshard import _torch
from flatshard.engine.gradients import refuse_orphan
from flatshard.engine.trees import map_tensors, tensors_in

if TYPE_CHECKING:
    from flatshard.engine.unit import Unit


def watch_inputs(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Arguments to call the forward with, so that `Unit.inputs_passed` follows; and whether any needs a gradient."""
    both = (args, kwargs)
    wanted = {id(t): t for t in tensors_in(both) if t.requires_grad}
    if not wanted:
        return args, kwargs, False
    tensors = list(wanted.values())
    if len(tensors) == 1 and type(tensors[0]) is torch.Tensor and tensors[0].layout is torch.strided:
        # A view, for a gradient of its own: others may use the tensor too. Several times cheaper than a function.
        passed = (tensors[0].view_as(tensors[0]),)
        passed[0].register_hook(functools.partial(_inputs_passed, weakref.ref(unit)))
    else:
        passed = _InputsPassed.apply(weakref.ref(unit), *tensors)  # type: ignore[no-untyped-call]
    instead = dict(zip(wanted, passed))
    args, kwargs = map_tensors(lambda t: instead.get(id(t), t), both)
    return args, kwargs, True


def watch_outputs(unit: Unit, output: Any) -> bool:
    """Let `Unit.gradient_at_output` follow when a gradient reaches the output; whether one may."""
    hook = functools.partial(gradient_at_output, weakref.ref(unit))
    watched = False
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)
            watched = True
    return watched


class _InputsPassed(torch.autograd.Function):
    """Identity; its backward runs when the gradients of its inputs are complete."""

    @staticmethod
    def forward(ctx: Any, unit: weakref.ref[Unit], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return tensors

    @staticmethod
    @_torch.uncompiled
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _inputs_passed(ctx.unit)
        return (None, *grads)


@_torch.uncompiled
def _inputs_passed(unit: weakref.ref[Unit], grad: torch.Tensor | None = None) -> None:
    found = unit()
    if found is None:
        refuse_orphan()
    else:
        found.inputs_passed()


@_torch.uncompiled
def gradient_at_output(unit: weakref.ref[Unit], grad: torch.Tensor | None = None) -> None:
    """A hook on an output."""
    found = unit()
    if found is None:
        return
    with _torch.Untransformed() if _torch.transforming() else nullcontext():
        found.gradient_at_output()
