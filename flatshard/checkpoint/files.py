"""The files of a checkpoint: one safetensors file per rank, and a manifest that says what is where.

    manifest.json               every tensor: dtype, shape, and its chunks: which file, which bytes, their checksums
    rank-00000.safetensors      the chunks that rank 0 wrote, one after another

Every mebibyte of a chunk has a checksum, so that a part of a chunk can be verified by reading little more. The manifest
carries its own SHA-256, and a checksum for what it says of each tensor, so that damage to it can be named too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from flatshard.checkpoint import manifest_checks
from flatshard.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
BLOCK = 1 << 20
FORMAT = "flatshard checkpoint 2"
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
_KEY = re.compile(r'"((?:model|optimizer|extra)/[ -~]*?)":\{"boxes"')
_FILE = re.compile(r"rank-\d{5,}\.safetensors")

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

    ``sums`` are the checksums of its blocks, of ``block`` bytes each; none where the file has none. ``transposed``: the
    file has the last two dims the other way round.
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
    """A tensor that is in files, or is to be written to one: then without chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class TensorFiles:
    """Files with tensors in them. ``model`` is a tree of names, ``files`` says of each how it begins and ends."""

    folder: Path
    files: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)


def _weights(count: int) -> Any:
    """Odd numbers of 64 bits without a pattern: the golden ratio's multiples, mixed."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


_WEIGHTS = _weights(BLOCK // 8)


def block_checksum(block: memoryview) -> int:
    """The checksum of at most ``BLOCK`` bytes: the sum of its words of 64 bits, each times a weight of its place.

    Weights are odd, so a change of one word always shows, whatever it is; other damage goes unseen once in 2**64. It
    takes half the time of a CRC, and loading is as fast as this is.
    """
    words = np.frombuffer(block, dtype=np.dtype("<u8"), count=len(block) // 8)
    rest = int.from_bytes(block[8 * len(words) :], "little")
    total = int(np.dot(words, _WEIGHTS[: len(words)]))
    return (total + rest * int(_WEIGHTS[len(words)]) if rest else total) % 2**64


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def blocks_of(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    """The bytes of a tensor, wherever it is, ``size`` at a time."""
    content = bytes_view(tensor.detach().cpu().contiguous())
    return (content[start : start + size] for start in range(0, len(content), size))


def header_of(tensors: Mapping[str, TensorEntry], metadata: dict[str, str] | None) -> bytes:
    """The beginning of a safetensors file with these tensors, one after another."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    place = 0
    for name, entry in tensors.items():
        end = place + entry.nbytes
        described[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_chunks(
    path: Path, chunks: Sequence[tuple[str, torch.Tensor]], advance: Callable[[int], None]
) -> tuple[dict[str, Any], list[tuple[int, list[int]]]]:
    """Write tensors to a new file, and make sure that they are on disk.

    Returns what the manifest says of the file, and of each tensor its first byte and its checksums.
    """
    described = {name: TensorEntry(tensor.dtype, tuple(tensor.shape)) for name, tensor in chunks}
    header = header_of(described, {"format": FORMAT})
    stored = []
    with open(path, "xb") as file:
        file.write(header)
        place = len(header)
        for _, tensor in chunks:
            sums = []
            for block in blocks_of(tensor, BLOCK):
                sums.append(block_checksum(block))
                file.write(block)
                advance(len(block))
            stored.append((place, sums))
            place += tensor.nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": place, "header": len(header), "crc": zlib.crc32(header)}, stored


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it. OSError also where it is none: pipes and devices need never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(path, "rb")


def sync_folder(path: Path) -> None:
    """Make sure that the names in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, body: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint whose other files are on disk."""
    for key, described in body["tensors"].items():
        described["check"] = _check(key, described)
    text = _canonical(body)
    with open(folder / MANIFEST, "xb") as file:
        file.write(b'{"sha256":"%s",\n"body":%s}\n' % (hashlib.sha256(text).hexdigest().encode(), text))
        file.flush()
        os.fsync(file.fileno())


def _canonical(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def _check(key: str, described: dict[str, Any]) -> int:
    """A checksum for what the manifest says of one tensor."""
    said = {name: value for name, value in described.items() if name != "check"}
    return zlib.crc32(_canonical([key, said]))


def _damaged_tensor(text: bytes) -> str:
    """Which tensor a damaged manifest tells wrong things of, as words of an error; nothing where it cannot be told."""
    wrong: list[str] = []
    try:
        tensors = json.loads(text)["body"]["tensors"]
        wrong = [key for key, described in tensors.items() if described.get("check") != _check(key, described)]
    except UnicodeDecodeError as error:
        wrong = _KEY.findall(text[: error.start].decode(errors="ignore"))[-1:]
    except json.JSONDecodeError as error:
        wrong = _KEY.findall(error.doc[: error.pos])[-1:]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # not even the outline of a manifest
    return f" in what it says of '{wrong[0]}'" if wrong else ""


class Manifest(TensorFiles):
    """What a checkpoint holds. CheckpointError where the manifest is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        path, text = folder / MANIFEST, b""
        try:
            with open_file(path) as file:
                text = file.read()
            outer = json.loads(text)
            body, digest = outer["body"], outer["sha256"]
        except FileNotFoundError:
            reason = "does not exist" if not folder.exists() else "has no manifest: it is not a complete checkpoint"
            raise CheckpointError(f"{folder} {reason}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            where = _damaged_tensor(text)
            raise CheckpointError(f"{path} is damaged{where or ', or is not a manifest of flatshard'}") from error
        if not isinstance(body, dict) or hashlib.sha256(_canonical(body)).hexdigest() != digest:
            where = _damaged_tensor(text)
            raise CheckpointError(f"{path} is damaged{where}: its checksum is not that of its content")
        if body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is of format {body.get('format')!r}; this version reads {FORMAT!r}")
        super().__init__(folder)
        self.digest: str = digest
        try:
            self._take_over(body)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be true: {error}") from error
        except KeyError as error:
            raise CheckpointError(f"{path} cannot be true: it does not say {error}") from error

    def _take_over(self, body: dict[str, Any]) -> None:
        """Take over what the manifest says, if it can be true."""
        self.saved = manifest_checks.number(body["saved"], "saved", 2**63)
        self.world = manifest_checks.number(body["world"], "world")
        self.files = body["files"]
        for name, known in self.files.items():
            if not _FILE.fullmatch(name):
                raise ValueError(f"it names a file {name!r}, which is none of a checkpoint")
            size = manifest_checks.number(known["bytes"], f"the size of {name}")
            manifest_checks.number(known["header"], f"the header of {name}", min(size, HEADER_LIMIT))
            manifest_checks.number(known["crc"], f"the checksum of {name}")
        taken: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        self.tensors = {key: self._entry(key, described, taken) for key, described in body["tensors"].items()}
        for name, ranges in taken.items():
            if not manifest_checks.do_not_overlap(ranges):
                raise ValueError(f"parts of tensors overlap in {name}")
        self.model = body["model"]
        self.optimizer: Any = body["optimizer"]
        self.extra: list[Any] = body["extra"]
        for what in ("model", "optimizer", "extra"):
            manifest_checks.tree(body[what], self.tensors, what)
        if len(self.extra) != self.world:
            raise ValueError(f"it is of {self.world} ranks, and has the extra of {len(self.extra)}")
        if not all(isinstance(name, str) for name, _ in self.model["dict"]):
            raise ValueError("the model has a name that is none")
        _check_optimizer(self.optimizer)

    def _entry(self, key: str, described: dict[str, Any], taken: dict[str, list[tuple[int, int]]]) -> TensorEntry:
        """What the manifest says of one tensor, if it can be true. Adds to the bytes of files that are taken."""
        shape = manifest_checks.shape(described["shape"], f"the shape of '{key}'")
        dtype = DTYPES.get(described["dtype"])
        if dtype is None:
            raise ValueError(f"'{key}' is of dtype {described['dtype']!r}, which is none of safetensors")
        parts = manifest_checks.parts([(offsets, sizes) for _, _, offsets, sizes, _ in described["boxes"]], shape, key)
        chunks = []
        for (file, given, _, _, sums), (offsets, sizes) in zip(described["boxes"], parts):
            begin = manifest_checks.number(given, f"where '{key}' is")
            size, known = math.prod(sizes) * dtype.itemsize, self.files.get(file)
            if known is None or not known["header"] <= begin <= known["bytes"] - size:
                raise ValueError(f"a part of '{key}' would be from byte {begin} of {file}, where there is none")
            checksums = manifest_checks.numbers(sums, f"a checksum of '{key}'", 2**64 - 1)
            if len(checksums) != -(-size // BLOCK):
                raise ValueError(f"a part of '{key}' has {len(checksums)} checksums")
            taken[file].append((begin, begin + size))
            chunks.append(Chunk(file, begin, offsets, sizes, checksums))
        return TensorEntry(dtype, shape, tuple(chunks))


def _check_optimizer(given: Any) -> None:
    if given is not None:
        parts = dict(given["dict"])
        for group in parts["groups"]:
            if not all(isinstance(name, str) for name in dict(group["dict"])["params"]):
                raise ValueError("the optimizer has a parameter without a name")
        for name, entries in parts["state"]["dict"]:
            if not isinstance(name, str) or not isinstance(entries["dict"], list):
                raise ValueError("the optimizer has state of a parameter without a name")
