"""Weights of a model in training, streamed to the processes of an inference engine.

Tensors are gathered bucket by bucket (`iter_full_tensors`) and packed into one of two buffers: while one is on its way
to the receivers the next is filled. Nothing is ever whole but a bucket.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.tensor import DTensor

from flatshard import _arguments
from flatshard.buffer import spread
from flatshard.checkpoint.full import iter_full_tensors, named_tensors
from flatshard.checkpoint.reader import Reader
from flatshard.checkpoint.safetensors import FilePlan, Writer, check_names, plan_files
from flatshard.checkpoint.safetensors_files import find_tensors
from flatshard.checkpoint.state import Part, held_part
from flatshard.checkpoint.stored_as import StoredAs, pieces_of

Bucket: TypeAlias = "list[tuple[str, torch.Tensor]]"
Callback: TypeAlias = Callable[[Bucket], object]
_ALIGN = 16  # bytes
_NO_MEMBER = GroupMember.NON_GROUP_MEMBER  # what `new_group` returns where this rank is in none
_LATEST = "latest"  # the file in a folder that says which version is complete
_STAGES = 8  # buckets of a model, at least: one is gathered while another is sent and a third is put into place
_LEAST = 8 << 20  # bytes of a bucket, where there are as many
_PAUSE = 0.005  # seconds from one look at it to the next


@dataclass(frozen=True)
class Synced:
    """What went over. ``version``: of a folder, counted from 1; otherwise 0."""

    tensors: int
    bytes: int
    seconds: float
    version: int = 0

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.tensors} tensors, {self.bytes / 1e6:,.1f} MB in {self.seconds:.3f} s ({rate:.2f} GB/s)"


def sync_weights(
    model: nn.Module,
    target: Callback | ProcessGroup | str | Path,
    *,
    names: Sequence[StoredAs] = (),
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 256 << 20,
) -> Synced:
    """Stream the whole weights of ``model``, sharded or not, to ``target``. All ranks of the model call it.

    ``target`` is one of

    - a function, called on every rank with the (name, tensor) pairs of one bucket after another. They are valid until
      it returns. What loads weights piece by piece fits, for example ``engine.model.load_weights``.
    - a process group whose rank 0 is a rank of this model; its other ranks call `receive_weights` with it. Ranks of the
      model that are not in the group only take part in gathering.
    - a folder, best in shared memory (``/dev/shm/...``): safetensors files, complete when `receive_weights` sees them.
      The first rank of the model writes; the version before stays until the next one.

    ``names`` says what tensors are called over there (`flatshard.checkpoint.StoredAs`, or a preset). ``dtype`` casts
    floating-point tensors before they travel. Two buffers of at most ``bucket_bytes`` are used, and one to gather into.
    """
    _arguments.module("sync_weights", model)
    _arguments.whole_number("bucket_bytes", bucket_bytes, 1)
    check_names(names)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype or None")
    given: Any = target
    if not (isinstance(target, (ProcessGroup, str, Path)) or callable(given) or given == _NO_MEMBER):
        raise TypeError(f"target={target!r}: must be a function, a process group or a folder")
    began = time.monotonic()
    if not isinstance(target, (str, Path)):
        bucket_bytes = min(bucket_bytes, _enough(model, dtype))
    buckets = plan_files(named_tensors(model), bucket_bytes, dtype, names)
    pieces = _pieces(model, names, dtype, bucket_bytes)
    version = 0
    if isinstance(target, (str, Path)):
        version = _write(Path(target), model, buckets, pieces)
    elif isinstance(target, ProcessGroup):
        _send(target, buckets, pieces, _device(model))
    elif callable(given):
        for bucket in _packed(buckets, pieces, _device(model)):
            given(bucket.views)
    else:
        for _ in pieces:
            pass
    return _synced(buckets, began, version)


def receive_weights(
    target: nn.Module | Callback,
    source: ProcessGroup | str | Path,
    *,
    after: int = 0,
    timeout: float | None = None,
    device: torch.device | str | None = None,
) -> Synced:
    """Take what `sync_weights` streams into ``source``.

    ``target``: a model, whose tensors of the same names are written in place, each rank its own part of those that are
    DTensors (whole weights come, whatever way they are sharded here); or a function, called as `sync_weights` calls
    one. A name that the model does not have, one that did not come, or another shape is a ValueError, when all is read.
    ``source``: the process group, or the folder: then the first version that is newer than ``after`` is waited for, at
    most ``timeout`` seconds. ``device``: where a function wants the tensors (default: CPU).
    """
    began = time.monotonic()
    if isinstance(target, nn.Module):
        take: _Put | Callback = _Put(target)
        place = _device(target)
    elif callable(target):
        take, place = target, torch.device(device or "cpu")
    else:
        raise TypeError(f"target={target!r}: must be a module or a function")
    if isinstance(source, (str, Path)):
        version = _wait_for(Path(source), after, timeout)
        buckets = _read(Path(source) / str(version), take, place)
    elif isinstance(source, ProcessGroup):
        version, buckets = 0, _receive(source, take, place)
    else:
        raise TypeError(f"source={source!r}: must be a process group or a folder")
    if isinstance(take, _Put):
        take.finish()
    return _synced(buckets, began, version)


def _synced(buckets: Sequence[FilePlan], began: float, version: int) -> Synced:
    count = sum(len(bucket.tensors) for bucket in buckets)
    return Synced(count, sum(bucket.size for bucket in buckets), time.monotonic() - began, version)


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in named_tensors(model).values()), torch.device("cpu"))


def _enough(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Bytes of a bucket that are enough to keep a wire busy: several are on their way of a model, one after another."""
    tensors = named_tensors(model).values()
    size = sum(
        x.numel() * (dtype if dtype is not None and x.is_floating_point() else x.dtype).itemsize for x in tensors
    )
    return max(size // _STAGES, _LEAST)


def _pieces(
    model: nn.Module, names: Sequence[StoredAs], dtype: torch.dtype | None, limit: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iter_full_tensors(model, limit, dtype=dtype):
        for piece in pieces_of(name, tensor.shape, names):
            yield piece.name, piece.of(tensor)


# Buckets in memory


class _Buffer:
    """The tensors of one bucket, one after another."""

    def __init__(self, bucket: FilePlan, storage: torch.Tensor) -> None:
        self.views: Bucket = []
        place = 0
        for name, dtype, shape in bucket.tensors:
            count = math.prod(shape) * dtype.itemsize
            self.views.append((name, storage[place : place + count].view(dtype).view(shape)))
            place += _aligned(count)
        self.used = storage[:place]


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _storages(buckets: Sequence[FilePlan], device: torch.device) -> list[torch.Tensor]:
    """Two buffers that each bucket fits into."""
    sizes = (sum(_aligned(math.prod(shape) * dtype.itemsize) for _, dtype, shape in each.tensors) for each in buckets)
    most = max(sizes, default=0)
    return [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(min(2, len(buckets)))]


def _packed(
    buckets: Sequence[FilePlan], pieces: Iterator[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[_Buffer]:
    storages = _storages(buckets, device)
    for number, bucket in enumerate(buckets):
        buffer = _Buffer(bucket, storages[number % 2])
        for name, view in buffer.views:
            given, tensor = next(pieces)
            assert given == name
            view.copy_(tensor)
        yield buffer
    next(pieces, None)  # all ranks iterate to the end


def _send(
    group: ProcessGroup,
    buckets: Sequence[FilePlan],
    pieces: Iterator[tuple[str, torch.Tensor]],
    device: torch.device,
) -> None:
    """Rank 0 of the group tells what comes, and sends bucket after bucket; its other ranks give the places."""
    text = [[(name, str(dtype).removeprefix("torch."), s) for name, dtype, s in bucket.tensors] for bucket in buckets]
    message = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8).to(device)
    spread(group, torch.tensor([len(message)], device=device)).wait()
    spread(group, message).wait()
    work: Any = None
    for bucket in _packed(buckets, pieces, device):
        if work is not None:
            work.wait()  # then its buffer is free for the bucket after this one
        work = spread(group, bucket.used)
    if work is not None:
        work.wait()


def _receive(group: ProcessGroup, take: Callback, device: torch.device) -> list[FilePlan]:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    spread(group, size).wait()
    message = torch.empty(int(size), dtype=torch.uint8, device=device)
    spread(group, message).wait()
    buckets = []
    for tensors in json.loads(message.cpu().numpy().tobytes()):
        entries = [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in tensors]
        size_of = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in entries)
        buckets.append(FilePlan("", size_of, entries))
    storages = _storages(buckets, device)
    coming: tuple[Any, _Buffer] | None = None
    for number in range(len(buckets) + 1):
        before = coming
        if number < len(buckets):
            buffer = _Buffer(buckets[number], storages[number % 2])
            coming = spread(group, buffer.used), buffer
        if before is not None:
            before[0].wait()
            take(before[1].views)
    return buckets


class _Put:
    """Writes what comes into a model."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {
            name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
        }
        self._wrong: list[str] = []
        self._seen: set[int] = set()

    def part_of(self, name: str, shape: Sequence[int]) -> Part | None:
        """This rank's part of a tensor that comes, if there is one."""
        mine = self._tensors.get(name)
        if mine is None:
            self._wrong.append(f"'{name}' is not in the model")
            return None
        self._seen.add(id(mine))
        if tuple(mine.shape) != tuple(shape):
            self._wrong.append(f"'{name}' came as {tuple(shape)}; the model has {tuple(mine.shape)}")
            return None
        part = held_part(mine)
        return part if part.offsets is not None else None

    @torch.no_grad()
    def __call__(self, bucket: Bucket) -> None:
        for name, value in bucket:
            part = self.part_of(name, value.shape)
            if part is not None and part.offsets is not None:
                rows = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.local.shape))
                part.local.copy_(value[rows])

    def finish(self) -> None:
        missing = [f"'{name}' did not come" for name, value in self._tensors.items() if id(value) not in self._seen]
        wrong = [*self._wrong, *missing]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(f"weights do not fit: {'; '.join(wrong[:3])}{more}. names= of sync_weights maps names")


