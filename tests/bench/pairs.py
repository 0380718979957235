"""Fewer cases than a full product, with every pair of values still among them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(product: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A subset of ``product`` in which every pair of values of any two columns occurs."""
    chosen: list[tuple[Any, ...]] = []
    pairs = [_pairs(row) for row in product]
    missing = set().union(*pairs)
    while missing:
        best = max(range(len(product)), key=lambda number: len(missing & pairs[number]))
        missing -= pairs[best]
        chosen.append(product[best])
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, int, str, str]]:
    return {(i, j, repr(row[i]), repr(row[j])) for i, j in itertools.combinations(range(len(row)), 2)}
