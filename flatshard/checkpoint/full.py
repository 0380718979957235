"""The full weights of a model: one bucket at a time, and in safetensors files as Hugging Face libraries use them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _arguments, _torch
from flatshard._sizes import parse_bytes
from flatshard.buffer import Exchange, Lane
from flatshard.checkpoint import stored_names
from flatshard.checkpoint.errors import on_all_ranks
from flatshard.checkpoint.files import CODES, INDEX, SINGLE, TensorEntry, find_tensors, sync_folder, write_file
from flatshard.checkpoint.loading import put_weights, stage_model
from flatshard.checkpoint.progress import Advance, bar, ignore
from flatshard.checkpoint.state import held_part
from flatshard.checkpoint.stored_names import ConvertingReader, StoredAs, pieces_of

_ALIGN = 16  # bytes; a bucket is all-reduced as integers of 4 bytes
_LARGE = 1 << 20  # bytes; the time to gather such a tensor depends on its size, not on the cost of a launch


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict. Tied tensors are included once, under their first name."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            named.setdefault(id(value), (name, value))
    return dict(named.values())


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
    most = max((sum(map(aligned, bucket.values())) for bucket, axes in buckets if axes), default=0)
    storage: torch.Tensor | None = None
    for bucket, axes in buckets:
        if not axes:
            yield from ((name, held_part(tensors[name]).local.to(entry.dtype)) for name, entry in bucket.items())
            continue
        if storage is None:
            storage = torch.empty(most, dtype=torch.uint8, device=held_part(tensors[next(iter(bucket))]).local.device)
        yield from _gathered(tensors, bucket, axes, storage)


def cast_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: ``dtype`` for a floating-point tensor, if it is not None."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def aligned(entry: TensorEntry) -> int:
    """The bytes that a tensor takes in a buffer of `views_of`."""
    return -(-entry.nbytes // _ALIGN) * _ALIGN


def views_of(storage: torch.Tensor, entries: Mapping[str, TensorEntry]) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors as views of a buffer, one after another from its start, and the number of bytes that they take."""
    views, offset = {}, 0
    for name, entry in entries.items():
        views[name] = storage[offset : offset + entry.nbytes].view(entry.dtype).view(entry.shape)
        offset += aligned(entry)
    return views, offset


def _buckets(
    tensors: dict[str, torch.Tensor], limit: int, dtype: torch.dtype | None
) -> list[tuple[dict[str, TensorEntry], tuple[int, ...]]]:
    """Consecutive tensors that are gathered together, with the mesh axes that they are sharded over."""
    buckets: list[tuple[dict[str, TensorEntry], tuple[int, ...]]] = []
    current: Any = None
    size = 0
    for name, tensor in tensors.items():
        entry = TensorEntry(cast_dtype(tensor, dtype), tuple(tensor.shape))
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        axes = tuple(axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate))
        own = (axes, tensor.device_mesh if isinstance(tensor, DTensor) and axes else None)
        if own != current or size + aligned(entry) > limit:
            buckets.append(({}, axes))
            current, size = own, 0
        buckets[-1][0][name] = entry
        size += aligned(entry)
    return buckets


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


def export_safetensors(
    model: nn.Module,
    folder: str | Path,
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | None = None,
    names: Sequence[StoredAs] = (),
    bucket_bytes: int = 256 << 20,
    progress: bool = True,
) -> None:
    """Write the full weights of a model as `from_pretrained` reads them. All ranks must call it; rank 0 writes.

    A file holds at most ``max_shard_size`` bytes (a number, or "5GB", "200MiB"), unless one tensor is larger; several
    files have an index. They replace earlier files after all are complete. Each rank needs memory for one bucket of
    ``bucket_bytes`` beyond its shards. Tied weights are written once. ``dtype``: floating-point tensors are cast to it.
    ``names``: rules for tensors that have other names in the files, and for stacked experts that are stored one by one:
    a list of `StoredAs`, or a preset (`MIXTRAL`, `QWEN_MOE`).
    The metadata of the files has checksums, which `load_safetensors` verifies and other readers ignore.
    """
    _arguments.module("export_safetensors", model)
    folder = _arguments.path("folder", folder)
    limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        form = "must be a number of bytes, or a string such as '5GB' or '200MiB'"
        raise ValueError(f"max_shard_size={max_shard_size!r}: {form}")
    _arguments.whole_number("bucket_bytes", bucket_bytes, 1)
    check_dtype(dtype)
    stored_names.check_names(names)
    ranks = Exchange("control")  # not the group of `save`, whose thread may be using it
    files = plan_files(named_tensors(model), limit, dtype, names)
    on_all_ranks(ranks, lambda: folder.mkdir(parents=True, exist_ok=True) if ranks.rank == 0 else None)
    pieces = stored_tensors(model, bucket_bytes, None, names)
    total = sum(entry.nbytes for file in files for entry in file.values())
    with bar("exporting", total, progress and ranks.rank == 0) as advance:
        write = partial(write_files, folder, files, pieces, advance)
        on_all_ranks(ranks, write if ranks.rank == 0 else partial(deque, pieces, maxlen=0))


