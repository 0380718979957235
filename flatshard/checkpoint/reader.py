"""Read parts of tensors from the files of a checkpoint, and verify their checksums."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from flatshard import _arguments
from flatshard.checkpoint.contents import decode_tree
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import Chunk, TensorEntry, TensorFiles, block_checksum, bytes_view, open_file, swapped
from flatshard.checkpoint.manifest import Manifest, rank_file
from flatshard.checkpoint.progress import Advance, ignore

MakeTensor = Callable[[torch.dtype, Sequence[int]], torch.Tensor]
_MOST_OPEN = 256  # files; the usual limit of a process is 1,024, and a checkpoint may have thousands


class Reader(ExitStack):
    """Reads tensors, which ``make`` allocates, from files. ``advance`` is called with numbers of bytes read."""

    def __init__(self, source: TensorFiles, advance: Advance = ignore, make: MakeTensor | None = None) -> None:
        super().__init__()
        self.source, self._advance = source, advance
        self._make = make or (lambda dtype, sizes: torch.empty(tuple(sizes), dtype=dtype))
        self._open: dict[str, BinaryIO] = {}
        self._verified: set[str] = set()
        self.callback(self._close)  # once: a file may be opened many times, and a stack would keep each of them

    def whole(self, key: str) -> torch.Tensor:
        return self.read(key, self.source.tensors[key])

    def read(
        self, name: str, entry: TensorEntry, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Read a tensor, or the part of ``sizes`` elements from ``offsets``, to the CPU. ``name`` is used in errors."""
        offsets = (0,) * len(entry.shape) if offsets is None else offsets
        sizes = entry.shape if sizes is None else sizes
        missing, parts = math.prod(sizes), []
        for chunk in entry.chunks_within(offsets, sizes) if missing else ():
            low = [max(mine, its) for mine, its in zip(offsets, chunk.offsets)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes)]
            if all(a < b for a, b in zip(low, high)):
                self._file(chunk.file, name)
                parts.append((entry.located(chunk), low, high))
                missing -= math.prod(b - a for a, b in zip(low, high))
        if missing:
            raise CheckpointError(f"{self.source.folder} is incomplete: {missing} elements of '{name}' are in no file")
        result = self._make(entry.dtype, sizes)
        for chunk, low, high in parts:
            into = result[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets))]
            first, last = ([a - o for a, o in zip(ends, chunk.offsets)] for ends in (low, high))
            self._fill(name, into, chunk, first, last)
        if entry.dtype == torch.bool and result.numel() and result.view(torch.uint8).max() > 1:
            raise CheckpointError(
                f"{self.source.folder / parts[0][0].file} is damaged: '{name}' has values other than 0 and 1"
            )
        return result

    def _fill(self, name: str, into: torch.Tensor, chunk: Chunk, low: Sequence[int], high: Sequence[int]) -> None:
        """Copy the elements from ``low`` to ``high`` of a chunk into a tensor of their shape."""
        if chunk.transposed:
            part = into.new_empty(swapped(into.shape))
            turned = replace(chunk, sizes=swapped(chunk.sizes), transposed=False)
            self._fill(name, part, turned, swapped(low), swapped(high))
            into.copy_(part.mT)
            return
        if len(chunk.sizes) > 1 and chunk.sizes[0] == 1:  # drop this dim: then single rows of the next can be read
            self._fill(name, into[0], replace(chunk, sizes=chunk.sizes[1:]), low[1:], high[1:])
            return
        if not low:  # a scalar is one row
            into, low, high = into.view(1), (0,), (1,)
        total = math.prod(chunk.sizes) * into.element_size()
        row = math.prod(chunk.sizes[1:]) * into.element_size()
        start, stop = low[0] * row, high[0] * row
        block = chunk.block if chunk.sums else 1  # only whole blocks can be verified
        begin, end = start - start % block, min(total, -(-stop // block) * block)
        if (begin, end) == (start, stop) and into.is_contiguous() and into.nbytes == stop - start:
            self._read(name, chunk, start, bytes_view(into))
            return
        scratch = torch.empty(end - begin, dtype=torch.uint8)
        self._read(name, chunk, begin, bytes_view(scratch))
        rows = scratch[start - begin : stop - begin].clone().view(into.dtype).view(high[0] - low[0], *chunk.sizes[1:])
        index = (slice(None), *(slice(first, last) for first, last in zip(low[1:], high[1:])))
        into.copy_(rows[index])

    def _read(self, name: str, chunk: Chunk, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a chunk from ``start``, and verify them if the chunk has checksums."""
        file = self._file(chunk.file, name)
        file.seek(chunk.begin + start)
        for place in range(0, len(into), chunk.block):
            block = into[place : place + chunk.block]
            count = file.readinto(block)  # type: ignore[attr-defined]
            number = (start + place) // chunk.block
            if count != len(block) or (chunk.sums and block_checksum(block) != chunk.sums[number]):
                reason = "is too short" if count != len(block) else "is damaged"
                raise CheckpointError(f"{self.source.folder / chunk.file} {reason}: '{name}' cannot be read from it")
            self._advance(count)

    def _close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, name: str, tensor: str) -> BinaryIO:
        if name in self._open:
            return self._open[name]
        path, facts = self.source.folder / name, self.source.files[name]
        if len(self._open) >= _MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        try:
            file = self._open[name] = open_file(path)
            if name in self._verified:
                return file
            size = path.stat().st_size
            header = file.read(facts["header"])
        except OSError as error:
            raise CheckpointError(f"{path}, which holds '{tensor}', cannot be read: {error.strerror}") from error
        if size != facts["bytes"]:
            raise CheckpointError(f"{path}, which holds '{tensor}', has {size} bytes instead of {facts['bytes']}")
        if hashlib.sha256(header).hexdigest() != facts["sha256"]:
            raise CheckpointError(f"{path}, which holds '{tensor}', is damaged: its header does not match its checksum")
        self.source.take_header(name, header)
        self._verified.add(name)
        return file


def read_extra(manifest: Manifest, reader: Reader, rank: int) -> Any:
    reader._file(rank_file(rank), f"extra/{rank}")
    file = manifest.opened[rank_file(rank)]
    return decode_tree(file.extra, lambda key: reader.read(key, file.tensors[key]))


def verify(path: str | Path) -> None:
    """Read every byte of a checkpoint and compare it with its checksum; CheckpointError names what is damaged."""
    manifest = Manifest(_arguments.path("path", path))
    with Reader(manifest) as reader:
        for name, entry in manifest.tensors.items():
            for chunk in entry.chunks_within((0,) * len(entry.shape), entry.shape):
                reader.read(name, entry, chunk.offsets, chunk.sizes)
        for rank in range(manifest.world):
            read_extra(manifest, reader, rank)
