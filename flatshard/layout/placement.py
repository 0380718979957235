"""Placements of a buffer along one mesh axis, and the operations that change one into another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
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


@dataclass(frozen=True)
class Block:
    """As `Flat`, but blocks of ``rows`` rows, counted from the first row of a tensor, are never split."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"Block(rows={self.rows}): rows must be at least 1")


@dataclass(frozen=True)
class Whole:
    """Split into equal pieces, one per rank; a tensor is never split."""


Placement: TypeAlias = Replicate | Partial | Flat | Block | Whole


def is_sharded(placement: Placement) -> bool:
    """Whether each rank of the axis holds a different part of the buffer."""
    return isinstance(placement, (Flat, Block, Whole))


class Transition(Enum):
    """The operation that changes the placement of one axis."""

    NONE = "none"
    SCATTER = "scatter"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


def transition(source: Placement, target: Placement) -> Transition:
    """The operation that changes an axis from ``source`` to ``target``; ValueError if there is none.

    Nothing can become `Partial`, because a value can be divided into terms in many ways. A sharded axis keeps the
    layout that it was planned for.
    """
    if source == target:
        return Transition.NONE
    if isinstance(target, Partial) or (is_sharded(source) and is_sharded(target)):
        raise ValueError(f"a buffer cannot go from {source} to {target}")
    if isinstance(source, Partial):
        return Transition.REDUCE_SCATTER if is_sharded(target) else Transition.ALL_REDUCE
    if isinstance(source, Replicate):
        return Transition.SCATTER
    return Transition.ALL_GATHER