def stored_tensors(
    model: nn.Module, bucket_bytes: int, dtype: torch.dtype | None, names: Sequence[StoredAs]
) -> Iterator[torch.Tensor]:
    """Full tensors of a model as files hold them, in the order of `plan_files`. All ranks must iterate to the end."""
    whole = iter_full_tensors(model, bucket_bytes, dtype=dtype)
    return (piece.of(tensor) for name, tensor in whole for piece in pieces_of(name, tensor.shape, names))


def plan_files(
    tensors: Mapping[str, torch.Tensor], limit: int, dtype: torch.dtype | None = None, names: Sequence[StoredAs] = ()
) -> list[dict[str, TensorEntry]]:
    """Assign tensors to files, or buckets, of at most ``limit`` bytes, or of one larger tensor."""
    files: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        kind = cast_dtype(tensor, dtype)
        if kind not in CODES:
            raise TypeError(f"'{name}' has dtype {kind}, which safetensors files cannot hold")
        if tensor.is_meta:
            raise ValueError(f"'{name}' is on the meta device and has no values; call flatshard.materialize first")
        for piece in pieces_of(name, tensor.shape, names):
            entry = TensorEntry(kind, piece.shape)
            if size and size + entry.nbytes > limit:
                files.append({})
                size = 0
            files[-1][piece.name] = entry
            size += entry.nbytes
    return files


def write_files(
    folder: Path, files: Sequence[Mapping[str, TensorEntry]], tensors: Iterator[torch.Tensor], advance: Advance = ignore
) -> None:
    """Write tensors, in the order of `plan_files`, to temporary files, and rename these when all are complete."""
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    names = [SINGLE] if len(files) == 1 else names
    temporary = {name: folder / f".{name}.part" for name in (*names, INDEX)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in zip(names, files):
            write_file(temporary[name], file, tensors, advance)
        if len(names) > 1:
            total = sum(entry.nbytes for file in files for entry in file.values())
            weights = {key: name for name, file in zip(names, files) for key in file}
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            temporary[INDEX].write_text(json.dumps(index, indent=2) + "\n")
            names.append(INDEX)
        for name in names:
            temporary[name].rename(folder / name)
        (folder / (INDEX if len(names) == 1 else SINGLE)).unlink(missing_ok=True)  # left by an earlier export
        sync_folder(folder)
    finally:
        deque(tensors, maxlen=0)  # take part in the remaining gathers also after an error: other ranks wait for them
        for path in temporary.values():
            with suppress(OSError):  # usually the file does not exist
                path.unlink()


def load_safetensors(
    model: nn.Module, folder: str | Path, *, strict: bool = True, names: Sequence[StoredAs] = (), progress: bool = True
) -> None:
    """Load full weights from the safetensors files in ``folder`` into a model, sharded or not. All ranks must call it.

    Each rank reads the bytes of its own rows, and the model changes only after all ranks have read everything.
    CheckpointError names tensors that are missing or unexpected (``strict=False`` ignores these), have another shape or
    are damaged. Only files of `export_safetensors` have checksums; in others, damaged values are not detected. Weights
    are cast to the model's dtype. No code from the files is run. ``names``: the same as in `export_safetensors`.
    If a Transformers model has its weights under other names than its files, or fused, they are converted as
    `from_pretrained` converts them.
    """
    _arguments.module("load_safetensors", model)
    folder = _arguments.path("folder", folder)
    stored_names.check_names(names)
    ranks = Exchange("control")

    def stage() -> dict[str, Any]:
        source = find_tensors(folder)
        if names:
            shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
            source.tensors = stored_names.assemble(source.tensors, shapes, names, folder)
        recipes = {} if names else stored_names.convert_tensors(model, source)
        source.model = {"dict": [(name, {"tensor": name}) for name in source.tensors]}
        total = sum(file["bytes"] for file in source.files.values()) // ranks.size
        shown = bar("loading", total, progress and ranks.rank == 0)
        with shown as advance, ConvertingReader(source, advance, model, recipes) as reader:
            return stage_model(reader, model, strict)

    put_weights(model, on_all_ranks(ranks, stage))
