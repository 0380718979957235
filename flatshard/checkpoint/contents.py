"""The contents of files: nested values as JSON, with keys in place of tensors, and checks that they are consistent.

A checksum detects damage, but not a manifest that was forged. A manifest that passes these checks needs no more memory
than the files have bytes, names no file outside its folder, and gives no element two values. Reading it runs no code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch

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
    sizes = numbers(value, what)
    number(math.prod(sizes), what)
    return sizes


def parts(boxes: Iterable[tuple[Any, Any]], shape: tuple[int, ...], name: str) -> tuple[Any, Any]:
    """The starts and ends of boxes (offsets, sizes) of a tensor, as two arrays of numpy with a row for each box.

    ValueError if a box reaches beyond the tensor, or if two with elements overlap.
    """
    pairs = []
    for box in boxes:
        offsets, sizes = (numbers(list(each), f"a part of '{name}'") for each in box)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of '{name}' has another number of dims than the tensor")
        if any(offset + count > whole for offset, count, whole in zip(offsets, sizes, shape)):
            raise ValueError(f"a part of '{name}' reaches beyond the tensor")
        pairs.append((offsets, sizes))
    offsets, sizes = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2, len(shape)).swapaxes(0, 1)
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


_PLAIN = (bool, int, str, type(None))
_KINDS: dict[str, Any] = {"tensor": str, "float": str, "bytes": str, "tuple": list, "dict": list}


def encode_tree(value: Any, put: Callable[[str, torch.Tensor], str], path: str) -> Any:
    """A value as JSON. ``put(path, tensor)`` is called for each tensor and returns its key."""
    if isinstance(value, torch.Tensor):
        return {"tensor": put(path, value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [encode_tree(item, put, f"{path}/{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, (str, int))), None)
        if wrong is not None:
            raise TypeError(f"{path} has the key {wrong!r}; keys in a checkpoint must be strings or integers")
        return {"dict": [[key, encode_tree(item, put, f"{path}/{key}")] for key, item in value.items()]}
    raise TypeError(
        f"{path} is a {type(value).__name__}; a checkpoint takes tensors, numbers, strings, bytes, None, and lists, "
        "tuples and dicts of them"
    )


def decode_tree(tree: Any, get: Callable[[str], Any], what: str = "a checkpoint") -> Any:
    """The value of a tree of `encode_tree`; ``get(key)`` returns each tensor. ValueError if it has another form."""
    if isinstance(tree, list):
        return [decode_tree(item, get, what) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind: str = next(iter(tree), "")
    content: Any = tree.get(kind)
    if len(tree) != 1 or type(content) is not _KINDS.get(kind):
        raise ValueError(f"{what} has an unknown entry {short(tree)}")
    if kind == "tuple":
        return tuple(decode_tree(item, get, what) for item in content)
    if kind == "dict":
        for each in content:
            if not isinstance(each, (list, tuple)) or len(each) != 2 or not isinstance(each[0], (str, int)):
                raise ValueError(f"{what} has an unknown entry {short(each)}")
        return {key: decode_tree(item, get, what) for key, item in content}
    return {"tensor": get, "float": float, "bytes": base64.b64decode}[kind](content)


def check_tree(tree: Any, tensors: Collection[str], what: str) -> None:
    """ValueError unless ``tree`` has the form of `encode_tree`'s results, with tensors that are in ``tensors``."""

    def check(key: str) -> None:
        if key not in tensors:
            raise ValueError(f"{what} names the tensor {short(key)}, which does not exist")

    decode_tree(tree, check, what)
