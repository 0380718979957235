"""Which elements of which tensor a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatshard.layout.planner import Layout


@dataclass(frozen=True)
class Holding:
    """The pieces of every segment that a buffer holds: ``count`` consecutive ones from ``first``."""

    first: int
    count: int

    def contains(self, other: Holding) -> bool:
        return self.first <= other.first and other.first + other.count <= self.first + self.count


@dataclass(frozen=True)
class Range:
    """Elements ``start`` to ``stop`` of tensor ``tensor`` (flat, in row-major order), at ``offset`` of the buffer."""

    tensor: int
    start: int
    stop: int
    offset: int


def holding(num_shards: int, mesh_shape: Sequence[int], coordinate: Sequence[int], sharded: Sequence[bool]) -> Holding:
    """The pieces of a layout over ``num_shards`` that the rank at ``coordinate`` of a mesh holds.

    The last axis of the mesh splits first (it is the major one), the axis before it splits each part again, and so on
    until the product of the axes is ``num_shards``. So if both axes (outer, inner) are sharded, the shard of inner rank
    ``i`` is pieces ``i * outer`` to ``(i + 1) * outer``, and it contains the shard of every (outer, inner=i).

    ``sharded``: which axes the buffer is sharded over. If an axis is sharded, all later axes must be, because otherwise
    the pieces would not be consecutive.
    """
    first, count = 0, num_shards
    open_axis = -1
    for axis in reversed(range(len(mesh_shape))):
        if not sharded[axis]:
            open_axis = max(open_axis, axis)
            continue
        if open_axis > axis:
            raise ValueError(
                f"axis {axis} of mesh {tuple(mesh_shape)} is sharded but the later axis {open_axis} is not; shard the "
                "last axes first"
            )
        if count % mesh_shape[axis]:
            raise ValueError(
                f"a layout of {num_shards} shards cannot be split over axis {axis} of mesh {tuple(mesh_shape)}: "
                f"{count} pieces are left for its {mesh_shape[axis]} ranks"
            )
        count //= mesh_shape[axis]
        first += coordinate[axis] * count
    return Holding(first, count)


def local_ranges(layout: Layout, held: Holding) -> Iterator[Range]:
    """The non-empty tensor ranges in a buffer that holds ``held``, in the order of the tensors."""
    starts = layout.run_starts(held.count)
    for index, slot in enumerate(layout.slots):
        if slot.dim:
            raise ValueError(f"tensor {index} is sharded on dim {slot.dim}; only shards on dim 0 are ranges")
        piece = layout.segments[slot.segment].piece
        low, high = held.first * piece, (held.first + held.count) * piece
        begin, end = max(low, slot.offset), min(high, slot.stop)
        if begin < end:
            yield Range(index, begin - slot.offset, end - slot.offset, starts[slot.segment] + begin - low)
