# mypy: disable-error-code="import-not-found,import-untyped,no-redef,untyped-decorator,no-untyped-def,unused-ignore"
"""The operations of `blocks.py` as Triton kernels, one launch each, with the same bits.

A `Table` lists the rows that a launch goes through, and which tile of them each program has. Without Triton, or on a
CPU, `usable` says no and nothing here is called.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

triton: Any
tl: Any
try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA has none
    triton = tl = None

_TILE = 2048  # elements that one program encodes or decodes
_FIELDS = 5
_VECTOR = 16  # bytes, and elements of one byte
_OFF = os.environ.get("FLATSHARD_KERNELS", "1").strip() == "0"  # to compare with torch's operations


def usable(tensor: torch.Tensor) -> bool:
    """Whether there are kernels for tensors like this."""
    return triton is not None and tensor.is_cuda and not _OFF


class Table:
    """Rows for a kernel: where their elements, codes and scales begin, how many there are, elements of one."""

    def __init__(self, rows: Sequence[tuple[int, ...]], block: int, device: torch.device) -> None:
        self.block, self.tile = block, max(_TILE // block, 1)
        fields = torch.tensor(list(rows), dtype=torch.int64).view(-1, _FIELDS)
        blocks = fields[:, 3] * -(-fields[:, 4] // block)
        tiles = -(-blocks // self.tile)
        number = torch.repeat_interleave(torch.arange(len(fields)), tiles)
        within = torch.arange(len(number)) - (tiles.cumsum(0) - tiles)[number]
        self.count = len(number)
        # Then blocks lie one after the other, and a program's elements are one stretch that can be read in vectors.
        self.is_even = bool((fields[:, 4] % block == 0).all() and (fields[:, :2] % _VECTOR == 0).all())
        self.fields = fields.to(device)
        self.tiles = torch.stack([number, within], dim=1).to(torch.int32).to(device)


def encode(table: Table, code: str, source: torch.Tensor, out: torch.Tensor, noise: torch.Tensor | None) -> None:
    """As `Coder.encode`, for rows of one tensor."""
    if table.count:
        _encode[(table.count,)](
            source,
            out.view(torch.int8),
            out.view(torch.bfloat16),
            table.fields,
            table.tiles,
            source if noise is None else noise,
            SHARE=1.0 / LARGEST[code],
            CODE=_CODES[code],
            NOISY=noise is not None,
            BLOCK=table.block,
            TILE=table.tile,
            EVEN=table.is_even,
            enable_fp_fusion=False,
        )


def decode(table: Table, code: str | None, given: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """As `Coder.decode`, for what is encoded, or for the rest (``code`` is None)."""
    if table.count:
        ranks, stride = given.shape
        flat = given.view(-1)
        _decode[(table.count,)](
            flat if code is None else flat.view(torch.int8),
            flat if code is None else flat.view(torch.bfloat16),
            out,
            table.fields,
            table.tiles,
            ranks,
            stride,
            factor,
            CODE=_CODES[code],
            BLOCK=table.block,
            TILE=table.tile,
            EVEN=table.is_even and stride % _VECTOR == 0,
            enable_fp_fusion=False,
        )


LARGEST = {"int8": 127.0, "float8": 448.0}  # codes
_CODES = {None: 0, "int8": 1, "float8": 2}

if triton is not None:

    @triton.jit
    def _blocks(fields, tiles, BLOCK: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr):
        """Of this program: the first element, code and scale of its rows, and its blocks and elements among those."""
        program = tl.program_id(0)
        entry = fields + 5 * tl.load(tiles + 2 * program).to(tl.int64)
        first = tl.load(tiles + 2 * program + 1).to(tl.int64) * TILE
        rows = tl.load(entry + 3)
        row = tl.load(entry + 4)
        per_row = (row + BLOCK - 1) // BLOCK
        block = first + tl.arange(0, TILE)
        exists = block < rows * per_row
        if EVEN:
            at, code = tl.multiple_of(tl.load(entry), 16), tl.multiple_of(tl.load(entry + 1), 16)
            place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            return at, code, tl.load(entry + 2) + block, exists, place, tl.broadcast_to(exists[:, None], (TILE, BLOCK))
        column = (block % per_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        place = (block // per_row)[:, None] * row + column
        inside = exists[:, None] & (column < row)
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) + block, exists, place, inside

    @triton.jit
    def _mixed(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _encode(
        source,
        codes,
        scales,
        fields,
        tiles,
        noise,
        SHARE: tl.constexpr,
        CODE: tl.constexpr,
        NOISY: tl.constexpr,
        BLOCK: tl.constexpr,
        TILE: tl.constexpr,
        EVEN: tl.constexpr,
    ):
        at, code, scale_at, exists, place, inside = _blocks(fields, tiles, BLOCK, TILE, EVEN)
        value = tl.load(source + at + place, mask=inside, other=0.0).to(tl.float32)
        # As integers, magnitudes have the order of their values, and NaN is above all of them.
        most = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        is_finite = most < 0x7F800000
        share = most.to(tl.float32, bitcast=True) * SHARE
        rounded_up = ((share.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
        scale = tl.where(is_finite, tl.maximum(rounded_up, 1.1754943508222875e-38), 1.0)
        inverse = tl.math.div_rn(tl.full([TILE], 1.0, tl.float32), scale)
        unit = tl.where(is_finite[:, None], value * inverse[:, None], 0.0)
        if CODE == 1:
            if NOISY:
                seed = _mixed(tl.load(noise).to(tl.uint32))
                random = _mixed((code + place).to(tl.uint32) ^ seed) >> 8
                unit = tl.floor(unit + random.to(tl.float32) * 5.9604644775390625e-08)
            else:
                unit = (unit + 12582912.0) - 12582912.0  # to the nearest whole number, of two the even one
            coded = tl.minimum(tl.maximum(unit, -127.0), 127.0).to(tl.int8)
        else:
            coded = unit.to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.int8, bitcast=True)
        tl.store(codes + code + place, coded, mask=inside)
        tl.store(scales + scale_at, tl.where(is_finite, scale, float("nan")).to(tl.bfloat16), mask=exists)

    @triton.jit
    def _decode(
        codes,
        scales,
        out,
        fields,
        tiles,
        ranks,
        stride,
        factor,
        CODE: tl.constexpr,
        BLOCK: tl.constexpr,
        TILE: tl.constexpr,
        EVEN: tl.constexpr,
    ):
        at, code, scale_at, exists, place, inside = _blocks(fields, tiles, BLOCK, TILE, EVEN)
        total = tl.zeros([TILE, BLOCK], tl.float32)
        for _ in range(ranks):
            coded = tl.load(codes + code + place, mask=inside, other=0)
            if CODE == 0:
                value = coded.to(tl.float32)
            else:
                scale = tl.load(scales + scale_at, mask=exists, other=0.0).to(tl.float32)
                if CODE == 2:
                    value = coded.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
                else:
                    value = coded.to(tl.float32) * scale[:, None]
            total += value
            codes += stride
            scales += stride // 2
        tl.store(out + at + place, (total * factor).to(out.dtype.element_ty), mask=inside)
