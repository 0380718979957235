"""Checks that the contents of a manifest are consistent.

A checksum detects damage, but not a manifest that was forged. A manifest that passes these checks needs no more memory
than the files have bytes, names no file outside its folder, and gives no element two values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_LARGEST = 2**62  # elements or bytes: the sum of two such numbers fits into 64 bits


def number(value: Any, what: str, most: int = _LARGEST) -> int:
    """``value``; ValueError unless it is an integer from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {short(value)}, not an integer from 0 to {most}")
    return value


def numbers(value: Any, what: str, most: int = _LARGEST) -> tuple[int, ...]:
    """``value`` as a tuple; ValueError unless it is a list of integers from 0 to ``most``."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {short(value)}, not a list of integers")
    return tuple(number(each, what, most) for each in value)


def shape(value: Any, what: str) -> tuple[int, ...]:
    """``value`` as a shape; ValueError also if it has more than 2**62 elements."""
    found = numbers(value, what)
    number(math.prod(found), what)
    return found


def parts(boxes: Iterable[tuple[Any, Any]], shape: tuple[int, ...], name: str) -> list[Box]:
    """Boxes (offsets, sizes) of a tensor; ValueError if one reaches beyond it, or if two with elements overlap."""
    found: list[Box] = []
    for box in boxes:
        offsets, sizes = (numbers(list(each), f"a part of '{name}'") for each in box)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of '{name}' has another number of dims than the tensor")
        if any(offset + count > whole for offset, count, whole in zip(offsets, sizes, shape)):
            raise ValueError(f"a part of '{name}' reaches beyond the tensor")
        found.append((offsets, sizes))
    if not _are_disjoint([(offsets, sizes) for offsets, sizes in found if 0 not in sizes]):
        raise ValueError(f"parts of '{name}' overlap")
    return found


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes have an element in common."""
    if len(boxes) < 2:
        return True
    low = np.array([offsets for offsets, _ in boxes], dtype=np.int64)
    high = low + np.array([sizes for _, sizes in boxes], dtype=np.int64)
    cut = [
        dim for dim in range(low.shape[1]) if (low[:, dim] != low[0, dim]).any() or (high[:, dim] != high[0, dim]).any()
    ]
    if not cut:
        return False
    order = np.argsort(low[:, cut[0]], kind="stable")
    low, high = low[order][:, cut], high[order][:, cut]
    if len(cut) == 1:  # the usual case
        return bool((low[1:, 0] >= high[:-1, 0]).all())
    for place in range(len(low)):
        meets = (low[place + 1 :] < high[place]) & (low[place] < high[place + 1 :])
        if meets.all(axis=1).any():
            return False
    return True


def short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with more digits than Python prints, or deeply nested lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
