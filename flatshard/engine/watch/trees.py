"""Tensors inside arguments and outputs of any shape: sequences, mappings, dataclasses, registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatshard import _torch

_ATOMS = (type(None), int, float, bool, str, bytes, torch.dtype, torch.device)
_PLAIN = frozenset(_ATOMS)  # asked first, and by identity: this is on the path of every forward


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in a fixed order."""
    if type(value) is torch.Tensor:
        return [value]
    found: list[torch.Tensor] = []
    _find(value, found)
    return found


def tensors_with_grad(value: Any) -> list[torch.Tensor]:
    """Those of them that need a gradient."""
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


def _find(value: Any, found: list[torch.Tensor]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind is tuple or kind is list:
        for item in value:
            if type(item) is torch.Tensor:
                found.append(item)
            elif type(item) not in _PLAIN:
                _find(item, found)
    elif kind is dict:
        for item in value.values():
            _find(item, found)
    elif isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _find(item, found)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _find(getattr(value, field.name), found)
    else:
        found.extend(leaf for leaf in _torch.pytree_leaves(value) if isinstance(leaf, torch.Tensor))


def tensors_in_objects(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value`` and in the attributes of objects in it, of any class but modules, in a fixed order."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif id(each) not in seen and not isinstance(each, (*_ATOMS, type, nn.Module)):
            seen[id(each)] = each
            left += reversed(_held(each))
    return found


def _held(value: Any) -> list[Any]:
    """What a container holds, and the attributes of an object."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value):  # which may have slots
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    items = list(value.values()) if isinstance(value, Mapping) else []
    return items + list(getattr(value, "__dict__", {}).values())


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor changed. What contains no changed tensor is returned as it is, not copied."""
    if type(value) in _PLAIN or (type(value) is dict and not value):
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [change(item) if type(item) is torch.Tensor else map_tensors(change, item) for item in value]
        for new, old in zip(items, value):
            if new is not old:
                if type(value) is tuple or type(value) is list:
                    return type(value)(items)
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value
    if isinstance(value, (dict, Mapping)):  # dict first: the abstract class is slow to ask
        mapped = {key: map_tensors(change, item) for key, item in value.items()}
        changed = {key: item for key, item in mapped.items() if item is not value[key]}
        if not changed:
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item  # type: ignore[index]
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(change, value)
    leaves, spec = _torch.tree_flatten(value)
    new = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return value if all(a is b for a, b in zip(new, leaves)) else _torch.tree_unflatten(new, spec)


def _map_dataclass(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for item in dataclasses.fields(value):
        old = getattr(value, item.name)
        new = map_tensors(change, old)
        if new is not old:
            changed[item.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # frozen dataclasses too
    return result


def to_device(device: torch.device, value: Any) -> Any:
    """``value`` with its tensors on ``device``."""
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device), value)


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
