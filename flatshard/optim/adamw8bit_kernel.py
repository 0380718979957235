# mypy: disable-error-code="untyped-decorator,no-untyped-def,unused-ignore"
"""A step of `AdamW8bit` as one Triton kernel, with the bits of torch's operations on the same device.

Torch needs about 45 launches, each of which reads and writes a float32 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.buffer.kernels import tl, triton

_TILE = 8  # blocks that one program steps


def step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    codes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    block: int,
    factors: Sequence[float],
) -> None:
    """Step contiguous tensors of one parameter in place. ``factors``: those of `_step`, in its order."""
    row, blocks = weight.shape[1:].numel(), scales[0].numel()
    if blocks:
        _step[(triton.cdiv(blocks, _TILE),)](
            weight,
            gradient,
            *codes,
            *scales,
            row,
            blocks,
            *factors,
            BLOCK=block,
            TILE=_TILE,
            enable_fp_fusion=False,
        )
        torch.autograd.graph.increment_version(weight)  # as torch's operations do


if triton is not None:

    @triton.jit
    def _largest(value):
        """The largest magnitude of each block; NaN if one of its elements is."""
        # As integers, magnitudes have the order of their values, and NaN is above all of them.
        return tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)

    @triton.jit
    def _rounded(value, most):
        whole = (value + 12582912.0) - 12582912.0  # to the nearest whole number, or the even one of two
        return tl.minimum(tl.maximum(whole, -most), most)

    @triton.jit
    def _step(
        weights,
        gradients,
        firsts,
        seconds,
        first_scales,
        second_scales,
        row,
        blocks,
        decay,
        beta1,
        rest1,
        beta2,
        rest2,
        unbias1,
        unbias2,
        eps,
        lr,
        BLOCK: tl.constexpr,
        TILE: tl.constexpr,
    ):
        block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        exists = block < blocks
        per_row = (row + BLOCK - 1) // BLOCK
        column = (block % per_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        place = (block // per_row)[:, None] * row + column
        inside = exists[:, None] & (column < row)

        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(firsts + place, mask=inside, other=0).to(tl.float32) * (1.0 / 127)
        scale = tl.load(first_scales + block, mask=exists, other=0.0)
        first = part * tl.abs(part) * scale[:, None] * beta1 + gradient * rest1
        part = tl.load(seconds + place, mask=inside, other=0).to(tl.float32) * (1.0 / 255)
        part = part * part
        scale = tl.load(second_scales + block, mask=exists, other=0.0)
        second = part * part * scale[:, None] * beta2 + gradient * gradient * rest2

        largest = _largest(first)
        tl.store(first_scales + block, largest, mask=exists)
        part = tl.math.div_rn(first, tl.maximum(largest, 1.1754943508222875e-38)[:, None])
        root = tl.math.sqrt_rn(tl.abs(part))
        coded = _rounded(tl.where(part < 0, -root, root) * 127.0, 127.0)
        tl.store(firsts + place, coded.to(tl.int8), mask=inside)
        largest = _largest(second)
        tl.store(second_scales + block, largest, mask=exists)
        part = tl.math.div_rn(second, tl.maximum(largest, 1.1754943508222875e-38)[:, None])
        coded = _rounded(tl.math.sqrt_rn(tl.math.sqrt_rn(part)) * 255.0, 255.0)
        tl.store(seconds + place, coded.to(tl.uint8), mask=inside)

        # The update is that of the moments before they were rounded.
        update = tl.math.div_rn(first * unbias1, tl.math.sqrt_rn(second * unbias2) + eps) * lr
        weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32) * decay - update
        tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=inside)
