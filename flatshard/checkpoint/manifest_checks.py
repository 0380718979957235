"""Checks that the contents of a manifest are consistent.

A checksum detects damage, but not a manifest that was forged. A manifest that passes these checks needs no more memory
than the files have bytes, names no file outside its folder, and gives no element two values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

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


def parts(boxes: Iterable[tuple[Any, Any]], shape: tuple[int, ...], name: str) -> tuple[Any, Any]:
    """The starts and ends of boxes (offsets, sizes) of a tensor, as two arrays of numpy with a row for each box.

    ValueError if a box reaches beyond the tensor, or if two with elements overlap.
    """
    found = []
    for box in boxes:
        offsets, sizes = (numbers(list(each), f"a part of '{name}'") for each in box)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of '{name}' has another number of dims than the tensor")
        if any(offset + count > whole for offset, count, whole in zip(offsets, sizes, shape)):
            raise ValueError(f"a part of '{name}' reaches beyond the tensor")
        found.append((offsets, sizes))
    offsets, sizes = np.array(found, dtype=np.int64).reshape(len(found), 2, len(shape)).swapaxes(0, 1)
    low, high = offsets, offsets + sizes
    filled = (sizes > 0).all(axis=1)
    if not _are_disjoint(low[filled], high[filled]):
        raise ValueError(f"parts of '{name}' overlap")
    return low, high


def _are_disjoint(low: Any, high: Any) -> bool:
    """Whether no two boxes have an element in common."""
    if len(low) < 2:
        return True
    cut = np.flatnonzero(((low != low[0]) | (high != high[0])).any(axis=0))  # dims in which boxes differ
    if not len(cut):
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
