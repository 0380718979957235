"""Tensors in safetensors files: places of their parts, checksums of blocks, and verified headers.

Files that flatshard writes have checksums of every block of every tensor and of the header in their metadata, which
other readers ignore. In files of other programs, damaged values of tensors cannot be detected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from flatshard.checkpoint import contents
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.progress import Advance

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
# Bytes with one checksum, in checkpoints and in exported files. The latter are small, as a rank reads all blocks around
# its rows; each adds 16 digits to a file.
BLOCK, SUMMED = 1 << 20, 1 << 16
_BLOCK, _SUMS, _CHECK = "flatshard.block", "flatshard.checksums", "flatshard.header"

# Names of dtypes in safetensors files.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file: ``sizes`` elements from ``offsets``, row-major, from byte ``begin`` of the file.

    ``sums``: checksums of its blocks of ``block`` bytes; empty if the file has none. ``transposed``: the last two dims
    are swapped in the file.
    """

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sums: tuple[int, ...]
    transposed: bool = False
    block: int = BLOCK


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in files; without chunks, a tensor that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks_within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Chunk]:
        """All chunks that have elements of this box, and possibly others."""
        return self.chunks

    def located(self, chunk: Chunk) -> Chunk:
        """The chunk with its place in the file and its checksums. Its file must have been opened."""
        return chunk


@dataclass
class TensorFiles:
    """Files with tensors. ``model``: the model's state dict as a tree of `encode_tree`.

    ``files``: for each file its size in ``bytes``, the size of its ``header``, and the ``sha256`` of the header.
    """

    folder: Path
    files: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def take_header(self, name: str, header: bytes) -> None:
        """Called with the verified header of each file when it is opened."""


