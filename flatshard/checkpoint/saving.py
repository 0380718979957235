"""`save`: write a checkpoint atomically, in the foreground or in a thread."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatshard import _arguments
from flatshard.buffer import Exchange
from flatshard.checkpoint import manifest
from flatshard.checkpoint.errors import CheckpointError, from_all_ranks, on_all_ranks
from flatshard.checkpoint.files import BLOCK, TensorEntry, sync_folder, write_file
from flatshard.checkpoint.manifest import EXTRA, FORMAT, MANIFEST, Manifest, rank_file
from flatshard.checkpoint.progress import bar
from flatshard.checkpoint.state import Snapshot, take_snapshot
from flatshard.optim.optimizer_state import saved_state

_LOG = logging.getLogger("flatshard")
_SAVING, _DELETING = ".saving-", ".deleting-"


class PendingSave:
    """A save that may still be running."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the save has ended, with success or with an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended, and raise its error if it failed. Returns False after ``timeout`` seconds."""
        global _last
        if not self._done.wait(timeout):
            return False
        if _last is self:
            _last = None  # the next save does not raise the error again
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> Path:
        """Wait for the save; returns the path of the complete checkpoint."""
        self.wait()
        return self.path


_last: PendingSave | None = None


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    asynchronous: bool = False,
    progress: bool = True,
) -> PendingSave:
    """Write the state of a model and of its optimizer to a new folder ``path``. All ranks must call it.

    The folder appears complete or not at all: files are written to another folder and flushed to disk, then the folder
    is renamed. Each rank writes its shards; replicas are written once. All ranks must share the storage of ``path``.

    ``extra``: further state of this rank: tensors, numbers, strings, bytes, None, and lists, tuples and dicts of them.
    ``keep_last``: after the save, keep only this many of the newest checkpoints in the parent folder of ``path``.
    ``asynchronous``: return when the state has been copied to host memory, and write in a thread. The next save waits
    for this one. ``wait`` and ``result`` of the returned object raise its error; if neither is called, the next save
    does. Call ``wait`` before the process group is destroyed.
    ``progress``: show a progress bar on rank 0 in a terminal.
    """
    global _last
    path = _arguments.path("path", path)
    _arguments.module("save", model)
    _arguments.optimizer(optimizer)
    if keep_last is not None:
        _arguments.whole_number("keep_last", keep_last, 1)
    ranks = Exchange("checkpoint_save")
    on_all_ranks(ranks, lambda: None if _last is None else _last.wait())  # a rank may have asked for its error already
    state = {} if optimizer is None else saved_state(optimizer)

    def prepare() -> Snapshot:
        if path.exists():
            raise CheckpointError(f"{path} exists; a checkpoint is never overwritten: choose another path")
        snapshot = take_snapshot(model, optimizer, state, extra, ranks.rank, ranks.size)
        if asynchronous:
            snapshot.to_host()
        return snapshot

    snapshot = on_all_ranks(ranks, prepare)
    digest = hashlib.sha256(repr(list(snapshot.tensors.items())).encode()).hexdigest()
    told = from_all_ranks(ranks, [path.name, digest, *snapshot.describe_replicas()])
    names, digests, possible_replicas, samples = zip(*told)
    for rank, each in enumerate(digests):
        if names[rank] != names[0]:
            raise CheckpointError(
                f"rank {rank} saves to '{names[rank]}' and rank 0 to '{names[0]}'; nothing saved, use one path"
            )
        if each != digests[0]:
            raise CheckpointError(
                f"rank {rank} has tensors of other names, shapes or dtypes than rank 0; nothing saved"
            )
    on_all_ranks(ranks, lambda: snapshot.write_replicas_once(possible_replicas, samples))
    pending = PendingSave(path)
    if asynchronous:
        _last = pending
        arguments = (pending, snapshot, ranks, keep_last)
        threading.Thread(target=_write_in_thread, args=arguments, name="flatshard checkpoint").start()
    else:
        write_snapshot(path, snapshot, ranks, keep_last, progress)
        pending._done.set()
    return pending


def _write_in_thread(pending: PendingSave, snapshot: Snapshot, ranks: Exchange, keep_last: int | None) -> None:
    try:
        write_snapshot(pending.path, snapshot, ranks, keep_last)
    except BaseException as error:
        pending._error = error
        _LOG.error("checkpoint %s was not saved: %s", pending.path, error)
    finally:
        snapshot.writes = []
        pending._done.set()


