"""Nested values as JSON, with keys in place of tensors. Reading them back runs no code."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from flatshard.checkpoint.manifest_checks import short

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


def decode_tree(tree: Any, get: Callable[[str], Any]) -> Any:
    """The value of a tree of `encode_tree`, or that `check_tree` accepts; ``get(key)`` returns each tensor."""
    if isinstance(tree, list):
        return [decode_tree(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tuple":
        return tuple(decode_tree(item, get) for item in content)
    if kind == "dict":
        return {key: decode_tree(item, get) for key, item in content}
    return {"tensor": get, "float": float, "bytes": base64.b64decode}[kind](content)


def check_tree(value: Any, tensors: Collection[str], what: str) -> None:
    """ValueError unless ``value`` has the form of `encode_tree`'s results, with tensors that are in ``tensors``."""
    if isinstance(value, list):
        for each in value:
            check_tree(each, tensors, what)
        return
    if not isinstance(value, dict):
        return
    kind: str = next(iter(value), "")
    content: Any = value.get(kind)
    if len(value) != 1 or type(content) is not _KINDS.get(kind):
        raise ValueError(f"{what} has an unknown entry {short(value)}")
    if kind == "tensor" and content not in tensors:
        raise ValueError(f"{what} names the tensor {short(content)}, which does not exist")
    for each in content if kind in ("tuple", "dict") else ():
        if kind == "dict" and not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], (str, int))):
            raise ValueError(f"{what} has an unknown entry {short(each)}")
        check_tree(each[1] if kind == "dict" else each, tensors, what)
