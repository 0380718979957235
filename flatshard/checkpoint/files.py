"""Tensors in files: places of their parts, and checksums of blocks."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

BLOCK = 1 << 20
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library

# Names of dtypes in safetensors files.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
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

    def located(self, entry: TensorEntry, chunk: Chunk) -> Chunk:
        """The chunk with its place in the file and its checksums. Its file must have been opened."""
        return chunk


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


def blocks_of(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    """The bytes of a tensor on any device, ``size`` at a time."""
    content = bytes_view(tensor.detach().cpu().contiguous())
    return (content[start : start + size] for start in range(0, len(content), size))


def header_of(tensors: Mapping[str, TensorEntry], metadata: dict[str, str] | None) -> bytes:
    """The header of a safetensors file with these tensors in this order, with its length before it."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    place = 0
    for name, entry in tensors.items():
        end = place + entry.nbytes
        described[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, end]}
        place = end
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
