"""Placements of a buffer along mesh axes, and which pieces of a layout a rank then holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same values."""


@dataclass(frozen=True)
class Partial:
    """Every rank holds a full-size term; the value is the sum (``"sum"``) or the mean (``"avg"``) of all terms."""

    op: Literal["sum", "avg"] = "sum"

    def __post_init__(self) -> None:
        if self.op not in ("sum", "avg"):
            raise ValueError(f"Partial(op={self.op!r}): op must be 'sum' or 'avg'")


@dataclass(frozen=True)
class Flat:
    """Split into equal pieces, one per rank; a row (a slice of dim 0) is never split."""


Placement: TypeAlias = Replicate | Partial | Flat


def is_sharded(placement: Placement) -> bool:
    """Whether each rank of the axis holds a different part of the buffer."""
    return isinstance(placement, Flat)


@dataclass(frozen=True)
class Holding:
    """The pieces of every segment that a buffer holds: ``count`` consecutive ones from ``first``."""

    first: int
    count: int

    def contains(self, other: Holding) -> bool:
        return self.first <= other.first and other.first + other.count <= self.first + self.count


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
                f"Flat placements must be a suffix: axis {axis} of mesh {tuple(mesh_shape)} is sharded, and the later "
                f"axis {open_axis} is not; shard the last axes first"
            )
        if count % mesh_shape[axis]:
            raise ValueError(
                f"a layout of {num_shards} shards cannot be split over axis {axis} of mesh {tuple(mesh_shape)}: "
                f"{count} pieces are left for its {mesh_shape[axis]} ranks"
            )
        count //= mesh_shape[axis]
        first += coordinate[axis] * count
    return Holding(first, count)
