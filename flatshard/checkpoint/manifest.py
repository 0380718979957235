"""The manifest of a checkpoint: its tensors, and the files that have their parts.

    manifest.json               every tensor: dtype, shape, and number of its table; the tables: which rank has which
                                box; every file: its size, and the SHA-256 of its header
    rank-00000.safetensors      the boxes that rank 0 wrote, in the order of the manifest's tensors, then the tensors of
                                its ``extra``; the header has the checksums, and ``extra`` itself

A table is one way to cut a tensor into boxes: the boxes of all ranks. A model has thousands of tensors and few ways to
cut them: blocks repeat, and a weight and its moments are cut alike. So a rank that saves sends its distinct boxes and
one number per tensor, which compress well, and the manifest grows with the number of tensors, and with the number of
ranks times the number of tables. A rank that loads reads the whole manifest, and the headers of the files that it
needs. Every mebibyte of a box has a checksum, so that a part of a box can be verified by reading little more. The
manifest has its own SHA-256, and a checksum of each tensor's entry, so that an error can name the damaged entry.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flatshard.checkpoint import contents, files
from flatshard.checkpoint.contents import check_tree
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import BLOCK, DTYPES, HEADER_LIMIT, Chunk, TensorEntry, TensorFiles

MANIFEST = "manifest.json"
FORMAT = "flatshard checkpoint 3"
EXTRA = "flatshard.extra"
_KEY = re.compile(r'"((?:model|optimizer)/[ -~]*?)":\{"dtype"')


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_manifest(folder: Path, body: dict[str, Any]) -> None:
    """Write the manifest. All other files of the checkpoint must be on disk."""
    checks = _checks(body)
    for key, described in body["tensors"].items():
        described["check"] = checks[key]
    text = _encoded(body)
    with files.naming_file(folder / MANIFEST), open(folder / MANIFEST, "xb") as file:
        file.write(b'{"sha256":"%s",\n"body":%s}\n' % (hashlib.sha256(text).hexdigest().encode(), text))
        file.flush()
        os.fsync(file.fileno())


def _encoded(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _checks(body: dict[str, Any]) -> dict[str, int]:
    """A checksum for each tensor, of its entry in the manifest and of its table."""
    tables = [zlib.crc32(_encoded(table)) for table in body["tables"]]
    checks = {}
    for key, described in body["tensors"].items():
        entry = {name: value for name, value in described.items() if name != "check"}
        checks[key] = zlib.crc32(_encoded([key, entry, tables[entry["table"]]]))
    return checks


def _damaged_tensor(text: bytes) -> str:
    """The part of an error that names the damaged entry of a manifest; empty if it cannot be found."""
    wrong: list[str] = []
    try:
        body = json.loads(text)["body"]
        wrong = [key for key, check in _checks(body).items() if body["tensors"][key].get("check") != check]
    except UnicodeDecodeError as error:
        wrong = _KEY.findall(text[: error.start].decode(errors="ignore"))[-1:]
    except json.JSONDecodeError as error:
        wrong = _KEY.findall(error.doc[: error.pos])[-1:]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # not a manifest at all
    return f" in the entry of '{wrong[0]}'" if wrong else ""


def pack_boxes(keys: Iterable[str], boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """The boxes that one rank holds of the tensors ``keys``, as JSON."""
    numbers_of: dict[Any, int] = {}
    numbers = np.array([numbers_of.setdefault(boxes.get(key), len(numbers_of)) for key in keys], dtype="<u4")
    return {"boxes": list(numbers_of), "numbers": base64.b64encode(zlib.compress(numbers.tobytes())).decode()}


def merge_boxes(
    shapes: Sequence[tuple[int, ...]], packed: Iterable[dict[str, Any]]
) -> tuple[list[int], list[list[tuple[int, Sequence[int], Sequence[int]]]]]:
    """The number of each tensor's table, and the tables: rank, offsets and sizes of each part.

    ``packed``: the results of `pack_boxes` on all ranks, for tensors of these shapes.
    """
    numbers_of: dict[Any, int] = {}
    tables = np.array([numbers_of.setdefault(shape, len(numbers_of)) for shape in shapes], dtype=np.int64)
    seen: dict[str, Any] = {}
    ranks: list[tuple[list[Any], Any]] = []
    for each in packed:
        text = each["numbers"]
        if text not in seen:
            numbers = seen[text] = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4")
            # Tensors share a table if every rank has the same box of each of them.
            pairs = tables * len(each["boxes"]) + numbers
            tables = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        ranks.append((each["boxes"], seen[text]))
    merged = []
    for tensor in np.unique(tables, return_index=True)[1].tolist():
        boxes = ((rank, held[numbers[tensor]]) for rank, (held, numbers) in enumerate(ranks))
        merged.append([(rank, *box) for rank, box in boxes if box is not None])
    return tables.tolist(), merged


class _Table:
    """One way to cut a tensor into boxes, one per rank."""

    def __init__(self, boxes: list[Any], shape: tuple[int, ...], world: int, key: str) -> None:
        self.shape = shape
        self._ranks = contents.numbers([rank for rank, _, _ in boxes], f"a rank of '{key}'", world - 1)
        self._low, self._high = contents.parts([(offsets, sizes) for _, offsets, sizes in boxes], shape, key)
        self.numels = dict(zip(self._ranks, (self._high - self._low).prod(axis=1).tolist()))
        if len(self.numels) < len(boxes):
            raise ValueError(f"one rank has two parts of '{key}'")

    def chunks_within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Chunk]:
        ends = [offset + size for offset, size in zip(offsets, sizes)]
        for place in np.flatnonzero(((self._low < ends) & (self._high > list(offsets))).all(axis=1)).tolist():
            low, high = self._low[place].tolist(), self._high[place].tolist()
            yield Chunk(rank_file(self._ranks[place]), 0, tuple(low), tuple(b - a for a, b in zip(low, high)), ())


@dataclass(frozen=True)
class RankFile:
    """The header of one rank's file, in arrays of numpy: there may be thousands of these objects."""

    begins: Any  # for each tensor of the manifest, the first byte of its box in the file
    blocks: Any  # for each tensor of the manifest, the index of its first checksum; then the total
    sums: Any
    extra: Any
    tensors: dict[str, TensorEntry]  # those of ``extra``


