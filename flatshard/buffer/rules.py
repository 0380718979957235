"""Rules for operations of torch.optim and of users on sharded tensors that DTensor does not support."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flatshard import _torch


@functools.cache
def add_rules() -> None:
    """Add the missing operations of Rprop, fused SGD and Adagrad to DTensor, and ``sharded.copy_(whole)``.

    The infinite norm of a tensor of which this rank has no rows is computed, too, and so are in-place operations on
    lists of sharded and plain tensors. In-place operations on lists (``torch._foreach_mul_``) raise the versions of
    what they write, which DTensor forgets.

    For all DTensors of the process, after the first model is sharded. Existing rules of DTensor stay, and cases that
    these rules do not cover are dispatched as before.
    """
    aten = torch.ops.aten
    for packet in (aten._foreach_copy_, aten._fused_sgd_, aten._fused_adagrad_, aten.index_put_):
        for overload in packet.overloads():
            if overload != "out":
                _torch.handle(getattr(packet, overload), _on_shards)
    _torch.handle(aten.copy_.default, _copy)
    for norm in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
        _torch.handle(norm, _norm)
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                _torch.handle(getattr(packet, overload), _on_list)


def _on_list(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An in-place operation on a list, as DTensor has it, that also raises versions: `ParamGroup.state` reads them.

    Rows of plain tensors in the list, such as buffers beside parameters, are computed apart from those of DTensors.
    """
    kinds = [isinstance(tensor, DTensor) for tensor in args[0]]
    if len(set(kinds)) > 1:
        for kind in (True, False):
            op(*([x for x, its in zip(a, kinds) if its is kind] if isinstance(a, list) else a for a in args), **kwargs)
        return
    _torch.unhandled(op, args, kwargs)
    torch.autograd.graph.increment_version(args[0])


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm of whole tensors, as DTensor has it. In an infinite one, no rows count as a zero; torch refuses them."""

    def filled(tensor: DTensor) -> DTensor:
        local = _torch.local_of(tensor)
        empty = tensor.numel() and not local.numel()
        return _torch.dtensor_of(local.new_zeros(1), _torch.spec_of(tensor)) if empty else tensor

    if args[1:] == (math.inf,):
        args = (_torch.map_leaves(DTensor, filled, args[0]), math.inf)
    return _torch.unhandled(op, args, kwargs)


def _on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise in-place operation on the shards, if the tensors at each index of its lists are sharded alike."""
    if op._schema.name != "aten::index_put_":
        columns = list(zip(*[arg for arg in args if isinstance(arg, (list, tuple)) and arg]))
    elif is_masked_fill(op, args):
        columns = [(args[0], args[1][0])]
    elif args[0].numel() == 1 and all(p.is_replicate() for p in args[0].placements):
        columns = [(args[0],)]  # without dims: torch has read the mask already and made an index of it
    else:
        columns = [(None,)]
    if not all(are_cut_alike(column) for column in columns):
        return _torch.unhandled(op, args, kwargs)
    local_args, local_kwargs = _torch.map_leaves(DTensor, _torch.local_of, (args, kwargs))
    op(*local_args, **local_kwargs)
    if op._schema.returns:
        return args[0]
    torch.autograd.graph.increment_version(args[0])  # as in `_on_list`
    return None


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``sharded.copy_(whole)``: every rank takes its own rows of a plain tensor of the same shape."""
    target, source = args[:2]
    plain = isinstance(target, DTensor) and not isinstance(source, DTensor) and target.shape == source.shape
    if not plain or target.numel() <= 1 or any(placement.is_partial() for placement in target.placements):
        return _torch.unhandled(op, args, kwargs)
    op(_torch.local_of(target), _torch.part_of(source, target), *args[2:], **kwargs)
    return target


def is_masked_fill(op: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is ``x[mask] = number`` with a mask of the shape of ``x``, which is elementwise."""
    if op._schema.name != "aten::index_put_" or any(args[3:]) or len(args[1]) != 1:
        return False
    mask = args[1][0]
    return bool(mask is not None and mask.dtype == torch.bool and mask.shape == args[0].shape and args[2].numel() == 1)


def are_cut_alike(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether all tensors have the same rows on this rank, and none is partial. Replicated scalars match all."""
    cut: list[Any] = [tensor for tensor in tensors if tensor is None or not _is_number_everywhere(tensor)]
    if not all(isinstance(tensor, DTensor) and is_cut_alike(cut[0], tensor) for tensor in cut):
        return False
    return not any(placement.is_partial() for tensor in cut[:1] for placement in _torch.spec_of(tensor).placements)


def is_cut_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two DTensors of one shape hold the same rows on every rank."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    mine, theirs = _torch.spec_of(one), _torch.spec_of(other)
    same = mine.mesh == theirs.mesh and mine.placements == theirs.placements
    return same and getattr(one, "_cut", None) == getattr(other, "_cut", None)  # of ragged ones


def _is_number_everywhere(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= 1 and not (
        isinstance(tensor, DTensor) and any(not p.is_replicate() for p in tensor.placements)
    )
