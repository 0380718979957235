"""`iter_full_tensors`: the full tensors of a sharded model, one bucket at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _arguments, _torch
from flatshard.buffer import Lane
from flatshard.checkpoint.files import TensorEntry
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
    sent = {name: TensorEntry(cast_dtype(tensor, dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    buckets = _buckets(tensors, sent, limit)
    most = max((sum(aligned(sent[name]) for name in names) for names, axes in buckets if axes), default=0)
    storage: torch.Tensor | None = None
    for names, axes in buckets:
        if not axes:
            for name in names:
                yield name, held_part(tensors[name]).local.to(sent[name].dtype)
            continue
        if storage is None:
            storage = torch.empty(most, dtype=torch.uint8, device=held_part(tensors[names[0]]).local.device)
        yield from _gathered(tensors, {name: sent[name] for name in names}, axes, storage)


def cast_dtype(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: ``wanted`` for a floating-point tensor, if it is not None."""
    return tensor.dtype if wanted is None or not tensor.is_floating_point() else wanted


def aligned(entry: TensorEntry) -> int:
    """The bytes that a tensor takes in a buffer of `views_of`."""
    return -(-entry.nbytes // _ALIGN) * _ALIGN


def views_of(storage: torch.Tensor, entries: Mapping[str, TensorEntry]) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors as views of a buffer, one after another from its start, and the number of bytes that they take."""
    views, place = {}, 0
    for name, entry in entries.items():
        views[name] = storage[place : place + entry.nbytes].view(entry.dtype).view(entry.shape)
        place += aligned(entry)
    return views, place


def _buckets(
    tensors: dict[str, torch.Tensor], sent: dict[str, TensorEntry], limit: int
) -> list[tuple[list[str], tuple[int, ...]]]:
    """Names of consecutive tensors that are gathered together, with the mesh axes that they are sharded over."""
    found: list[tuple[list[str], tuple[int, ...]]] = []
    kind: Any = None
    size = 0
    for name, tensor in tensors.items():
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        axes = tuple(axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate))
        mine = (axes, tensor.device_mesh if isinstance(tensor, DTensor) and axes else None)
        if mine != kind or size + aligned(sent[name]) > limit:
            found.append(([], axes))
            kind, size = mine, 0
        found[-1][0].append(name)
        size += aligned(sent[name])
    return found


def _gathered(
    tensors: dict[str, torch.Tensor], bucket: dict[str, TensorEntry], axes: tuple[int, ...], storage: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather a bucket into ``storage`` and yield its tensors.

    Large tensors with equal shards are all-gathered in place. All others are all-reduced in one launch: every rank has
    zeros where other ranks have values, so the sum of the bits is the full tensor. This takes twice the traffic of an
    all-gather, but no memory beyond the result, for shards of any size.
    """
    gathered = {name: entry for name, entry in bucket.items() if _is_gathered(tensors[name], axes, entry)}
    added = {name: entry for name, entry in bucket.items() if name not in gathered}
    views, end = views_of(storage, gathered | added)
    bits = storage[end - sum(map(aligned, added.values())) : end].zero_().view(torch.int32)
    pieces = []
    for name, view in views.items():
        part = held_part(tensors[name])
        if part.offsets is not None:
            pieces.append(_torch.in_box(view, part.offsets, part.local.shape))
            pieces[-1].copy_(part.local)
    first = tensors[next(iter(bucket))]
    assert isinstance(first, DTensor)
    lane, mesh = Lane("full_tensors", storage.device), first.device_mesh
    if gathered:
        wholes, own = [views[name].view(-1) for name in gathered], [piece.view(-1) for piece in pieces[: len(gathered)]]
        group = lane.group(mesh, axes[0])
        lane.all_gather(group, wholes, own, after=(lane.mark(),), name="full tensors").wait()
    for axis in axes if bits.numel() else ():
        lane.all_reduce(lane.group(mesh, axis), [bits], after=(lane.mark(),), name="full tensors").wait()
    yield from ((name, views[name]) for name in bucket)


def _is_gathered(tensor: torch.Tensor, axes: tuple[int, ...], entry: TensorEntry) -> bool:
    """Whether a tensor is all-gathered: it is large and all ranks have equally many rows. The same on all ranks."""
    if not isinstance(tensor, DTensor) or len(axes) != 1 or aligned(entry) < _LARGE:
        return False
    placement = tensor.placements[axes[0]]  # the flat layout has a subclass of `Shard`, which does not count
    return type(placement) is Shard and placement.dim == 0 and tensor.shape[0] % tensor.device_mesh.size(axes[0]) == 0
