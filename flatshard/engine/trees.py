"""Tensors inside arguments and outputs of any shape: sequences, mappings, dataclasses, registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flatshard import _torch

_ATOMS = (type(None), int, float, bool, str, bytes, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _ATOMS):
        return
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            else:
                yield from tensors_in(item)
    elif isinstance(value, (dict, Mapping)):  # dict first: the abstract class is slow to ask
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name))
    else:
        yield from (leaf for leaf in _torch.pytree_leaves(value) if isinstance(leaf, torch.Tensor))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor changed. What contains no changed tensor is returned as it is, not copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, (list, tuple)):
        items = [change(item) if isinstance(item, torch.Tensor) else map_tensors(change, item) for item in value]
        for new, old in zip(items, value):
            if new is not old:
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value
    if isinstance(value, (dict, Mapping)):
        if not value:
            return value
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
    return _torch.pytree_map(change, value)


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
