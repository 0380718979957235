"""Whether a manifest can be true: its numbers fit each other, whoever has written them.

Its checksum tells damage from what was saved; a file that somebody has made up has a right one too. What passes here
takes no more memory than the files have bytes, names nothing outside its folder, and gives no element two values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_LARGEST = 2**62  # elements and bytes: what the sum of two of them holds is still a number of 64 bits
_KINDS: dict[str, Any] = {"tensor": str, "float": str, "bytes": str, "tuple": list, "dict": list}


def number(value: Any, what: str, most: int = _LARGEST) -> int:
    """``value``, if it is a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {_short(value)}")
    return value


def numbers(value: Any, what: str, most: int = _LARGEST) -> tuple[int, ...]:
    """The same of a list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {_short(value)}")
    return tuple(number(each, what, most) for each in value)


def shape(value: Any, what: str) -> tuple[int, ...]:
    """A shape whose number of elements is one, too."""
    found = numbers(value, what)
    number(math.prod(found), what)
    return found


def tree(value: Any, tensors: Collection[str], what: str) -> None:
    """Raise unless this is what `encode_tree` makes, of tensors that are there."""
    if isinstance(value, list):
        for each in value:
            tree(each, tensors, what)
        return
    if not isinstance(value, dict):
        return
    kind: str = next(iter(value), "")
    content: Any = value.get(kind)
    if len(value) != 1 or type(content) is not _KINDS.get(kind):
        raise ValueError(f"{what} has a part that is {_short(value)}")
    if kind == "tensor" and content not in tensors:
        raise ValueError(f"{what} has a tensor {_short(content)}, which is not there")
    for each in content if kind in ("tuple", "dict") else ():
        if kind == "dict" and not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], (str, int))):
            raise ValueError(f"{what} has a part that is {_short(each)}")
        tree(each[1] if kind == "dict" else each, tensors, what)


def parts(boxes: Iterable[tuple[Any, Any]], shape: tuple[int, ...], name: str) -> list[Box]:
    """Boxes of a tensor, each of offsets and sizes, if they lie in it and none on another. Empty ones may."""
    found: list[Box] = []
    for box in boxes:
        offsets, sizes = (numbers(list(each), f"a part of '{name}'") for each in box)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of '{name}' has other dims than it")
        if any(offset + count > whole for offset, count, whole in zip(offsets, sizes, shape)):
            raise ValueError(f"a part of '{name}' reaches beyond it")
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
    if len(cut) == 1:  # as nearly all are
        return bool((low[1:, 0] >= high[:-1, 0]).all())
    for place in range(len(low)):
        meets = (low[place + 1 :] < high[place]) & (low[place] < high[place + 1 :])
        if meets.all(axis=1).any():
            return False
    return True


def do_not_overlap(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether no two ranges, each from a byte to another, overlap."""
    return all(before[1] <= after[0] for before, after in pairwise(sorted(ranges)))


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes, or something very deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
