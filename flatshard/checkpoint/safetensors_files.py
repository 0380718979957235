"""Write safetensors files with checksums, and read the verified headers of any safetensors files.

Files that flatshard writes have checksums of every block of every tensor and of the header in their metadata, which
other readers ignore. In files of other programs, damaged values of tensors cannot be detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatshard.checkpoint import manifest_checks
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import (
    BLOCK,
    DTYPES,
    HEADER_LIMIT,
    Chunk,
    TensorEntry,
    TensorFiles,
    block_checksum,
    blocks_of,
    header_of,
    open_file,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes with one checksum. Blocks are small, as a rank reads all blocks around its rows; each adds 16 digits to a file.
SUMMED = 1 << 16
_BLOCK, _SUMS, _CHECK = "flatshard.block", "flatshard.checksums", "flatshard.header"


def checked_header(
    tensors: Mapping[str, TensorEntry], sums: Sequence[int] | None, block: int, metadata: dict[str, str]
) -> bytes:
    """The header of a safetensors file with checksums. ``sums`` None: zeros, for a header of the same length."""
    if sums is None:
        sums = [0] * sum(-(-entry.nbytes // block) for entry in tensors.values())
    own = {_BLOCK: str(block), _SUMS: "".join(f"{each:016x}" for each in sums)}
    blank = header_of(tensors, {_CHECK: f"{0:08x}", **metadata, **own})
    return blank.replace(_checked(0), _checked(zlib.crc32(blank)), 1)


def _checked(crc: int) -> bytes:
    """The entry of the header's metadata that holds the checksum of the header."""
    return b'"%s":"%08x"' % (_CHECK.encode(), crc)