def write_snapshot(
    path: Path, snapshot: Snapshot, ranks: Exchange, keep_last: int | None = None, progress: bool = False
) -> None:
    """Write a checkpoint from the snapshots of all ranks."""

    def start() -> str | None:
        """Make a folder that no other save has: another job may be saving to the same path."""
        if ranks.rank != 0:
            return None
        for left in path.parent.glob(f"{_SAVING}*"):  # by a save that was killed
            if left.name.removeprefix(_SAVING).partition("-")[2] == path.name:
                _discard(left)
        folder = path.parent / f"{_SAVING}{secrets.token_hex(4)}-{path.name}"
        folder.mkdir(parents=True)
        return folder.name

    folder = path.parent / from_all_ranks(ranks, on_all_ranks(ranks, start))[0]
    try:
        own = on_all_ranks(ranks, lambda: _write_own(folder, snapshot, progress))
        # These messages are long, so only rank 0 receives them, one after another.
        written = map(json.loads, ranks.gather(json.dumps(own).encode(), only_first=True))
        on_all_ranks(ranks, lambda: _publish(path, folder, snapshot, written, keep_last) if ranks.rank == 0 else None)
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_own(folder: Path, snapshot: Snapshot, progress: bool) -> dict[str, Any]:
    tensors = {key: TensorEntry(local.dtype, tuple(local.shape)) for key, _, local in snapshot.writes}
    metadata = {"format": FORMAT, EXTRA: json.dumps(snapshot.extra)}
    values = (local for _, _, local in snapshot.writes)
    with bar("saving", sum(entry.nbytes for entry in tensors.values()), progress and snapshot.rank == 0) as advance:
        file = write_file(folder / rank_file(snapshot.rank), tensors, values, advance, BLOCK, metadata)
    boxes = {key: (offsets, tuple(local.shape)) for key, offsets, local in snapshot.writes}
    return {"file": file, **manifest.pack_boxes(snapshot.tensors, boxes)}


def _publish(path: Path, folder: Path, snapshot: Snapshot, written: Iterable[Any], keep_last: int | None) -> None:
    files: list[Any] = []

    def packed() -> Iterator[Any]:
        for rank, each in enumerate(written):
            seen = folder / rank_file(rank)
            if not seen.exists() or seen.stat().st_size != each["file"]["bytes"]:
                reason = f"rank 0 does not see what rank {rank} wrote: {path} must be on storage that all ranks share"
                raise CheckpointError(f"{seen} is missing or incomplete: {reason}, and no other job may save there")
            files.append(each["file"])
            yield each

    numbers, tables = manifest.merge_boxes([shape for _, shape in snapshot.tensors.values()], packed())
    others = complete(path.parent)
    body = {
        "format": FORMAT,
        "saved": max([time.time_ns(), *(saved + 1 for saved, _ in others)]),  # clocks can go backwards
        "model": snapshot.model,
        "optimizer": snapshot.optimizer,
        "files": files,
        "tables": tables,
        "tensors": {
            key: {"dtype": dtype, "shape": shape, "table": number}
            for (key, (dtype, shape)), number in zip(snapshot.tensors.items(), numbers)
        },
    }
    manifest.write_manifest(folder, body)
    sync_folder(folder)
    folder.rename(path)
    sync_folder(path.parent)
    if keep_last is not None:
        _prune(path.parent, others, keep_last - 1)


def _prune(parent: Path, others: list[tuple[int, Path]], keep: int) -> None:
    """Delete folders that killed saves and deletions have left, and all but the ``keep`` newest of ``others``."""
    for left in parent.iterdir():
        if left.name.startswith(_DELETING):
            shutil.rmtree(left, ignore_errors=True)
        elif left.name.startswith(_SAVING):
            _discard(left)
    for _, old in others[: max(0, len(others) - keep)]:
        _discard(old)


def _discard(folder: Path) -> None:
    """Delete a folder, unless another job has. It is renamed first: nobody loads or publishes a part of it."""
    moved = folder.with_name(f"{_DELETING}{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        folder.rename(moved)
    shutil.rmtree(moved, ignore_errors=True)


def complete(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints in a folder with the times of their saves, oldest first."""
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith((_SAVING, _DELETING)) and (path / MANIFEST).is_file():
            try:
                checkpoints.append((Manifest(path).saved, path))
            except CheckpointError as error:
                _LOG.warning("%s; checkpoint %s is ignored", error, path)
    return sorted(checkpoints)


def latest(path: str | Path) -> Path | None:
    """The newest complete checkpoint in the folder ``path``, or None.

    Ranks do not communicate. Call it while no save is running, so that all ranks find the same one.
    """
    checkpoints = complete(_arguments.path("path", path))
    return checkpoints[-1][1] if checkpoints else None
