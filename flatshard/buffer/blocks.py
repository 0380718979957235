"""Encoding and decoding of buffers that are sent as a `Wire`: one byte per element, and a scale per block of a row.

The scale of a block is its largest magnitude divided by the largest code, rounded up to a bfloat16. A code times a
bfloat16 is exact in float32, so decoding always gives the same bits: in forward and backward, on any number of ranks,
on a CPU and on a GPU. A block with a NaN or an infinity has the scale NaN, and is decoded to NaN.

Triton kernels (`kernels.py`) are used if Triton is available; the torch operations in this file give the same bits
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch.nn import functional as F

from flatshard.buffer import kernels
from flatshard.layout import Holding, Wire

Code: TypeAlias = Literal["int8", "float8"]
DTYPES: dict[Code, torch.dtype] = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
SCALE = torch.bfloat16
_LEAST = 2.0**-126  # the smallest scale: below it, devices round differently
_LOW = 0xFFFFFFFF


class Coder:
    """Converts between the runs of a buffer and the bytes of a `Wire`. ``dtype`` is that of unencoded segments.

    ``held``: the pieces that the buffer holds, as in `flatshard.layout.holding`. Their bytes follow one another.
    """

    def __init__(self, wire: Wire, code: Code, dtype: torch.dtype) -> None:
        self.wire, self.code, self.dtype = wire, code, dtype
        self._tables: dict[object, kernels.Table] = {}

    def encode(
        self, runs: Sequence[torch.Tensor], held: Holding, out: torch.Tensor, noise: torch.Tensor | None = None
    ) -> None:
        """Write the bytes of ``runs``, one run per segment that is not empty, into ``out``.

        ``noise``: an int64 on the device, the seed of stochastic rounding.
        """
        wire, layout = self.wire, self.wire.layout
        by_segment = dict(zip((n for n, segment in enumerate(layout.segments) if segment.piece), runs))
        if wire.kept:
            places = [self._kept(out, at, layout.segments[segment].piece) for segment, at in wire.kept]
            values = [by_segment[kept.segment].view(held.count, -1) for kept in wire.kept]
            torch._foreach_copy_([place[0] for place in places], values)
        segments = {slot.segment for slot, mark in zip(layout.slots, wire.encoded) if mark}
        for base, starts in _bases({n: run for n, run in by_segment.items() if n in segments}):
            if kernels.usable(out):
                kernels.encode(self._table(held, starts, out.device), self.code, base, out, noise)
                continue
            for at, codes, scales, rows, row in entries(wire, held, starts):
                matrix = base[at : at + rows * row].view(rows, row)
                u = None if noise is None else uniform(noise, codes, matrix.numel()).view(rows, row)
                coded, scale = encode_rows(matrix, self.code, wire.block, u)
                out[codes : codes + coded.numel()].view(DTYPES[self.code]).view_as(coded).copy_(coded)
                out[scales : scales + 2 * scale.numel()].view(SCALE).view_as(scale).copy_(scale)

    def unencoded(self, runs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The bytes of the only run, if it can be sent from where it is; else None."""
        wire, (first, *more) = self.wire, runs
        if more or wire.has_codes or first.dtype != self.dtype:
            return None
        size = wire.layout.segments[wire.kept[0].segment].piece * self.dtype.itemsize
        return first.view(torch.uint8) if size == wire.piece else None

    def decode(self, given: torch.Tensor, held: Holding, out: torch.Tensor, factor: float = 1.0) -> None:
        """Decode bytes into a buffer that holds ``held``; add those of several ranks, and multiply by ``factor``.

        ``given`` has one row per rank. They are added in this order, in float32, or in float64 if they are sent in it.
        """
        wire, layout = self.wire, self.wire.layout
        starts = dict(enumerate(layout.run_starts(held.count)))
        if wire.kept:
            self._decode_kept(given, held, starts, out, factor)
        if not wire.has_codes:
            return
        if kernels.usable(out):
            kernels.decode(self._table(held, starts, out.device), self.code, given, out, factor)
            return
        for at, codes, scales, rows, row in entries(wire, held, starts):
            total = torch.zeros((rows, row), device=out.device)
            per_row = -(-row // wire.block)
            for bytes_of in given:
                coded = bytes_of[codes : codes + rows * row].view(DTYPES[self.code]).view(rows, row)
                scale = bytes_of[scales : scales + 2 * rows * per_row].view(SCALE).view(rows, per_row)
                total += decode_rows(coded, scale, wire.block)
            out[at : at + rows * row].copy_(total.mul_(factor).view(-1))

    def _decode_kept(
        self, given: torch.Tensor, held: Holding, starts: dict[int, int], out: torch.Tensor, factor: float
    ) -> None:
        layout = self.wire.layout
        sizes = [layout.segments[kept.segment].piece for kept in self.wire.kept]
        places = [
            out.narrow(0, starts[kept.segment], held.count * size).view(held.count, size)
            for kept, size in zip(self.wire.kept, sizes)
        ]
        wide = torch.promote_types(self.dtype, torch.float32)
        if len(given) > 1 and wide is torch.float32 and kernels.usable(out):
            key = (held, "kept", out.device)
            if key not in self._tables:
                kept = [
                    (
                        starts[segment] + number * size,
                        (number * self.wire.piece + at) // self.dtype.itemsize,
                        0,
                        1,
                        size,
                    )
                    for (segment, at), size in zip(self.wire.kept, sizes)
                    for number in range(held.count)
                ]
                self._tables[key] = kernels.Table(kept, self.wire.block, out.device)
            kernels.decode(self._tables[key], None, given.view(self.dtype), out, factor)
            return
        parts = [self._kept(given, kept.at, size) for kept, size in zip(self.wire.kept, sizes)]
        if len(given) == 1 and factor == 1.0:
            torch._foreach_copy_(places, [part[0] for part in parts])
            return
        for place, part in zip(places, parts):
            total = torch.zeros(place.shape, dtype=wide, device=place.device)
            for of_rank in part:
                total += of_rank
            place.copy_(total.mul_(factor))

    def _kept(self, given: torch.Tensor, at: int, size: int) -> torch.Tensor:
        """A view of a segment that is not encoded in the bytes of one or more ranks: rank, piece, element."""
        pieces = given.view(-1, given.shape[-1] // self.wire.piece, self.wire.piece)
        return pieces[:, :, at : at + size * self.dtype.itemsize].view(self.dtype)

    def _table(self, held: Holding, starts: dict[int, int], device: torch.device) -> kernels.Table:
        key = (held, tuple(starts.items()), device)
        if key not in self._tables:
            found = [(at, codes, scales // 2, *rest) for at, codes, scales, *rest in entries(self.wire, held, starts)]
            self._tables[key] = kernels.Table(found, self.wire.block, device)
        return self._tables[key]


def entries(wire: Wire, held: Holding, starts: dict[int, int]) -> list[tuple[int, int, int, int, int]]:
    """Encoded rows: their first element in a tensor, byte of codes, byte of scales, number, and elements per row.

    ``starts``: where the runs of some segments begin in that tensor; others are left out.
    """
    found = []
    for number in range(held.count):
        for each in wire.pieces[held.first + number]:
            if each.segment in starts:
                start = starts[each.segment] + number * wire.layout.segments[each.segment].piece
                base = number * wire.piece
                found.append((start + each.at, base + each.codes, base + each.scales, each.rows, each.row))
    return found


def _bases(runs: dict[int, torch.Tensor]) -> list[tuple[torch.Tensor, dict[int, int]]]:
    """Runs by storage: a flat tensor of the storage, and where the run of each segment begins in it."""
    by_storage: dict[int, tuple[torch.Tensor, dict[int, int]]] = {}
    for segment, run in runs.items():
        storage = run.untyped_storage()
        if storage._cdata not in by_storage:
            base = run.as_strided((storage.nbytes() // run.element_size(),), (1,), 0)
            by_storage[storage._cdata] = base, {}
        by_storage[storage._cdata][1][segment] = int(run.storage_offset())
    return list(by_storage.values())


def scale_of(most: torch.Tensor, code: Code) -> torch.Tensor:
    """The scales of blocks with these largest magnitudes: bfloat16 values in float32."""
    bits = (most * (1.0 / kernels.LARGEST[code])).view(torch.int32)
    rounded_up = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).clamp_(min=_LEAST)
    return torch.where(most.isfinite(), rounded_up, torch.nan)


def encode_rows(
    values: torch.Tensor, code: Code, block: int, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of rows and the scales of their blocks. ``noise``: from [0, 1), added before rounding down."""
    rows, row = values.shape
    per_row = -(-row // block)
    padding = (0, per_row * block - row)
    blocks = F.pad(values.to(torch.float32), padding).view(rows, per_row, block)
    scale = scale_of(blocks.abs().amax(-1), code)
    units = blocks * torch.ones_like(scale).div_(scale)[..., None]
    units = torch.where(scale.isnan()[..., None], 0.0, units)
    if code == "int8":
        if noise is None:
            units = units.round_()
        else:
            units = units.add_(F.pad(noise, padding).view_as(units)).floor_()
        units = units.clamp_(-127.0, 127.0)
    return units.to(DTYPES[code]).view(rows, -1)[:, :row], scale.to(SCALE)


def decode_rows(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """The values, in float32, of the codes of rows."""
    row = codes.shape[1]
    each = scales.to(torch.float32).repeat_interleave(block, dim=1)[:, :row]
    return codes.to(torch.float32) * each


def uniform(noise: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Random float32 numbers from [0, 1) for places from ``first`` on. Each depends on seed and place alone."""
    places = torch.arange(first, first + count, device=noise.device, dtype=torch.int64)
    return (_mixed((places & _LOW) ^ _mixed(noise & _LOW)) >> 8).to(torch.float32) * 2.0**-24


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
