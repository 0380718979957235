"""Units under torch.func: `jvp`, `vjp`, `vmap` and their like transform what modules compute, not what we do for it.

Inside a transform tensors are wrapped, and one that an outer backward will reach may say that it needs no gradient. So
gathers and releases run outside of it (`_torch.Untransformed`), and outputs are watched by a function that transforms
know, whatever they say. Inputs are not watched: a forward then has gradients on several paths (primal and tangent), and
only the parameters' own can tell when all of them have passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flatshard.engine.watch.trees import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable


class _OutputReached(torch.autograd.Function):
    """Identity of an output and of its tangent; ``reached`` is called when a gradient comes to either."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reached: Callable[[], None], output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.reached = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.reached()
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> Any:
        return _OutputReached.apply(ctx.reached, tangent)  # type: ignore[no-untyped-call]


def watch_transformed(reached: Callable[[], None], output: Any) -> tuple[Any, bool]:
    """``output`` with every tensor that may get a gradient watched, and whether there is one."""
    if not torch.is_grad_enabled():
        return output, False
    watched = map_tensors(
        lambda t: _OutputReached.apply(reached, t) if t.is_floating_point() or t.is_complex() else t,  # type: ignore[no-untyped-call]
        output,
    )
    return watched, any(t.is_floating_point() or t.is_complex() for t in tensors_in(output))
