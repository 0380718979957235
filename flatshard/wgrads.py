"""Weight gradients without a copy: `offer_main_grads` for fused kernels, `direct_wgrads` for linear layers.

Ordinarily autograd makes a weight gradient, and the engine sends it from where it is or, if it has another dtype than
the reduction or its rows are padded, copies it into a staging buffer. Here the product that computes it writes it
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flatshard import _torch
from flatshard.engine.gradients.direct import Destined, destination
from flatshard.engine.tree.build import units_below
from flatshard.module import unit_class


def offer_main_grads(module: nn.Module) -> None:
    """Give the full parameters of all units at and below ``module`` a ``main_grad``, for kernels that write gradients.

    In a backward, ``parameter.main_grad`` is a tensor of the parameter's shape in the reduce dtype, the very place that
    the reduction reads. A kernel adds its weight gradient to it (or writes it, while ``parameter.overwrite_main_grad``)
    and sets ``parameter.grad_added_to_main_grad = True``: what autograd then delivers for this parameter is ignored.
    Under accumulation without reduction it holds what earlier micro-batches have left. Parameters for which no kernel
    does this train as always. Parameters of tensor parallelism, and those that ``shard_placement_fn`` cuts on another
    dim than 0, offer none.
    """
    units = units_below(module) if isinstance(module, nn.Module) else []
    if not units:
        raise ValueError(f"no unit at or below {type(module).__name__}: call fully_shard first")
    for _, unit in units:
        for group in unit.groups:
            group.offer_main_grads()


def direct_wgrads(module: nn.Module) -> int:
    """Let the linear layers of all units at and below ``module`` write their weight gradients into staging themselves.

    The gradient is computed in the reduce dtype: in float32 with bfloat16 weights it is not rounded on the way. Layers
    of exactly `nn.Linear` take part; how many is returned. Under autocast, torch.compile and torch.func they work as
    always, without the gain. The backward of such a layer cannot be differentiated again.
    """
    offer_main_grads(module)
    layers = [layer for layer in module.modules() if type(layer) in (nn.Linear, unit_class(nn.Linear))]
    for layer in layers:
        layer.__class__ = DirectLinear if type(layer) is nn.Linear else unit_class(DirectLinear)
    return len(layers)


class DirectLinear(nn.Linear):
    """`nn.Linear` whose weight gradient goes where the reduction reads it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, Destined) and weight.requires_grad and _is_plain(input):
            out: torch.Tensor = _Linear.apply(input, weight, self.bias)  # type: ignore[no-untyped-call]
            return out
        return super().forward(input)


def _is_plain(input: torch.Tensor) -> bool:
    """Whether the layer is called in a way that `_Linear` covers."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(input.device.type)
        and not _torch.transforming()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Destined, bias: torch.Tensor | None) -> torch.Tensor:
        # What is saved may be recomputed, and then is another object; the place of the gradient is this one's.
        ctx.weight = weight
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    @_torch.uncompiled
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        # First, because the weight may be released as soon as its gradient is there.
        to_input = grad @ weight if needs_input else None
        to_bias = rows.sum(0) if needs_bias else None
        node = ctx.next_functions[1][0]
        if node is not None and _torch.will_be_executed(node):
            gradients, index = destination(ctx.weight)
            place, vacant = gradients.place(index), gradients.is_vacant(index)
            product_into(place, rows.t(), input.reshape(-1, input.shape[-1]), accumulate=not vacant)
            gradients.kernels.wrote(index)
        return to_input, None, to_bias


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> None:
    """Write the matrix product of two matrices of one dtype into ``out``, or add it; computed in the dtype of ``out``.

    On CUDA the product of half-precision matrices can be written in float32; elsewhere they are cast first.
    """
    if left.dtype != out.dtype and left.is_cuda and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    left, right = left.to(out.dtype), right.to(out.dtype)
    out.addmm_(left, right) if accumulate else torch.mm(left, right, out=out)
