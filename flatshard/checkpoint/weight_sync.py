"""`sync_weights` and `receive_weights`: stream the weights of a model in training to an inference engine.

Tensors are gathered one bucket at a time (`iter_full_tensors`) and packed into one of two buffers: one is filled while
the other is sent.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.tensor import DTensor

from flatshard import _arguments, _torch
from flatshard._sizes import format_bytes
from flatshard.buffer import Lane, broadcast
from flatshard.checkpoint import full
from flatshard.checkpoint.files import CODES, DTYPES, TensorEntry, find_tensors
from flatshard.checkpoint.reader import Reader
from flatshard.checkpoint.state import held_part
from flatshard.checkpoint.stored_names import StoredAs, check_names

Plan: TypeAlias = "dict[str, TensorEntry]"  # what a bucket is to hold
Bucket: TypeAlias = "list[tuple[str, torch.Tensor]]"
Callback: TypeAlias = Callable[[Bucket], object]
_NO_MEMBER = GroupMember.NON_GROUP_MEMBER  # what `new_group` returns on a rank that is not in the group
_LATEST = "latest"  # the file that names the newest complete version in a folder
_STAGES = 8  # least number of buckets: one is gathered while another is sent and a third is written to the receiver
_LEAST = 8 << 20  # bytes; smaller models have fewer buckets
_PAUSE = 0.005  # seconds between two reads of the file `_LATEST`


@dataclass(frozen=True)
class Synced:
    """What was sent or received. ``version``: the version in a folder, counted from 1; 0 if there is no folder."""

    tensors: int
    bytes: int
    seconds: float
    version: int = 0

    def __str__(self) -> str:
        size, rate = format_bytes(self.bytes), format_bytes(self.bytes / max(self.seconds, 1e-9))
        return f"{self.tensors} tensors, {size} in {self.seconds:.3f} s ({rate}/s)"


def sync_weights(
    model: nn.Module,
    target: Callback | ProcessGroup | str | Path,
    *,
    names: Sequence[StoredAs] = (),
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 256 << 20,
) -> Synced:
    """Stream the full weights of ``model``, sharded or not, to ``target``. All ranks of the model must call it.

    ``target`` is one of

    - a function. Every rank calls it for each bucket with a list of (name, tensor) pairs, which are valid until it
      returns. A function that loads weights in parts fits, for example ``engine.model.load_weights``.
    - a process group whose rank 0 is a rank of this model; its other ranks call `receive_weights` with it. Ranks of the
      model that are not in the group only take part in gathering.
    - a folder, preferably in shared memory (``/dev/shm/...``), for safetensors files. `receive_weights` sees only
      complete versions. The first rank of the model writes. The previous version is kept until the next sync.

    ``names``: names at the receiver (a list of `flatshard.checkpoint.StoredAs`, or a preset). ``dtype``: floating-point
    tensors are cast to it before they are sent. Memory: three buffers of at most ``bucket_bytes``.
    """
    _arguments.module("sync_weights", model)
    _arguments.whole_number("bucket_bytes", bucket_bytes, 1)
    check_names(names)
    full.check_dtype(dtype)
    given: Any = target
    if not (isinstance(target, (ProcessGroup, str, Path)) or callable(given) or given == _NO_MEMBER):
        raise TypeError(f"target={target!r}: must be a function, a process group or a folder")
    began, version = time.monotonic(), 0
    tensors, device = full.named_tensors(model), _device(model)
    if not isinstance(target, (str, Path)):  # several buckets, so that gathers and sends overlap
        size = sum(tensor.numel() * full.cast_dtype(tensor, dtype).itemsize for tensor in tensors.values())
        bucket_bytes = min(bucket_bytes, max(size // _STAGES, _LEAST))
    buckets = full.plan_files(tensors, bucket_bytes, dtype, names)
    pieces = full.stored_tensors(model, bucket_bytes, dtype, names)
    try:
        if isinstance(target, (str, Path)):
            version = _write(Path(target), tensors, buckets, pieces)
        elif isinstance(target, ProcessGroup):
            _send(target, buckets, pieces, device)
        elif callable(given):
            for views, _ in _staged(buckets, device, pieces):
                given(views)
    finally:
        deque(pieces, maxlen=0)  # every rank must take part in all gathers, also after an error of the target
    return _synced(buckets, began, version)


def receive_weights(
    target: nn.Module | Callback,
    source: ProcessGroup | str | Path,
    *,
    after: int = 0,
    timeout: float | None = None,
    device: torch.device | str | None = None,
) -> Synced:
    """Receive the weights that `sync_weights` sends to ``source``.

    ``target``: a model, or a function that is called as `sync_weights` calls one. The tensors of a model are written in
    place; of a DTensor, each rank writes its own shard, with any sharding. After everything was read, ValueError names
    tensors that are not in the model, were not received, or have another shape.
    ``source``: the process group or the folder that was the ``target`` of `sync_weights`. For a folder, wait at most
    ``timeout`` seconds for a version newer than ``after``; then TimeoutError.
    ``device``: the device of the tensors that a function receives (default: CPU).
    """
    began = time.monotonic()
    if isinstance(target, nn.Module):
        take: _ModelWriter | Callback = _ModelWriter(target)
        target_device = _device(target)
    elif callable(target):
        take, target_device = target, torch.device(device or "cpu")
    else:
        raise TypeError(f"target={target!r}: must be a module or a function")
    if isinstance(source, (str, Path)):
        version = _wait_for(Path(source), after, timeout)
        buckets = _read(Path(source) / str(version), take, target_device)
    elif isinstance(source, ProcessGroup):
        version, buckets = 0, _receive(source, take, target_device)
    else:
        raise TypeError(f"source={source!r}: must be a process group or a folder")
    if isinstance(take, _ModelWriter):
        take.finish()
    return _synced(buckets, began, version)


def _synced(buckets: Sequence[Plan], began: float, version: int) -> Synced:
    sizes = [entry.nbytes for bucket in buckets for entry in bucket.values()]
    return Synced(len(sizes), sum(sizes), time.monotonic() - began, version)


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in full.named_tensors(model).values()), torch.device("cpu"))


def _staged(
    buckets: Sequence[Plan], device: torch.device, pieces: Iterator[torch.Tensor] | None = None
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Each bucket's tensors as views of one of two buffers, filled with ``pieces``; and the used part of the buffer."""
    most = max(sum(map(full.aligned, bucket.values())) for bucket in buckets)
    storages = [torch.empty(most, dtype=torch.uint8, device=device) for _ in buckets[:2]]
    for bucket, storage in zip(buckets, itertools.cycle(storages)):
        views, size = full.views_of(storage, bucket)
        if pieces is not None:
            for view in views.values():
                view.copy_(next(pieces))
        yield list(views.items()), storage[:size]