def write_file(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    values: Iterator[torch.Tensor],
    advance: Callable[[int], None],
    block: int | None = None,
    metadata: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write tensors to a file and flush it to disk; returns the entry of `TensorFiles.files` for it."""
    block, metadata, sums = block or SUMMED, metadata or {"format": "pt"}, []
    header = checked_header(tensors, None, block, metadata)
    if len(header) > HEADER_LIMIT:
        raise CheckpointError(
            f"{path} would have a header of {len(header)} bytes, which is more than safetensors files may have "
            f"({HEADER_LIMIT}): write smaller files (max_shard_size), or save from more ranks"
        )
    with open(path, "wb") as out:
        out.write(header)
        for entry in tensors.values():
            for content in blocks_of(next(values).to(entry.dtype), block):
                sums.append(block_checksum(content))
                out.write(content)
                advance(len(content))
        size = out.tell()
        out.seek(0)
        header = checked_header(tensors, sums, block, metadata)
        out.write(header)
        out.flush()
        os.fsync(out.fileno())
    return file_facts(size, header)


def file_facts(size: int, header: bytes) -> dict[str, Any]:
    return {"bytes": size, "header": len(header), "sha256": hashlib.sha256(header).hexdigest()}


def sums_in(metadata: Mapping[str, str]) -> Any:
    """The checksums of all blocks of a file, as an array of numpy."""
    return np.frombuffer(bytes.fromhex(metadata[_SUMS]), dtype=">u8")


def find_tensors(folder: Path) -> TensorFiles:
    """The tensors in the safetensors files of a folder, or in one file. CheckpointError names a damaged file."""
    folder, single = (folder.parent, folder.name) if folder.is_file() else (folder, SINGLE)
    found = TensorFiles(folder)
    homes = _index(folder / INDEX) if single == SINGLE and (folder / INDEX).is_file() else {}
    names = sorted(set(homes.values())) if homes else [single]
    for name in names:
        for key, entry in _tensors_of(found, name).items():
            if homes.get(key, name) != name or key in found.tensors:
                where = homes.get(key, found.tensors[key].chunks[0].file if key in found.tensors else name)
                raise CheckpointError(f"{folder / name} has '{key}', which belongs to {where}: files are mixed up")
            found.tensors[key] = entry
    missing = next((key for key in homes if key not in found.tensors), None)
    if missing is not None:
        raise CheckpointError(f"{folder / homes[missing]} does not have '{missing}', although {INDEX} lists it there")
    return found


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index."""
    with reading(path, "an index of safetensors files"):
        with open_file(path) as file:
            homes = json.loads(file.read(), object_pairs_hook=_once)["weight_map"]
        for name in set(homes.values()):
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise CheckpointError(f"{path} names {name!r}, which is not a file in this folder")
        return dict(homes)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """A context in which errors of reading or parsing a file become CheckpointErrors."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or is not {what}") from error


def _tensors_of(found: TensorFiles, name: str) -> dict[str, TensorEntry]:
    """The tensors of one file, from its header; CheckpointError if the header is inconsistent."""
    path = found.folder / name
    with reading(path, "a safetensors file"):
        size = path.stat().st_size
        with open_file(path) as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError("it is too short")
            text = file.read(length)
        described = json.loads(text, object_pairs_hook=_once)
        metadata = described.pop("__metadata__", {})
        entries = {key: described_entry(path, key, entry, name, 8 + length) for key, entry in described.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].chunks[0].begin, item[1].nbytes)))
        check_places(path, entries, 8 + length, size)
        if isinstance(metadata, dict) and _CHECK in metadata:
            entries = _verified_sums(path, entries, metadata, start + text)
        found.files[name] = file_facts(size, start + text)
        return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; ValueError for duplicate keys, of which each reader may take another one."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def described_entry(path: Path, key: str, described: dict[str, Any], name: str, begin: int) -> TensorEntry:
    shape = manifest_checks.shape(described["shape"], f"the shape of '{key}'")
    first, last = manifest_checks.numbers(described["data_offsets"], f"the place of '{key}'")
    dtype = DTYPES.get(described["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: '{key}' has dtype {described['dtype']!r}, which is not supported")
    chunk = Chunk(name, begin + first, (0,) * len(shape), shape, ())
    entry = TensorEntry(dtype, shape, (chunk,))
    if last - first != entry.nbytes:
        raise CheckpointError(f"{path} is damaged: '{key}' has {last - first} bytes instead of {entry.nbytes}")
    return entry


def check_places(path: Path, entries: dict[str, TensorEntry], begin: int, size: int) -> None:
    """CheckpointError unless the tensors fill the file from the end of the header to its end, without gaps."""
    place = begin
    for key, entry in entries.items():
        if entry.chunks[0].begin != place or place + entry.nbytes > size:
            raise CheckpointError(f"{path} is damaged: the place of '{key}' is wrong, or the file is too short")
        place += entry.nbytes
    if place != size:
        raise CheckpointError(f"{path} is damaged: it has {size - place} bytes after its last tensor")


def _verified_sums(
    path: Path, entries: dict[str, TensorEntry], metadata: dict[str, Any], header: bytes
) -> dict[str, TensorEntry]:
    """Verify the header of a file that flatshard wrote, and add the checksums of their blocks to the tensors."""
    check, sums = int(metadata[_CHECK], 16), sums_in(metadata)
    blank = header.replace(_checked(check), _checked(0), 1)
    block = manifest_checks.number(int(metadata[_BLOCK]), "the block", BLOCK)
    if check != zlib.crc32(blank) or len(sums) != sum(-(-entry.nbytes // block) for entry in entries.values()):
        raise CheckpointError(
            f"{path} is damaged, or was changed by a program that kept its metadata: its header does not match its "
            f"checksum. If the file is right, remove {_CHECK} from its metadata"
        )
    return with_sums(entries, sums, block)


def with_sums(entries: dict[str, TensorEntry], sums: Any, block: int) -> dict[str, TensorEntry]:
    """The tensors of a file with the checksums of their blocks."""
    left, made = iter(sums.tolist()), {}
    for key, entry in entries.items():
        own = tuple(islice(left, -(-entry.nbytes // block)))
        made[key] = replace(entry, chunks=(replace(entry.chunks[0], sums=own, block=block),))
    return made
