"""The bytes that are sent for a layout if some of its tensors are encoded: equal pieces of bytes, one per shard.

An encoded tensor is sent as one byte per element, its *code*, and one scale per block. A block is within one row. Rows
are never split between shards, so blocks are not either, and which elements share a scale depends only on the tensor.
Segments that are not encoded are sent unchanged. The piece of a shard, for two segments of which the first is encoded:

    |codes, in the order of the elements|scales, row by row|piece of the other segment|

There may be one more byte per tensor at the end, which says whether a rank has used it.

Codes and scales are views of one flat buffer of bytes, which one collective gathers or exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from flatshard.layout.planner import ALIGN, Layout, Segment, round_up

SCALE_BYTES = 2  # a bfloat16


class EncodedRows(NamedTuple):
    """Consecutive whole rows of one encoded tensor in one piece. Positions are relative to the start of the piece."""

    segment: int
    at: int  # first element, in the piece of its segment
    codes: int  # first byte
    scales: int  # first byte
    rows: int
    row: int  # elements of one row


class Kept(NamedTuple):
    """A segment that is sent unchanged, from byte ``at`` of each piece."""

    segment: int
    at: int


@dataclass(frozen=True)
class Wire:
    """Made by `wire_of`. ``piece``: bytes of one shard; ``itemsize``: bytes of an element that is not encoded."""

    layout: Layout
    encoded: tuple[bool, ...]
    block: int
    itemsize: int
    piece: int
    pieces: tuple[tuple[EncodedRows, ...], ...]  # per shard, its encoded rows
    kept: tuple[Kept, ...]
    uses_at: int | None = None  # the position of the bytes that say which tensors were used, if there are any

    @cached_property
    def bytes(self) -> Layout:
        """A layout of the pieces, in bytes, to make buffers with."""
        return Layout((), (Segment(self.piece),), self.layout.num_shards)

    @property
    def has_codes(self) -> bool:
        return any(self.encoded)


def encodable(layout: Layout, chosen: Sequence[bool]) -> tuple[bool, ...]:
    """Which chosen tensors can be encoded: those sharded on dim 0, in segments of which all tensors are chosen."""
    mixed = {slot.segment for slot, mark in zip(layout.slots, chosen) if slot.numel and not mark}
    return tuple(
        mark and slot.dim == 0 and slot.numel > 0 and slot.segment not in mixed
        for slot, mark in zip(layout.slots, chosen)
    )


@lru_cache(maxsize=1024)
def wire_of(layout: Layout, encoded: tuple[bool, ...], block: int, itemsize: int, with_uses: bool = False) -> Wire:
    """How the tensors of a layout are sent.

    ``encoded``: from `encodable`. ``itemsize``: bytes per element of tensors that are not encoded. ``with_uses``: add
    the bytes that say which tensors were used.
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
    size = round_up(end + len(layout.slots), ALIGN) if with_uses else end
    return Wire(layout, encoded, block, itemsize, size, tuple(pieces), tuple(kept), end if with_uses else None)