def _send(group: ProcessGroup, buckets: Sequence[Plan], pieces: Iterator[torch.Tensor], device: torch.device) -> None:
    """Broadcast names, dtypes and shapes, and then each bucket, from rank 0 of the group."""
    text = [[(name, CODES[x.dtype], x.shape) for name, x in bucket.items()] for bucket in buckets]
    message = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8).to(device)
    broadcast(group, torch.tensor([len(message)], device=device)).wait()
    work = broadcast(group, message)
    for _, used in _staged(buckets, device, pieces):
        work.wait()  # the previous bucket was sent, so its buffer is free for the next one
        work = broadcast(group, used)
    work.wait()


def _receive(group: ProcessGroup, take: Callback, device: torch.device) -> list[Plan]:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    broadcast(group, size).wait()
    message = torch.empty(int(size), dtype=torch.uint8, device=device)
    broadcast(group, message).wait()
    described = json.loads(message.cpu().numpy().tobytes())
    buckets = [{name: TensorEntry(DTYPES[code], tuple(shape)) for name, code, shape in each} for each in described]
    arriving: Iterator[Any] = ((broadcast(group, used), views) for views, used in _staged(buckets, device))
    for (work, views), _ in itertools.pairwise(itertools.chain(arriving, [None])):  # the next arrives meanwhile
        work.wait()
        take(views)
    return buckets