@dataclass(frozen=True, kw_only=True)
class _SavedTensor(TensorEntry):
    """A tensor of a checkpoint. Places and checksums of its chunks are in the headers of their files, ``opened``."""

    number: int
    table: _Table
    opened: Mapping[str, RankFile]

    def chunks_within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Chunk]:
        return self.table.chunks_within(offsets, sizes)

    def located(self, chunk: Chunk) -> Chunk:
        file = self.opened[chunk.file]
        first, last = file.blocks[self.number : self.number + 2].tolist()
        return replace(chunk, begin=int(file.begins[self.number]), sums=tuple(file.sums[first:last].tolist()))


class Manifest(TensorFiles):
    """The contents of a checkpoint. CheckpointError if its manifest is missing, damaged or inconsistent."""

    def __init__(self, folder: Path) -> None:
        path, text = folder / MANIFEST, b""
        try:
            with files.open_file(path) as file:
                text = file.read()
            outer = json.loads(text)
            body, digest = outer["body"], outer["sha256"]
        except FileNotFoundError:
            reason = "does not exist" if not folder.exists() else f"has no {MANIFEST}: it is not a complete checkpoint"
            raise CheckpointError(f"{folder} {reason}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            where = _damaged_tensor(text) or ", or is not a manifest of flatshard"
            raise CheckpointError(f"{path} is damaged{where}") from error
        if not isinstance(body, dict) or hashlib.sha256(_encoded(body)).hexdigest() != digest:
            raise CheckpointError(f"{path} is damaged{_damaged_tensor(text)}: its content does not match its checksum")
        if body.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is of format {body.get('format')!r}, and this version reads {FORMAT!r}: convert it with the "
                "version of flatshard that wrote it (flatshard convert --to dcp), and then the result with this one"
            )
        super().__init__(folder)
        self.digest: str = digest
        self.opened: dict[str, RankFile] = {}
        try:
            self._read_body(body)
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(f"{path} is inconsistent: {error}") from error
        except KeyError as error:
            raise CheckpointError(f"{path} is inconsistent: {error} is missing") from error

    def _read_body(self, body: dict[str, Any]) -> None:
        """Check the manifest for consistency and keep its contents."""
        self.saved = contents.number(body["saved"], "saved", 2**63)
        self.world = len(body["files"])
        self.files = {rank_file(rank): file for rank, file in enumerate(body["files"])}
        self._ranks = {name: rank for rank, name in enumerate(self.files)}
        for name, file in self.files.items():
            size = contents.number(file["bytes"], f"the size of {name}")
            contents.number(file["header"], f"the header of {name}", min(size, HEADER_LIMIT))
            if not isinstance(file["sha256"], str):
                raise ValueError(f"the checksum of {name} is not a string")
        self._tables: dict[int, _Table] = {}
        self._kinds: list[tuple[_Table, int]] = []  # table and bytes per element, for each tensor
        for key, described in body["tensors"].items():
            self.tensors[key] = self._entry(key, described, body["tables"])
        self.model = body["model"]
        self.optimizer: Any = body["optimizer"]
        for what in ("model", "optimizer"):
            check_tree(body[what], self.tensors, what)
        if not all(isinstance(name, str) for name, _ in self.model["dict"]):
            raise ValueError("the model has a name that is not a string")
        if self.optimizer is not None:
            parts = dict(self.optimizer["dict"])
            for group in parts["groups"]:
                if not all(isinstance(name, str) for name in dict(group["dict"])["params"]):
                    raise ValueError("the optimizer has a parameter without a name")
            for name, entries in parts["state"]["dict"]:
                if not isinstance(name, str) or not isinstance(entries["dict"], list):
                    raise ValueError("the optimizer has state of a parameter without a name")

    def _entry(self, key: str, described: dict[str, Any], tables: list[Any]) -> TensorEntry:
        """The entry of one tensor; ValueError if it is inconsistent."""
        shape = contents.shape(described["shape"], f"the shape of '{key}'")
        dtype = DTYPES.get(described["dtype"])
        if dtype is None:
            raise ValueError(f"'{key}' has dtype {described['dtype']!r}, which is not a dtype of safetensors")
        number = contents.number(described["table"], f"the table of '{key}'", len(tables) - 1)
        if number not in self._tables:
            self._tables[number] = _Table(tables[number], shape, self.world, key)
        table = self._tables[number]
        if table.shape != shape:
            raise ValueError(f"'{key}' has shape {shape}, and its table is for shape {table.shape}")
        self._kinds.append((table, dtype.itemsize))
        return _SavedTensor(dtype, shape, number=len(self.tensors), table=table, opened=self.opened)

    def take_header(self, name: str, header: bytes) -> None:
        path, rank = self.folder / name, self._ranks[name]
        with files.reading(path, "a file of this checkpoint"):
            described = json.loads(header[8:])
            metadata = described["__metadata__"]
            sizes = [table.numels.get(rank, 0) * itemsize for table, itemsize in self._kinds]
            begins = list(accumulate(sizes, initial=len(header)))
            blocks = list(accumulate((-(-size // BLOCK) for size in sizes), initial=0))
            own = {key: entry for key, entry in described.items() if key.startswith("extra/")}
            entries = files.entries_in(path, own, len(header), begins[-1], self.files[name]["bytes"])
            sums = files.sums_in(metadata)
            if len(sums) != blocks[-1] + sum(-(-entry.nbytes // BLOCK) for entry in entries.values()):
                raise CheckpointError(f"{path} is inconsistent: {len(sums)} checksums do not fit its tensors")
            entries = files.with_sums(entries, sums[blocks[-1] :], BLOCK)
            extra = json.loads(metadata[EXTRA])
            check_tree(extra, entries, "extra")
        self.opened[name] = RankFile(np.array(begins), np.array(blocks), sums, extra, entries)
