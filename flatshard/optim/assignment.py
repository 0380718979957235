"""Which tensors are matrices, and which rank steps which.

Integer arithmetic on the same description on every rank: all ranks get the same result, in every run.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch

Shape: TypeAlias = tuple[int, ...]
Split: TypeAlias = int | Sequence[int] | None
Cost: TypeAlias = Callable[[Shape], float]
Predicate: TypeAlias = Callable[[str, torch.Tensor], bool]
Splits: TypeAlias = Mapping[str, Split] | Callable[[str, torch.Tensor], Split] | None
BUCKET = 64 << 20


@dataclass(frozen=True)
class Box:
    """A part of a tensor: from ``offsets``, ``sizes`` long."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        first = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - start
            for a, m, b, n, start in zip(self.offsets, self.sizes, other.offsets, other.sizes, first)
        )
        return Box(first, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        starts = [own - base for own, base in zip(self.offsets, outer.offsets)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes))


@dataclass(frozen=True)
class Matrix:
    """What the optimizer sees as one tensor: a box of a parameter, in a shape of its own."""

    label: str  # which part of the parameter it is; "" for all of it
    box: Box
    shape: Shape


def newton_schulz(shape: Shape) -> float:
    """m²n of an m x n matrix, m the smaller side: what an iteration of Newton and Schulz takes, or an inverse root."""
    if len(shape) < 2:
        return float(math.prod(shape))
    small, large = sorted((shape[0], math.prod(shape[1:])))
    return float(small * small * large)


@dataclass(frozen=True)
class WholeOptions:
    """The arguments of `fully_shard_optimizer`."""

    whole: Predicate | bool = True
    split: Splits = None
    cost: Cost = newton_schulz
    owners: Literal["shards", "all"] = "shards"
    bucket_bytes: int = BUCKET
    unbind: bool = False  # let tensors of three dims be so many matrices

    def wants(self, name: str, parameter: torch.Tensor) -> bool:
        return self.whole if isinstance(self.whole, bool) else bool(self.whole(name, parameter))

    def split_of(self, name: str, parameter: torch.Tensor) -> Split:
        if self.split is None or callable(self.split):
            return None if self.split is None else self.split(name, parameter)
        return next((split for pattern, split in self.split.items() if fnmatchcase(name, pattern)), None)


def matrices_of(shape: Shape, split: Split, unbind: bool) -> list[Matrix]:
    """The matrices of a parameter. ``split``: into so many equal parts of its rows, or parts of so many rows each.

    With ``unbind``, a tensor of three dims is one matrix for each index of dim 0; of a tensor with more dims, all but
    dim 0 are flattened into columns. With neither, a parameter is one tensor of its own shape.
    """
    if split is None and not (unbind and shape):
        return [Matrix("", Box((0,) * len(shape), shape), shape)]
    if not shape:
        raise ValueError("a 0-dim parameter has no rows to split")
    if unbind and len(shape) == 3:
        made = []
        for index, each in itertools.product(range(shape[0]), matrices_of(shape[1:], split, True)):
            label = f"[{index}, {each.label[1:]}" if each.label else f"[{index}]"
            made.append(Matrix(label, Box((index, *each.box.offsets), (1, *each.box.sizes)), each.shape))
        return made
    counts = _rows(shape[0], split)
    matrices, first = [], 0
    for count in counts:
        label = "" if len(counts) == 1 else f"[{first}:{first + count}]"
        sizes = (count, *shape[1:])
        seen = (count, math.prod(shape[1:])) if unbind and len(shape) > 2 else sizes
        matrices.append(Matrix(label, Box((first, *(0 for _ in shape[1:])), sizes), seen))
        first += count
    return matrices


def _rows(rows: int, split: Split) -> list[int]:
    split = 1 if split is None else split
    if isinstance(split, int):
        if split < 1 or rows % split:
            raise ValueError(f"{rows} rows cannot be split into {split} equal parts")
        return [rows // split] * split
    counts = [int(count) for count in split]
    if sum(counts) != rows or any(count < 1 for count in counts):
        raise ValueError(f"parts of {counts} rows do not add up to the {rows} rows of the parameter")
    return counts


def assign(
    costs: Sequence[float], holders: Sequence[int], world: int, before: Sequence[float] = ()
) -> tuple[list[int], list[int]]:
    """The order in which matrices are assigned, the most expensive first, and the owner of each: the least loaded rank.

    No rank has more than a third too much, and with several matrices of a kind per rank, the balance is nearly even.
    Among matrices of equal cost, those that different ranks mostly hold (``holders``) alternate: neighbours are sent
    together, so that many ranks send. Among equal loads the first rank is taken. ``before``: the load that each rank
    already has.
    """
    turns: dict[tuple[float, int], int] = {}
    keys = []
    for number, key in enumerate(zip(costs, holders)):
        turns[key] = turns.get(key, 0) + 1
        keys.append((-key[0], turns[key], number))
    order = sorted(range(len(costs)), key=keys.__getitem__)
    loads, owners = [(load, 0, rank) for rank, load in enumerate(before or [0.0] * world)], [0] * len(costs)
    heapq.heapify(loads)
    for number in order:
        load, count, rank = loads[0]
        owners[number] = rank
        heapq.heapreplace(loads, (load + costs[number], count + 1, rank))
    return order, owners


@dataclass(frozen=True)
class Holders:
    """What each rank of an `OwnerGroup` holds of a parameter, and of which copy: there are several where an axis of the
    group does not shard it."""

    boxes: tuple[Box, ...]
    copies: tuple[int, ...]

    def counts(self, box: Box) -> torch.Tensor:
        """Per rank, how many elements of a box it holds."""
        if not box.sizes:
            return torch.ones(len(self.boxes), dtype=torch.int64)
        first = torch.tensor([held.offsets for held in self.boxes])
        last = first + torch.tensor([held.sizes for held in self.boxes])
        begin = torch.maximum(first, torch.tensor(box.offsets))
        end = torch.minimum(last, torch.tensor([o + s for o, s in zip(box.offsets, box.sizes)]))
        return (end - begin).clamp(min=0).prod(1)