class _ModelWriter:
    def __init__(self, model: nn.Module) -> None:
        self._tensors = {
            name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
        }
        self._wrong: list[str] = []
        self._seen: set[int] = set()

    def __call__(self, bucket: Bucket) -> None:
        for name, value in bucket:
            self.put(name, value.shape, partial(_torch.in_box, value))

    @torch.no_grad()
    def put(self, name: str, shape: Sequence[int], read: Callable[..., torch.Tensor]) -> None:
        """Write this rank's part of a received tensor: ``read(offsets, sizes)``."""
        target = self._tensors.get(name)
        if target is None:
            self._wrong.append(f"'{name}' is not in the model")
            return
        self._seen.add(id(target))
        if tuple(target.shape) != tuple(shape):
            self._wrong.append(f"'{name}' was received with shape {tuple(shape)}; the model has {tuple(target.shape)}")
            return
        part = held_part(target)
        if part.offsets is not None:
            part.local.copy_(read(part.offsets, part.local.shape))

    def finish(self) -> None:
        unseen = [name for name, value in self._tensors.items() if id(value) not in self._seen]
        wrong = [*self._wrong, *(f"'{name}' was not received" for name in unseen)]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            advice = "If only names differ, pass names= to sync_weights"
            raise ValueError(f"received weights do not fit the model: {'; '.join(wrong[:3])}{more}. {advice}")


def _version(folder: Path) -> int:
    try:
        return int((folder / _LATEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def _write(folder: Path, tensors: dict[str, torch.Tensor], buckets: list[Plan], pieces: Iterator[torch.Tensor]) -> int:
    version = _agree(_version(folder) + 1, tensors)
    coordinates = [x.device_mesh.get_coordinate() for x in tensors.values() if isinstance(x, DTensor)]
    if any(coordinate is None or any(coordinate) for coordinate in coordinates):
        return version  # only the first rank of the model writes
    version_folder = folder / str(version)
    shutil.rmtree(version_folder, ignore_errors=True)  # left by a process that was killed
    full.write_files(version_folder, buckets, pieces)
    part = folder / f".{_LATEST}"
    part.write_text(str(version))
    os.replace(part, folder / _LATEST)
    shutil.rmtree(folder / str(version - 2), ignore_errors=True)
    return version


def _agree(version: int, tensors: dict[str, torch.Tensor]) -> int:
    """The version that the first rank of the model gives: others do not know whether the previous one is written."""
    meshes = {x.device_mesh: _torch.local_of(x).device for x in tensors.values() if isinstance(x, DTensor)}
    for mesh, device in meshes.items():
        if mesh.get_coordinate() is not None:
            lane, agreed = Lane("full_tensors", device), torch.tensor([version], device=device)
            for axis in reversed(range(mesh.ndim)):
                broadcast(lane.group(mesh, axis), agreed).wait()
            version = int(agreed)
    return version


def _wait_for(folder: Path, after: int, timeout: float | None) -> int:
    began = time.monotonic()
    while (version := _version(folder)) <= after:
        if timeout is not None and time.monotonic() - began > timeout:
            advice = "check that sync_weights writes to it, or give a longer timeout"
            raise TimeoutError(f"{folder} has no weights newer than version {after} after {timeout} s: {advice}")
        time.sleep(_PAUSE)
    return version


def _read(folder: Path, take: _ModelWriter | Callback, device: torch.device) -> list[Plan]:
    source = find_tensors(folder)
    with Reader(source) as reader:
        for name, entry in source.tensors.items():
            if isinstance(take, _ModelWriter):
                take.put(name, entry.shape, partial(reader.read, name, entry))  # a rank reads only its own rows
            else:
                with torch.no_grad():
                    take([(name, reader.whole(name).to(device))])
    return [source.tensors]
