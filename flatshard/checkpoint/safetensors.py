"""`export_safetensors` and `load_safetensors`: full weights in the files that Hugging Face libraries use."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatshard import _arguments
from flatshard._sizes import parse_bytes
from flatshard.buffer import Exchange
from flatshard.checkpoint.errors import on_all_ranks
from flatshard.checkpoint.files import CODES, INDEX, SINGLE, TensorEntry, find_tensors, sync_folder, write_file
from flatshard.checkpoint.full import cast_dtype, check_dtype, iter_full_tensors, named_tensors
from flatshard.checkpoint.loading import put_weights, stage_model
from flatshard.checkpoint.progress import Advance, bar, ignore
from flatshard.checkpoint.stored_names import ConvertingReader, StoredAs, assemble, convert_tensors, pieces_of


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
    folder, limit = _arguments.path("folder", folder), _bytes(max_shard_size)
    _arguments.whole_number("bucket_bytes", bucket_bytes, 1)
    check_dtype(dtype)
    check_names(names)
    ranks = Exchange("checkpoint_save")
    files = plan_files(named_tensors(model), limit, dtype, names)
    on_all_ranks(ranks, lambda: folder.mkdir(parents=True, exist_ok=True) if ranks.rank == 0 else None)
    pieces = stored_tensors(model, bucket_bytes, None, names)
    total = sum(entry.nbytes for file in files for entry in file.values())
    with bar("exporting", total, progress and ranks.rank == 0) as advance:
        write = partial(write_files, folder, files, pieces, advance)
        on_all_ranks(ranks, write if ranks.rank == 0 else partial(deque, pieces, maxlen=0))


def check_names(names: Any) -> None:
    """TypeError unless ``names`` is a sequence of `StoredAs`."""
    if isinstance(names, str) or not all(isinstance(rule, StoredAs) for rule in names):
        raise TypeError(
            f"names={names!r}: must be a list of StoredAs, or a preset such as flatshard.checkpoint.MIXTRAL"
        )


def _bytes(size: int | str) -> int:
    found = parse_bytes(size) if isinstance(size, str) else size
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"max_shard_size={size!r}: must be a number of bytes, or a string such as '5GB' or '200MiB'")
    return found


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
    model: nn.Module,
    folder: str | Path,
    *,
    strict: bool = True,
    names: Sequence[StoredAs] = (),
    progress: bool = True,
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
    check_names(names)
    ranks = Exchange("control")

    def stage() -> dict[str, Any]:
        source = find_tensors(folder)
        if names:
            shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
            source.tensors = assemble(source.tensors, shapes, names, folder)
        recipes = {} if names else convert_tensors(model, source)
        source.model = {"dict": [(name, {"tensor": name}) for name in source.tensors]}
        total = sum(file["bytes"] for file in source.files.values()) // ranks.size
        shown = bar("loading", total, progress and ranks.rank == 0)
        with shown as advance, ConvertingReader(source, advance, model, recipes) as reader:
            return stage_model(reader, model, strict)

    put_weights(model, on_all_ranks(ranks, stage))
