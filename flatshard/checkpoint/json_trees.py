"""Nested values as JSON, with keys in place of tensors. Reading them back runs no code."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch

_PLAIN = (bool, int, str, type(None))


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
    """The value of a tree of `encode_tree`; ``get(key)`` returns each tensor."""
    if isinstance(tree, list):
        return [decode_tree(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return get(content)
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tuple":
        return tuple(decode_tree(item, get) for item in content)
    if kind == "dict":
        return {key: decode_tree(item, get) for key, item in content}
    raise ValueError(f"unknown kind of value: {kind!r}")
