"""Which tensors safetensors files hold, and where, whoever has written them: their headers, verified.

Files that flatshard exports carry checksums in their metadata, where other readers pass over them: of every block of
every tensor, and of the header. In other files damage to the values of a tensor cannot be seen.
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
# Bytes of a tensor with one checksum: a rank reads the blocks around its rows, and a file has 16 digits for each.
SUMMED = 1 << 16
_BLOCK, _SUMS, _CHECK = "flatshard.block", "flatshard.checksums", "flatshard.header"


def checked_header(
    tensors: Mapping[str, TensorEntry], sums: Sequence[int] | None, block: int, metadata: dict[str, str]
) -> bytes:
    """The beginning of a safetensors file with the checksums of its tensors. It is as long with None, for zeros."""
    if sums is None:
        sums = [0] * sum(-(-entry.nbytes // block) for entry in tensors.values())
    own = {_BLOCK: str(block), _SUMS: "".join(f"{each:016x}" for each in sums)}
    blank = header_of(tensors, {_CHECK: f"{0:08x}", **metadata, **own})
    return blank.replace(_checked(0), _checked(zlib.crc32(blank)), 1)


def _checked(crc: int) -> bytes:
    """The checksum of a header, in it."""
    return b'"%s":"%08x"' % (_CHECK.encode(), crc)


def write_file(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    values: Iterator[torch.Tensor],
    advance: Callable[[int], None],
    block: int | None = None,
    metadata: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write tensors to a file, one after another, and make sure that they are on disk.

    Returns what `TensorFiles` says of the file.
    """
    block, metadata, sums = block or SUMMED, metadata or {"format": "pt"}, []
    header = checked_header(tensors, None, block, metadata)
    if len(header) > HEADER_LIMIT:
        raise CheckpointError(f"{path} would have a header of {len(header)} bytes, which is too much: use more files")
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
    """The checksums of all blocks of a file, in their order: an array of numpy."""
    return np.frombuffer(bytes.fromhex(metadata[_SUMS]), dtype=">u8")


def find_tensors(folder: Path) -> TensorFiles:
    """The tensors in the files of a folder, or in one file. CheckpointError names the file that cannot be right."""
    folder, single = (folder.parent, folder.name) if folder.is_file() else (folder, SINGLE)
    found = TensorFiles(folder)
    homes = _index(folder / INDEX) if single == SINGLE and (folder / INDEX).is_file() else {}
    names = sorted(set(homes.values())) if homes else [single]
    for name in names:
        for key, entry in _tensors_of(found, name).items():
            if homes.get(key, name) != name or key in found.tensors:
                where = homes.get(key, found.tensors[key].chunks[0].file if key in found.tensors else name)
                raise CheckpointError(f"{folder / name} has '{key}', which is in {where}: files have been mixed up")
            found.tensors[key] = entry
    missing = next((key for key in homes if key not in found.tensors), None)
    if missing is not None:
        raise CheckpointError(f"{folder / homes[missing]} does not have '{missing}', which {INDEX} says is in it")
    return found


def _index(path: Path) -> dict[str, str]:
    """In which file each tensor is."""
    with reading(path, "an index of safetensors files"):
        with open_file(path) as file:
            homes = json.loads(file.read(), object_pairs_hook=_once)["weight_map"]
        for name in set(homes.values()):
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise CheckpointError(f"{path} names {name!r}, which is not a file in this folder")
        return dict(homes)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Within, whatever is wrong with a file is a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or is not {what}") from error


def _tensors_of(found: TensorFiles, name: str) -> dict[str, TensorEntry]:
    """What the header of one file says is in it, if that can be true."""
    path = found.folder / name
    with reading(path, "a safetensors file"):
        size = path.stat().st_size
        with open_file(path) as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError("it ends too soon")
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
    """A JSON object without duplicate keys: readers would take one of the two, or the other."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def described_entry(path: Path, key: str, described: dict[str, Any], name: str, begin: int) -> TensorEntry:
    shape = manifest_checks.shape(described["shape"], f"the shape of '{key}'")
    first, last = manifest_checks.numbers(described["data_offsets"], f"the place of '{key}'")
    dtype = DTYPES.get(described["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: '{key}' is of dtype {described['dtype']!r}, which is not supported")
    chunk = Chunk(name, begin + first, (0,) * len(shape), shape, ())
    entry = TensorEntry(dtype, shape, (chunk,))
    if last - first != entry.nbytes:
        raise CheckpointError(f"{path} is damaged: '{key}' does not lie in it")
    return entry


def check_places(path: Path, entries: dict[str, TensorEntry], begin: int, size: int) -> None:
    """Tensors lie one after another, from the end of the header to the end of the file."""
    place = begin
    for key, entry in entries.items():
        if entry.chunks[0].begin != place or place + entry.nbytes > size:
            raise CheckpointError(f"{path} is damaged: '{key}' does not lie in it")
        place += entry.nbytes
    if place != size:
        raise CheckpointError(f"{path} is damaged: it has {size - place} bytes after its last tensor")


def _verified_sums(
    path: Path, entries: dict[str, TensorEntry], metadata: dict[str, Any], header: bytes
) -> dict[str, TensorEntry]:
    """The tensors of a file of flatshard's with the checksums of their blocks."""
    check, sums = int(metadata[_CHECK], 16), sums_in(metadata)
    blank = header.replace(_checked(check), _checked(0), 1)
    block = manifest_checks.number(int(metadata[_BLOCK]), "the block", BLOCK)
    if check != zlib.crc32(blank) or len(sums) != sum(-(-entry.nbytes // block) for entry in entries.values()):
        raise CheckpointError(
            f"{path} is damaged, or was changed by a program that has kept its checksums: its header is not the one "
            f"that they are of. If it is right, remove {_CHECK} from its metadata"
        )
    return with_sums(entries, sums, block)


def with_sums(entries: dict[str, TensorEntry], sums: Any, block: int) -> dict[str, TensorEntry]:
    """The tensors of a file with the checksums of their blocks."""
    left, made = iter(sums.tolist()), {}
    for key, entry in entries.items():
        own = tuple(islice(left, -(-entry.nbytes // block)))
        made[key] = replace(entry, chunks=(replace(entry.chunks[0], sums=own, block=block),))
    return made
