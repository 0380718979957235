"""Units under torch.func: `jvp`, `vjp`, `vmap` and similar transforms apply to modules, not to flatshard's hooks.

Inside a transform tensors are wrapped, and ``requires_grad`` may be False on a tensor that an outer backward will
reach. So all-gathers and releases run outside of it (`_torch.Untransformed`), and an autograd function that supports
transforms watches all outputs. Inputs are not watched: a forward then has gradients on several paths (primal and
tangent), and only the hooks of the parameters show when all of them are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flatshard.engine.watch.trees import map_tensors, tensors_in


class _OutputReached(torch.autograd.Function):
    """Identity of an output and of its tangent; ``reached`` is called when a gradient reaches either."""

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
    wanted = {id(t) for t in tensors_in(output) if t.is_floating_point() or t.is_complex()}
    watched = map_tensors(lambda t: _OutputReached.apply(reached, t) if id(t) in wanted else t, output)  # type: ignore[no-untyped-call]
    return watched, bool(wanted)
