"""Tensors inside arguments and outputs of any shape: sequences, mappings, dataclasses, registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatshard import _torch

_PLAIN = frozenset((type(None), int, float, bool, str, bytes, torch.dtype, torch.device))  # hold no tensors


def tensors_in(value: Any, of_objects: bool = False) -> list[torch.Tensor]:
    """Every tensor in ``value``, in a fixed order.

    ``of_objects``: also search the attributes of objects of any class except modules.
    """
    if type(value) is torch.Tensor:
        return [value]
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif type(each) not in _PLAIN and id(each) not in seen:
            seen[id(each)] = each
            left += reversed(_items(each, of_objects))
    return found


def _items(value: Any, of_objects: bool) -> list[Any]:
    """The items of a container, and with ``of_objects`` the attributes of an object."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (type, nn.Module)):
        return []
    if isinstance(value, (dict, Mapping)):  # dict first: checks of an abstract class are slow
        return [*value.values(), *(vars(value).values() if of_objects and hasattr(value, "__dict__") else ())]
    if dataclasses.is_dataclass(value):  # which may have slots
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values()) if of_objects else _torch.pytree_leaves(value)


def tensors_with_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that need a gradient."""
    if type(value) is torch.Tensor:
        return [value] if value.requires_grad else []
    found: list[torch.Tensor] = []
    for item in value if type(value) is tuple else (value,):
        if type(item) is torch.Tensor:
            if item.requires_grad:
                found.append(item)
        elif type(item) not in _PLAIN:
            found += [tensor for tensor in tensors_in(item) if tensor.requires_grad]
    return found


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor changed. Containers without a changed tensor are not copied."""
    if type(value) in _PLAIN or (type(value) is dict and not value):
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [change(item) if type(item) is torch.Tensor else map_tensors(change, item) for item in value]
        for new, old in zip(items, value):
            if new is not old:
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value
    put: Callable[[Any, Any, Any], None]
    if isinstance(value, (dict, Mapping)):
        held, put = dict(value.items()), operator.setitem
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        put = object.__setattr__  # frozen dataclasses too
    else:
        leaves, spec = _torch.tree_flatten(value)
        changed = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return value if all(a is b for a, b in zip(changed, leaves)) else _torch.tree_unflatten(changed, spec)
    mapped = {key: map_tensors(change, item) for key, item in held.items()}
    result = value
    for key, item in mapped.items():
        if item is not held[key]:
            result = copy.copy(value) if result is value else result
            put(result, key, item)
    return result


def to_device(device: torch.device, value: Any) -> Any:
    """``value`` with its tensors on ``device``."""
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device), value)


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
