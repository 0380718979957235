"""Whole weights in the files that Hugging Face libraries read and write."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatshard import _arguments
from flatshard.buffer import Exchange
from flatshard.checkpoint import safetensors_files
from flatshard.checkpoint.errors import on_all_ranks
from flatshard.checkpoint.files import CODES, block_checksum, bytes_view, sync_folder
from flatshard.checkpoint.full import iter_full_tensors, named_tensors
from flatshard.checkpoint.loading import put_weights, stage_model
from flatshard.checkpoint.progress import bar
from flatshard.checkpoint.reader import Reader
from flatshard.checkpoint.safetensors_files import INDEX, SINGLE, checked_header, find_tensors
from flatshard.checkpoint.stored_as import StoredAs, assemble, pieces_of
from flatshard.checkpoint.transformers_conversion import ConvertingReader, convert_tensors

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass
class FilePlan:
    """A file, or a bucket, and what is to be in it: name, dtype and shape of tensors."""

    name: str
    size: int = 0
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=list)


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
    """Write a model's whole weights as `from_pretrained` reads them. All ranks call it; rank 0 writes.

    Files hold at most ``max_shard_size`` bytes (a number, or "5GB", "200MiB"), unless one tensor is larger; several
    have an index. They take the place of earlier ones when all are complete. Beyond the shards, one bucket of memory is
    used. Tied weights are written once. ``dtype`` casts floating-point tensors. ``names``: which tensors have other
    names there, or are stacks of experts that have one for each: `StoredAs`, or a preset, `MIXTRAL` or `QWEN_MOE`.
    The metadata of the files has checksums, which `load_safetensors` compares and other readers pass over.
    """
    _arguments.module("export_safetensors", model)
    folder, limit = _arguments.path("folder", folder), _bytes(max_shard_size)
    _arguments.whole_number("bucket_bytes", bucket_bytes, 1)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype or None")
    check_names(names)
    ranks = Exchange("checkpoint_save")
    files = plan_files(named_tensors(model), limit, dtype, names)
    on_all_ranks(ranks, lambda: folder.mkdir(parents=True, exist_ok=True) if ranks.rank == 0 else None)
    error: Exception | None = None
    writer = Writer(folder, files) if ranks.rank == 0 else None
    with bar("exporting", sum(file.size for file in files), progress and ranks.rank == 0) as advance:
        for name, tensor in iter_full_tensors(model, bucket_bytes):
            if writer is None or error is not None:
                continue  # others wait for this rank in the next gather, whatever happens here
            try:
                for piece in pieces_of(name, tensor.shape, names):
                    advance(writer.write(piece.of(tensor)))
            except Exception as found:
                error = found

    def finish() -> None:
        if error is not None:
            raise error
        if writer is not None:
            writer.publish()

    try:
        on_all_ranks(ranks, finish)
    finally:
        if writer is not None:
            writer.close()


def check_names(names: Any) -> None:
    """TypeError unless these are rules for names."""
    if isinstance(names, str) or not all(isinstance(rule, StoredAs) for rule in names):
        raise TypeError(
            f"names={names!r}: must be a list of StoredAs, or a preset such as flatshard.checkpoint.MIXTRAL"
        )


def _bytes(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS or not int(match[1]):
        raise ValueError(f"max_shard_size={size!r}: must be a number of bytes, or one with KB, MB, GB, KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], max_shard_size: int | str = "5GB") -> None:
    """Write tensors, in their order, to files in a folder that is there. One process does."""
    writer = Writer(folder, plan_files(tensors, _bytes(max_shard_size), None, ()))
    try:
        for tensor in tensors.values():
            writer.write(tensor)
        writer.publish()
    finally:
        writer.close()


def plan_files(
    tensors: Mapping[str, torch.Tensor], limit: int, dtype: torch.dtype | None, names: Sequence[StoredAs]
) -> list[FilePlan]:
    """Which tensors go into which file of at most ``limit`` bytes."""
    files = [FilePlan("")]
    for name, tensor in tensors.items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if kind not in CODES:
            raise TypeError(f"'{name}' is {kind}, which safetensors files cannot hold")
        if tensor.is_meta:
            raise ValueError(f"'{name}' is on the meta device and has no values; materialize the model first")
        for piece in pieces_of(name, tensor.shape, names):
            size = math.prod(piece.shape) * kind.itemsize
            if files[-1].size and files[-1].size + size > limit:
                files.append(FilePlan(""))
            files[-1].tensors.append((piece.name, kind, piece.shape))
            files[-1].size += size
    for number, file in enumerate(files, 1):
        file.name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


class Writer:
    """Writes tensors one after another into the planned files, under other names until all are complete."""

    def __init__(self, folder: Path, files: list[FilePlan]) -> None:
        self._folder = folder
        self._files = files
        self._todo = [(file, number) for file in files for number in range(len(file.tensors))]
        self._open: Any = None  # this one
        self._current = files[0]
        self._sums: list[int] = []  # of what has been written to it

    def write(self, tensor: torch.Tensor) -> int:
        """Write the next one; its bytes."""
        file, number = self._todo.pop(0)
        if number == 0:
            self._finish()
            self._open = open(self._temporary(file.name), "wb")  # noqa: SIM115 - stays open between tensors
            self._current = file
            self._open.write(checked_header(file.tensors, None))
        content = bytes_view(tensor.to(file.tensors[number][1]).cpu().contiguous())
        for start in range(0, len(content), safetensors_files.SUMMED):
            block = content[start : start + safetensors_files.SUMMED]
            self._sums.append(block_checksum(block))
            self._open.write(block)
        return len(content)

    def publish(self) -> None:
        """All are written: let them be seen."""
        self._finish()
        names = [file.name for file in self._files]
        if len(names) > 1:
            weights = {name: file.name for file in self._files for name, _, _ in file.tensors}
            index = {"metadata": {"total_size": sum(file.size for file in self._files)}, "weight_map": weights}
            self._temporary(INDEX).write_text(json.dumps(index, indent=2) + "\n")
            names.append(INDEX)
        for name in names:
            self._temporary(name).rename(self._folder / name)
        (self._folder / (INDEX if len(names) == 1 else SINGLE)).unlink(missing_ok=True)  # of an earlier export
        sync_folder(self._folder)

    def close(self) -> None:
        """Leave nothing unfinished behind."""
        if self._open is not None:
            self._open.close()
        for file in self._files:
            self._temporary(file.name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.part"

    def _finish(self) -> None:
        if self._open is not None:
            self._open.seek(0)
            self._open.write(checked_header(self._current.tensors, self._sums))
            self._sums.clear()
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._open = None


def load_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    strict: bool = True,
    names: Sequence[StoredAs] = (),
    progress: bool = True,
) -> None:
    """Load whole weights from the safetensors files in ``folder`` into a model, sharded or not. All ranks call it.

    Each rank reads the bytes of its own rows. Everything is read before anything changes; CheckpointError names what is
    missing or of another shape, unless ``strict`` is off, and what is damaged: values too where the file is one of
    `export_safetensors`. Others have no checksums. Weights are cast to the model's dtype. No code is run.
    ``names`` is as `export_safetensors` has it.
    Where a Transformers model holds weights otherwise than its files do (fused experts, other names), they are
    converted as `from_pretrained` does.
    """
    _arguments.module("load_safetensors", model)
    folder = _arguments.path("folder", folder)
    check_names(names)
    ranks = Exchange("control")
    staged: list[dict[str, Any]] = []

    def stage() -> None:
        source = find_tensors(folder)
        if names:
            shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
            source.tensors = assemble(source.tensors, shapes, names, folder)
        source.model = {"dict": [(name, {"tensor": name}) for name in source.tensors]}
        recipes = {} if names else convert_tensors(model, source)
        total = sum(file["bytes"] for file in source.files.values()) // ranks.size
        with bar("loading", total, progress and ranks.rank == 0) as advance, Reader(source, advance) as reader:
            staged.append(stage_model(source, ConvertingReader(reader, model, recipes), model, strict))

    on_all_ranks(ranks, stage)
    put_weights(model, staged[0])
