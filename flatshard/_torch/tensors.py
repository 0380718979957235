"""Tensor subclasses, their dispatch, storages and trees: uses `torch._C`, DTensor's dispatcher and pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Leaves of values of registered pytree types; a value of any other type is a leaf itself.
tree_flatten, tree_unflatten, pytree_leaves = pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves


def map_leaves(kind: type[Any] | tuple[type[Any], ...], change: Callable[[Any], Any], value: Any) -> Any:
    """A tree with every leaf of type ``kind`` changed."""
    return pytree.tree_map_only(kind, change, value)


# As `__torch_function__` of a subclass of Tensor: operations reach only its `__torch_dispatch__`.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def wrapper_like(cls: type[Any], tensor: torch.Tensor, device: torch.device) -> Any:
    """An instance of a subclass of Tensor without memory, with the strides of ``tensor``."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=device,
    )


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class stores its values in other tensors, or has its own method for an all-gather."""
    return is_made_of_others(tensor) or hasattr(tensor, "fsdp_pre_all_gather")


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor stores its values in other tensors and can list them (`__tensor_flatten__`)."""
    asked: Any = tensor  # mypy would narrow the type of `tensor`
    return is_traceable_wrapper_subclass(asked)


def writes(operation: Any) -> bool:
    """Whether an operation writes to its arguments."""
    infos = [each.alias_info for each in operation._schema.arguments]
    return any(info is not None and info.is_write for info in infos)


def handle(operation: Any, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Register ``handler`` for an operation on DTensors, unless there is one. It gets arguments and keywords."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(operation, handler)


def unhandled(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute an operation on DTensors without its handler. It may raise."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation, None)  # another thread may be in here
    try:
        return operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler


# Identifies the storage of a tensor while it exists. A DTensor has one without memory.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
