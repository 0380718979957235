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

    def wire_bytes(self, full_bytes: int, world: int) -> float:
        """Bytes that one of ``world`` ranks sends; ``full_bytes`` is what it holds when the axis is not sharded."""
        share = full_bytes * (world - 1) / world
        if self is Transition.ALL_TO_ALL:
            return share / world
        return {Transition.NONE: 0, Transition.SCATTER: 0, Transition.ALL_REDUCE: 2}.get(self, 1) * share


# source -> target. What is missing is illegal: nothing becomes Partial again, because how a value would be divided
# into addends is not the buffer's to choose.
#
#   from \ to    Replicate    Partial   sharded                            bytes sent per rank, N unsharded
#   Replicate    none         -         scatter (local)                    0
#   Partial      all_reduce   none      reduce_scatter                     2 N (W-1)/W;  N (W-1)/W
#   sharded      all_gather   -         none, or all_to_all if they differ N (W-1)/W;    N/W (W-1)/W
_LEGAL: dict[tuple[str, str], Transition] = {
    ("replicate", "replicate"): Transition.NONE,
    ("replicate", "sharded"): Transition.SCATTER,
    ("partial", "partial"): Transition.NONE,
    ("partial", "replicate"): Transition.ALL_REDUCE,
    ("partial", "sharded"): Transition.REDUCE_SCATTER,
    ("sharded", "replicate"): Transition.ALL_GATHER,
    ("sharded", "sharded"): Transition.ALL_TO_ALL,
}


def _kind(placement: Placement) -> str:
    if is_sharded(placement):
        return "sharded"
    return "partial" if isinstance(placement, Partial) else "replicate"


def transition(source: Placement, target: Placement) -> Transition:
    """The operation that takes an axis from ``source`` to ``target``; ValueError where there is none."""
    if source == target:
        return Transition.NONE
    found = _LEGAL.get((_kind(source), _kind(target)))
    if found is None or found is Transition.NONE:
        raise ValueError(f"a buffer cannot go from {source} to {target}")
    return found
