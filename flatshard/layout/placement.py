"""Placements of a buffer along one mesh axis, and what it takes to change one into another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same values."""


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend of the full size; the value is their sum (``"sum"``) or mean (``"avg"``)."""

    op: Literal["sum", "avg"] = "sum"

    def __post_init__(self) -> None:
        if self.op not in ("sum", "avg"):
            raise ValueError(f"Partial(op={self.op!r}): op must be 'sum' or 'avg'")


@dataclass(frozen=True)
class Flat:
    """Cut into equal pieces, one per rank; a row (a slice of dim 0) is never split."""


@dataclass(frozen=True)
class Block:
    """As `Flat`, but ``rows`` consecutive rows of a tensor, counted from its first, stay together."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"Block(rows={self.rows}): rows must be at least 1")


@dataclass(frozen=True)
class Whole:
    """Cut into equal pieces, one per rank; a tensor is never split."""


Placement: TypeAlias = Replicate | Partial | Flat | Block | Whole


def is_sharded(placement: Placement) -> bool:
    """Whether each rank of the axis holds another part of the buffer."""
    return isinstance(placement, (Flat, Block, Whole))


class Transition(Enum):
    """The operation that changes the placement of one axis."""

    NONE = "none"
    SCATTER = "scatter"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


def transition(source: Placement, target: Placement) -> Transition:
    """The operation that takes an axis from ``source`` to ``target``; ValueError where there is none.

    Nothing becomes `Partial` again: how a value would be divided into addends is not the buffer's to choose.
    """
    if source == target:
        return Transition.NONE
    if isinstance(target, Partial):
        raise ValueError(f"a buffer cannot go from {source} to {target}")
    if isinstance(source, Partial):
        return Transition.REDUCE_SCATTER if is_sharded(target) else Transition.ALL_REDUCE
    if isinstance(source, Replicate):
        return Transition.SCATTER
    return Transition.ALL_TO_ALL if is_sharded(target) else Transition.ALL_GATHER
