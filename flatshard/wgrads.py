"""Weight gradients without a copy: `offer_main_grads` for fused kernels, `direct_wgrads` for linear layers.

By default, autograd allocates a weight gradient, and the engine reduces it in place or, if the reduce dtype differs or
rows are padded, copies it into a staging buffer. Here the kernel that computes the gradient writes into that buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flatshard import _torch
from flatshard.engine.gradients.direct import ParameterWithMainGrad, owner_of_main_grad
from flatshard.engine.tree.build import units_below
from flatshard.module import unit_class


def offer_main_grads(module: nn.Module) -> None:
    """Give the full parameters of all units at and below ``module`` a ``main_grad``, for kernels that write gradients.

    In a backward, ``parameter.main_grad`` is a tensor of the parameter's shape in the reduce dtype, in the buffer that
    is reduced. A kernel adds its weight gradient to it (or writes it, if ``parameter.overwrite_main_grad``) and sets
    ``parameter.grad_added_to_main_grad = True``; then the gradient that autograd returns for this parameter is ignored.
    During gradient accumulation without reduction, it holds the sum of earlier micro-batches. Parameters whose kernels
    do not use it train as usual. Tensor-parallel parameters, and those that ``shard_placement_fn`` shards on another
    dim than 0, have no ``main_grad``.
    """
    units = units_below(module) if isinstance(module, nn.Module) else []
    if not units:
        raise ValueError(f"no parameter of {type(module).__name__} is sharded; call fully_shard first")
    for _, unit in units:
        for group in unit.groups:
            group.offer_main_grads()


def direct_wgrads(module: nn.Module) -> int:
    """Let the linear layers of all units at and below ``module`` write weight gradients into the reduce's buffer.

    The gradient is computed in the reduce dtype: in float32 it is not rounded to bfloat16 first. This applies to layers
    of exactly the class `nn.Linear`; returns how many. Under autocast, torch.compile and torch.func they work as usual,
    without the gain. The backward of such a layer cannot be differentiated again.
    """
    offer_main_grads(module)
    layers = [layer for layer in module.modules() if type(layer) in (nn.Linear, unit_class(nn.Linear))]
    for layer in layers:
        layer.__class__ = DirectLinear if type(layer) is nn.Linear else unit_class(DirectLinear)
    return len(layers)


class DirectLinear(nn.Linear):
    """`nn.Linear` that writes its weight gradient into the buffer that is reduced."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, ParameterWithMainGrad) and weight.requires_grad and _is_plain(input):
            out: torch.Tensor = _Linear.apply(input, weight, self.bias)  # type: ignore[no-untyped-call]
            return out
        return super().forward(input)


def _is_plain(input: torch.Tensor) -> bool:
    """Whether `_Linear` supports this call."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(input.device.type)
        and not _torch.transforming()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: ParameterWithMainGrad, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # A saved tensor may be recomputed and then is another object; the gradient belongs to this one.
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
        # First, because the weight may be freed as soon as its gradient is written.
        to_input = grad @ weight if needs_input else None
        to_bias = rows.sum(0) if needs_bias else None
        node = ctx.next_functions[1][0]
        if node is not None and _torch.will_be_executed(node):
            gradients, index = owner_of_main_grad(ctx.weight)
            place, vacant = gradients.place(index), gradients.is_vacant(index)
            product_into(place, rows.t(), input.reshape(-1, input.shape[-1]), accumulate=not vacant)
            gradients.kernels.wrote(index)
        return to_input, None, to_bias


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> None:
    """Write the product of two matrices of one dtype into ``out``, or add it; it is computed in the dtype of ``out``.

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