# Folders


def _is_first(model: nn.Module) -> bool:
    """Whether this rank is the first of those that hold the model."""
    coordinates = [x.device_mesh.get_coordinate() for x in named_tensors(model).values() if isinstance(x, DTensor)]
    return all(coordinate is not None and not any(coordinate) for coordinate in coordinates)


def _version(folder: Path) -> int:
    try:
        return int((folder / _LATEST).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _write(folder: Path, model: nn.Module, buckets: list[FilePlan], pieces: Iterator[tuple[str, torch.Tensor]]) -> int:
    version = _version(folder) + 1
    if not _is_first(model):
        for _ in pieces:
            pass
        return version
    place = folder / str(version)
    shutil.rmtree(place, ignore_errors=True)  # of a process that died
    place.mkdir(parents=True)
    writer = Writer(place, buckets)
    try:
        error: OSError | None = None
        for _, tensor in pieces:
            if error is None:
                try:
                    writer.write(tensor)
                except OSError as found:  # the other ranks wait in the next gather, whatever happens here
                    error = found
        if error is not None:
            raise error
        writer.publish()
    finally:
        writer.close()
    part = folder / f".{_LATEST}"
    part.write_text(str(version))
    os.replace(part, folder / _LATEST)
    shutil.rmtree(folder / str(version - 2), ignore_errors=True)
    return version


def _wait_for(folder: Path, after: int, timeout: float | None) -> int:
    began = time.monotonic()
    while (version := _version(folder)) <= after:
        if timeout is not None and time.monotonic() - began > timeout:
            raise TimeoutError(f"{folder} has no weights newer than version {after} after {timeout} s")
        time.sleep(_PAUSE)
    return version


@torch.no_grad()
def _read(folder: Path, take: _Put | Callback, device: torch.device) -> list[FilePlan]:
    source = find_tensors(folder)
    buckets: list[FilePlan] = []
    with Reader(source, lambda count: None) as reader:
        for name, entry in source.tensors.items():
            buckets.append(
                FilePlan("", math.prod(entry.shape) * entry.dtype.itemsize, [(name, entry.dtype, entry.shape)])
            )
            if not isinstance(take, _Put):
                take([(name, reader.read(name, entry, (0,) * len(entry.shape), entry.shape).to(device))])
                continue
            part = take.part_of(name, entry.shape)  # only its own rows are read
            if part is not None and part.offsets is not None:
                part.local.copy_(reader.read(name, entry, part.offsets, part.local.shape))
    return buckets