def swapped(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes, or offsets, of a tensor whose last two dims are swapped."""
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _weights(count: int) -> Any:
    """Pseudo-random odd numbers of 64 bits: mixed multiples of the golden ratio."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


_WEIGHTS = _weights(BLOCK // 8)


def block_checksum(block: memoryview) -> int:
    """The checksum of at most ``BLOCK`` bytes: the sum of its 64-bit words, each times a weight of its position.

    Weights are odd, so any change of one word is detected; other damage is missed with probability 2**-64. It takes
    half the time of a CRC, and this time bounds the speed of loading.
    """
    words = np.frombuffer(block, dtype=np.dtype("<u8"), count=len(block) // 8)
    rest = int.from_bytes(block[8 * len(words) :], "little")
    total = int(np.dot(words, _WEIGHTS[: len(words)]))
    return (total + rest * int(_WEIGHTS[len(words)]) if rest else total) % 2**64


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def header_of(tensors: Mapping[str, TensorEntry], metadata: dict[str, str] | None) -> bytes:
    """The header of a safetensors file with these tensors in this order, with its length before it."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    begin = 0
    for name, entry in tensors.items():
        end = begin + entry.nbytes
        described[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it. OSError also for pipes and devices, which may be endless."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(path, "rb")


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    advance: Advance,
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
    with naming_file(path), open(path, "wb") as out:
        out.write(header)
        for entry in tensors.values():
            content = bytes_view(next(values).detach().to(entry.dtype).cpu().contiguous())
            for start in range(0, len(content), block):
                part = content[start : start + block]
                sums.append(block_checksum(part))
                out.write(part)
                advance(len(part))
        size = out.tell()
        out.seek(0)
        header = checked_header(tensors, sums, block, metadata)
        out.write(header)
        out.flush()
        os.fsync(out.fileno())
    return file_facts(size, header)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """A context in which an OSError names the file, also that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def file_facts(size: int, header: bytes) -> dict[str, Any]:
    return {"bytes": size, "header": len(header), "sha256": hashlib.sha256(header).hexdigest()}


def sums_in(metadata: Mapping[str, str]) -> Any:
    """The checksums of all blocks of a file, as an array of numpy."""
    return np.frombuffer(bytes.fromhex(metadata[_SUMS]), dtype=">u8")


def find_tensors(folder: Path) -> TensorFiles:
    """The tensors in the safetensors files of a folder, or in one file. CheckpointError names a damaged file."""
    folder, single = (folder.parent, folder.name) if folder.is_file() else (folder, SINGLE)
    files = TensorFiles(folder)
    homes = _index(folder / INDEX) if single == SINGLE and (folder / INDEX).is_file() else {}
    names = sorted(set(homes.values())) if homes else [single]
    for name in names:
        for key, entry in _tensors_of(files, name).items():
            if homes.get(key, name) != name or key in files.tensors:
                where = homes.get(key, files.tensors[key].chunks[0].file if key in files.tensors else name)
                raise CheckpointError(f"{folder / name} has '{key}', which belongs to {where}: files are mixed up")
            files.tensors[key] = entry
    missing = next((key for key in homes if key not in files.tensors), None)
    if missing is not None:
        raise CheckpointError(f"{folder / homes[missing]} does not have '{missing}', although {INDEX} lists it there")
    return files


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index."""
    with reading(path, "an index of safetensors files"):
        with open_file(path) as file:
            homes = json.loads(file.read(), object_pairs_hook=_without_duplicates)["weight_map"]
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


def _tensors_of(files: TensorFiles, name: str) -> dict[str, TensorEntry]:
    """The tensors of one file, from its header; CheckpointError if the header is inconsistent."""
    path = files.folder / name
    with reading(path, "a safetensors file"):
        size = path.stat().st_size
        with open_file(path) as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError("it is too short")
            text = file.read(length)
        described = json.loads(text, object_pairs_hook=_without_duplicates)
        metadata = described.pop("__metadata__", {})
        ordered = dict(sorted(described.items(), key=lambda item: item[1]["data_offsets"]))
        entries = entries_in(path, ordered, 8 + length, 8 + length, size)
        if isinstance(metadata, dict) and _CHECK in metadata:  # a file that flatshard wrote
            check, sums = int(metadata[_CHECK], 16), sums_in(metadata)
            blank = (start + text).replace(_checked(check), _checked(0), 1)
            block = contents.number(int(metadata[_BLOCK]), "the block", BLOCK)
            if check != zlib.crc32(blank) or len(sums) != sum(-(-entry.nbytes // block) for entry in entries.values()):
                raise CheckpointError(
                    f"{path} is damaged, or was changed by a program that kept its metadata: its header does not match "
                    f"its checksum. If the file is right, remove {_CHECK} from its metadata"
                )
            entries = with_sums(entries, sums, block)
        files.files[name] = file_facts(size, start + text)
        return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; ValueError for duplicate keys, of which each reader may take another one."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def entries_in(path: Path, described: Mapping[str, Any], header: int, begin: int, size: int) -> dict[str, TensorEntry]:
    """The tensors that the header of a file describes. They must fill the file from ``begin`` to its end without gaps.

    ``header``: the size of the header, from whose end the header counts the places of tensors. All numbers are bytes.
    """
    entries = {}
    for key, each in described.items():
        shape = contents.shape(each["shape"], f"the shape of '{key}'")
        first, last = contents.numbers(each["data_offsets"], f"the place of '{key}'")
        dtype = DTYPES.get(each["dtype"])
        if dtype is None:
            raise CheckpointError(f"{path}: '{key}' has dtype {each['dtype']!r}, which is not supported")
        entry = entries[key] = TensorEntry(dtype, shape, (Chunk(path.name, begin, (0,) * len(shape), shape, ()),))
        if last - first != entry.nbytes:
            raise CheckpointError(f"{path} is damaged: '{key}' has {last - first} bytes instead of {entry.nbytes}")
        if header + first != begin or begin + entry.nbytes > size:
            raise CheckpointError(f"{path} is damaged: the place of '{key}' is wrong, or the file is too short")
        begin += entry.nbytes
    if begin != size:
        raise CheckpointError(f"{path} is damaged: it has {size - begin} bytes after its last tensor")
    return entries


def with_sums(entries: dict[str, TensorEntry], sums: Any, block: int) -> dict[str, TensorEntry]:
    """The tensors of a file with the checksums of their blocks."""
    left, summed = iter(sums.tolist()), {}
    for key, entry in entries.items():
        own = tuple(islice(left, -(-entry.nbytes // block)))
        summed[key] = replace(entry, chunks=(replace(entry.chunks[0], sums=own, block=block),))
    return summed
