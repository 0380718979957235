"""What travels of a layout when some of its tensors are encoded: equal pieces of bytes, one per shard.

An encoded tensor travels as one byte per element, its *code*, and one scale per block. Blocks run along a row and begin
anew with each: rows are never split between shards, so neither are blocks, and which elements share a scale depends on
the tensor alone. Segments that are not encoded travel as they are. The piece of a shard, for two segments of which the
first is encoded:

    |codes of its piece, where its elements would lie|scales, row by row|piece of the other segment|

At its end there may be room for a byte per tensor.

Codes and scales are views into the one run of bytes, which is gathered, or exchanged, by one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from flatshard.layout.planner import ALIGN, Layout, Segment, round_up

SCALE_BYTES = 2  # a bfloat16


class EncodedRows(NamedTuple):
    """Consecutive whole rows of one encoded tensor in one piece. All positions count from the start of the piece."""

    segment: int
    at: int  # first element, in the piece of its segment
    codes: int  # first byte
    scales: int  # first byte
    rows: int
    row: int  # elements of one


class Kept(NamedTuple):
    """A segment that travels as it is, from byte ``at`` of each piece."""

    segment: int
    at: int


@dataclass(frozen=True)
class Wire:
    """Made by `wire_of`. ``piece``: bytes of one shard; ``itemsize``: of an element that is not encoded."""

    layout: Layout
    encoded: tuple[bool, ...]
    block: int
    itemsize: int
    piece: int
    pieces: tuple[tuple[EncodedRows, ...], ...]  # per shard, what of it is encoded
    kept: tuple[Kept, ...]
    told: int | None = None  # first of the bytes per tensor, if there is room for them

    @cached_property
    def bytes(self) -> Layout:
        """The pieces, as a layout of bytes that buffers can be made of."""
        return Layout((), (Segment(self.piece),), self.layout.num_shards, self.layout.placement)

    @property
    def has_codes(self) -> bool:
        return any(self.encoded)


def encodable(layout: Layout, chosen: Sequence[bool]) -> tuple[bool, ...]:
    """Which of the chosen tensors can be encoded: rows are slices of dim 0, and all of their segment is chosen."""
    mixed = {slot.segment for slot, mark in zip(layout.slots, chosen) if slot.numel and not mark}
    return tuple(
        mark and slot.dim == 0 and slot.numel > 0 and slot.segment not in mixed
        for slot, mark in zip(layout.slots, chosen)
    )


@lru_cache(maxsize=1024)
def wire_of(layout: Layout, encoded: tuple[bool, ...], block: int, itemsize: int, tells: bool = False) -> Wire:
    """How tensors of a layout travel. ``encoded``: of `encodable`; ``itemsize``: bytes per element of the others.

    ``tells``: with room for a byte per tensor.
    """
    codes: dict[int, int] = {}
    end = 0
    for slot, mark in zip(layout.slots, encoded):
        if mark and slot.segment not in codes:
            codes[slot.segment] = end
            end = round_up(end + layout.segments[slot.segment].piece, ALIGN)
    pieces = []
    longest = end
    for shard in range(layout.num_shards):
        found, scales = [], end
        for slot, mark in zip(layout.slots, encoded):
            first, rows = layout.rows(slot, shard, 1) if mark else (0, 0)
            if rows:
                at = slot.offset + first * slot.row - shard * layout.segments[slot.segment].piece
                found.append(EncodedRows(slot.segment, at, codes[slot.segment] + at, scales, rows, slot.row))
                scales += SCALE_BYTES * rows * -(-slot.row // block)
        pieces.append(tuple(found))
        longest = max(longest, scales)
    end = round_up(longest, ALIGN)
    kept = []
    for number, segment in enumerate(layout.segments):
        if number not in codes and segment.piece:
            kept.append(Kept(number, end))
            end = round_up(end + itemsize * segment.piece, ALIGN)
    size = round_up(end + len(layout.slots), ALIGN) if tells else end
    return Wire(layout, encoded, block, itemsize, size, tuple(pieces), tuple(kept), end if tells else None)
