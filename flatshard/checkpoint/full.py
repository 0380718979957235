"""`iter_full_tensors`: the full tensors of a sharded model, one bucket at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _arguments, _torch
from flatshard.buffer import Lane
from flatshard.checkpoint.state import held_part

_ALIGN = 16  # bytes; a bucket is all-reduced as integers of 4 bytes
_LARGE = 1 << 20  # bytes; the time to gather such a tensor depends on its size, not on the cost of a launch


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict. Tied tensors are included once, under their first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def iter_full_tensors(
    model: nn.Module,
    bucket_bytes: int = 256 << 20,
    *,
    dtype: torch.dtype | None = None,
    names: Container[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) for the tensors of ``model.state_dict()``. All ranks must iterate to the end.

    Tensors are gathered into one buffer of ``bucket_bytes``, or of the size of the largest tensor if that is more;
    nothing else is allocated. A tensor is valid until the next one is requested: clone it to keep it. Tied tensors are
    yielded once, under their first name. ``dtype``: floating-point tensors are cast to it before they are sent.
    ``names``: yield only these tensors; must be the same on all ranks.
    """
    _arguments.module("iter_full_tensors", model)
    _arguments.whole_number("bucket_bytes", bucket_bytes, 1)
    check_dtype(dtype)
    tensors = {name: value for name, value in named_tensors(model).items() if names is None or name in names}
    for name, value in tensors.items():
        if isinstance(value, DTensor) and _torch.is_wrapper(_torch.local_of(value)):
            kind = type(_torch.local_of(value)).__name__
            raise TypeError(f"'{name}' is a {kind}, a tensor subclass; iter_full_tensors supports plain tensors only")
    return _iterate(tensors, bucket_bytes, dtype)


def check_dtype(dtype: Any) -> None:
    """TypeError unless ``dtype`` is None or a floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype or None")


def _iterate(
    tensors: dict[str, torch.Tensor], limit: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    buckets = _buckets(tensors, limit, dtype)
    sharded = [sum(_size(tensors[name], dtype) for name in bucket) for bucket, axes in buckets if axes]
    storage: torch.Tensor | None = None
    for bucket, axes in buckets:
        if not axes:
            for name in bucket:
                value = tensors[name]
                yield name, held_part(value).local.to(cast_dtype(value, dtype))
            continue
        if storage is None:
            first = held_part(tensors[bucket[0]]).local
            storage = torch.empty(max(sharded), dtype=torch.uint8, device=first.device)
        yield from _gathered(tensors, bucket, axes, storage, dtype)


def cast_dtype(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: ``wanted`` for a floating-point tensor, if it is not None."""
    return tensor.dtype if wanted is None or not tensor.is_floating_point() else wanted


def _size(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return -(-tensor.numel() * cast_dtype(tensor, dtype).itemsize // _ALIGN) * _ALIGN


def _buckets(
    tensors: dict[str, torch.Tensor], limit: int, dtype: torch.dtype | None
) -> list[tuple[list[str], tuple[int, ...]]]:
    """Names of consecutive tensors that are gathered together, with the mesh axes that they are sharded over."""
    found: list[tuple[list[str], tuple[int, ...]]] = []
    kind: Any = None
    size = 0
    for name, tensor in tensors.items():
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        axes = tuple(axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate))
        mine = (axes, tensor.device_mesh if isinstance(tensor, DTensor) and axes else None)
        if mine != kind or size + _size(tensor, dtype) > limit:
            found.append(([], axes))
            kind, size = mine, 0
        found[-1][0].append(name)
        size += _size(tensor, dtype)
    return found


def _gathered(
    tensors: dict[str, torch.Tensor],
    names: list[str],
    axes: tuple[int, ...],
    storage: torch.Tensor,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather a bucket into ``storage`` and yield its tensors.

    Large tensors with equal shards are all-gathered in place. All others are all-reduced in one launch: every rank has
    zeros where other ranks have values, so the sum of the bits is the full tensor. This takes twice the traffic of an
    all-gather, but no memory beyond the result, for shards of any size.
    """
    gathered = [name for name in names if _is_gathered(tensors[name], axes, dtype)]
    added = [name for name in names if name not in gathered]
    views: dict[str, torch.Tensor] = {}
    place = 0
    for name in (*gathered, *added):
        tensor = tensors[name]
        kind = cast_dtype(tensor, dtype)
        views[name] = storage[place : place + tensor.numel() * kind.itemsize].view(kind).view(tensor.shape)
        place += _size(tensor, dtype)
    bits = storage[place - sum(_size(tensors[name], dtype) for name in added) : place].zero_().view(torch.int32)
    pieces = []
    for name, view in views.items():
        part = held_part(tensors[name])
        if part.offsets is not None:
            pieces.append(view[part.slices])
            pieces[-1].copy_(part.local)
    first = tensors[names[0]]
    assert isinstance(first, DTensor)
    lane, mesh = Lane("full_tensors", storage.device), first.device_mesh
    if gathered:
        wholes, own = [views[name].view(-1) for name in gathered], [piece.view(-1) for piece in pieces[: len(gathered)]]
        group = lane.group(mesh, axes[0])
        lane.all_gather(group, wholes, own, after=(lane.mark(),), name="full tensors").wait()
    for axis in axes if bits.numel() else ():
        lane.all_reduce(lane.group(mesh, axis), [bits], after=(lane.mark(),), name="full tensors").wait()
    yield from ((name, views[name]) for name in names)


def _is_gathered(tensor: torch.Tensor, axes: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    """Whether a tensor is all-gathered: it is large and all ranks have equally many rows. The same on all ranks."""
    if not isinstance(tensor, DTensor) or len(axes) != 1 or _size(tensor, dtype) < _LARGE:
        return False
    placement = tensor.placements[axes[0]]  # the flat layout has a subclass of `Shard`, which does not count
    return type(placement) is Shard and placement.dim == 0 and tensor.shape[0] % tensor.device_mesh.size(axes[0]) == 0
