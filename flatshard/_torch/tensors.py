"""Tensor subclasses, their dispatch, storages and trees: may touch `torch._C`, DTensor's dispatcher and pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatshard._torch.autograd import PlainAttributes

# Leaves of values of registered pytree types; a value of any other type is a leaf itself.
tree_flatten, tree_unflatten, pytree_leaves = pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves


def map_leaves(kind: type[Any] | tuple[type[Any], ...], change: Callable[[Any], Any], value: Any) -> Any:
    """A tree with every leaf of type ``kind`` changed."""
    return pytree.tree_map_only(kind, change, value)


# A subclass of Tensor with this as its `__torch_function__` sees operations in `__torch_dispatch__` only.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def wrapper_like(cls: type[Any], tensor: torch.Tensor, device: torch.device) -> Any:
    """An instance of a subclass of Tensor that has no memory, laid out as ``tensor`` is."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=device,
    )


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that holds its values in other tensors, or says itself how it is gathered."""
    return is_made_of_others(tensor) or hasattr(tensor, "fsdp_pre_all_gather")


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds its values in other tensors, and tells which (`__tensor_flatten__`)."""
    asked: Any = tensor  # mypy takes the question for an answer
    return is_traceable_wrapper_subclass(asked)


def writes(operation: Any) -> bool:
    """Whether an operation writes to what it is given."""
    infos = [each.alias_info for each in operation._schema.arguments]
    return any(info is not None and info.is_write for info in infos)


def handle(operation: Any, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let DTensor leave an operation, with arguments and keywords, to ``handler``, unless it has one for it."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(operation, handler)


def unhandled(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor does with an operation that has no handler, if only to raise."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation, None)  # another thread may be in here
    try:
        return operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler


# What stands for the storage of a tensor, as long as that exists. A DTensor has one of no memory. After
# ``tensor.data = other`` it is another one, and nothing else need be: the local tensor stays, and so do the values.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


def storage_of(tensor: torch.Tensor) -> object:
    """The storage of a tensor, of whatever class that is."""
    with PlainAttributes():
        return tensor.untyped_storage()
