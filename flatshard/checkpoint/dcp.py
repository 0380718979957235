"""Read folders of torch.distributed.checkpoint (DCP) without running code from them.

The index of such a folder, ``.metadata``, is a pickle of torch's classes. It is unpickled with stand-in classes that
only hold data; a name that is not in the table of stand-ins is an error. Tensors are files of `torch.save`, several in
one file, which `torch.load` reads with ``weights_only``. Their shapes, dtypes and checksums are verified.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from flatshard import _torch
from flatshard.checkpoint import contents
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import open_file
from flatshard.checkpoint.reader import MakeTensor

METADATA = ".metadata"
_CHUNK = 1 << 20
_THEIRS = "torch.distributed.checkpoint.metadata"
_EARLIER = "torch.distributed._shard.sharded_tensor.metadata"  # the module of TensorProperties up to torch 2.2
_RECORDS = {
    *((_THEIRS, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *((_THEIRS, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_EARLIER, "TensorProperties"),
}


class _Unpickler(pickle._Unpickler):
    """The Python version of pickle's class: the one in C allocates memory for any size that a pickle names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # New classes for each pickle, so that no pickle can change them for the next one.
        self._known: dict[tuple[str, str], Callable[..., Any]] = {
            **{key: type(key[1], (), {"__setstate__": _set_state}) for key in _RECORDS},
            ("torch", "Size"): lambda sizes=(): tuple(sizes),
            ("torch", "device"): lambda *described: described,
            ("torch.serialization", "_get_layout"): lambda name: name,
            (_THEIRS, "_MEM_FORMAT_ENCODING"): lambda number: number,
            (_EARLIER, "MEM_FORMAT_ENCODING"): lambda number: number,
            ("collections", "OrderedDict"): lambda items=(): dict(items),
            ("builtins", "set"): lambda items=(): set(items),
        }
        for module in ("pathlib", "pathlib._local"):
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
                self._known[module, name] = lambda *parts: "/".join(map(str, parts))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(f"it uses {module}.{name}, which is not allowed in an index")


def _set_state(record: Any, state: Any) -> None:
    record.__dict__.update(state if isinstance(state, dict) else {"state": state})


class DcpFolder:
    """A checkpoint of torch.distributed.checkpoint. CheckpointError names a file that is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_file(path / METADATA) as file:
                metadata = _Unpickler(io.BytesIO(file.read())).load()
            self._entries: dict[str, Any] = dict(metadata.state_dict_metadata)
            self._paths: dict[str, Any] = dict(metadata.planner_data or {name: (name,) for name in self._entries})
            self._stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
            for index, info in dict(metadata.storage_data).items():
                given = index.__dict__.get("offset")
                offset = None if given is None else contents.numbers(list(given), "an offset")
                self._stored[index.fqn, offset] = info
            self._check()
        except OSError as error:
            raise CheckpointError(f"{path / METADATA} cannot be read: {error.strerror}") from error
        except Exception as error:  # a pickle can fail in any way
            reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path / METADATA} is damaged, or is not an index of DCP: {reason}") from error

    def _check(self) -> None:
        """ValueError unless the index is consistent: every value has bytes of its own in an existing file."""
        if not all(isinstance(name, str) for name in self._entries):
            raise ValueError("a name is not a string")
        spans: dict[str, list[tuple[int, int]]] = {}
        for (name, _), info in self._stored.items():
            file, begin, length = info.relative_path, info.offset, info.length
            if not isinstance(file, str) or Path(file).name != file or "\0" in file:
                raise ValueError(f"'{name}' is in {file!r}, which is not a file in this folder")
            if info.__dict__.get("transform_descriptors"):
                raise ValueError(f"'{name}' was transformed by {info.transform_descriptors}, which is not supported")
            contents.number(begin, f"the place of '{name}'")
            contents.number(length, f"the length of '{name}'")
            spans.setdefault(file, []).append((begin, begin + length))
        for file, ranges in spans.items():
            size = (self._path / file).stat().st_size if (self._path / file).is_file() else 0
            overlap = any(before[1] > after[0] for before, after in pairwise(sorted(ranges)))
            if overlap or max(end for _, end in ranges) > size:
                raise ValueError(f"{file} is missing or too short, or values overlap in it")
        outline: dict[Any, Any] = {}
        for name, entry in self._entries.items():
            _put(outline, self._paths[name], None)
            if type(entry).__name__ == "TensorStorageMetadata":
                self._check_tensor(name, entry)
            elif type(entry).__name__ != "BytesStorageMetadata":
                raise ValueError(f"'{name}' is neither a tensor nor a value")

    def _check_tensor(self, name: str, entry: Any) -> None:
        entry.size = contents.shape(list(entry.size), f"the shape of '{name}'")
        entry.dtype = entry.properties.state[0]
        if not isinstance(entry.dtype, torch.dtype):
            raise ValueError(f"'{name}' has no dtype")
        low, high = contents.parts([(each.offsets, each.sizes) for each in entry.chunks], entry.size, name)
        parts = [(tuple(offsets), tuple(sizes)) for offsets, sizes in zip(low.tolist(), (high - low).tolist())]
        filled = [(offsets, sizes) for offsets, sizes in parts if 0 not in sizes]  # empty parts are not read
        if sum(math.prod(sizes) for _, sizes in filled) != math.prod(entry.size):
            raise ValueError(f"parts of '{name}' are missing")
        entry.filled_chunks = filled
        room = sum(self._stored[name, offsets].length for offsets, _ in filled)
        if math.prod(entry.size) * entry.dtype.itemsize > room:
            raise ValueError(f"'{name}' is larger than its parts in the files")

    def read(self, make: MakeTensor) -> dict[str, Any]:
        """The contents as a tree of dicts. ``make`` creates the tensors; otherwise one part at a time is in memory."""
        tree: dict[str, Any] = {}
        for name, entry in self._entries.items():
            value: Any
            if type(entry).__name__ == "TensorStorageMetadata":
                value = make(entry.dtype, entry.size)
                for offsets, sizes in entry.filled_chunks:
                    part = self._load(name, offsets)
                    if not isinstance(part, torch.Tensor) or (tuple(part.shape), part.dtype) != (sizes, entry.dtype):
                        self._refuse(name, offsets, "its shape or dtype is not that of the index")
                    _torch.in_box(value, offsets, sizes).copy_(part)
            else:
                value = self._load(name, None)
            _put(tree, self._paths[name], value)
        return tree

    def _load(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        if (name, offsets) not in self._stored:
            self._refuse(name, offsets, "the index does not name its file")
        info = self._stored[name, offsets]
        try:
            with open_file(self._path / info.relative_path) as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            check_archive(content, info.length)
            return torch.load(content, weights_only=True, map_location="cpu")
        except Exception as error:  # a zip file, a pickle or torch can fail in any way
            self._refuse(name, offsets, f"{error.strerror if isinstance(error, OSError) else error}", error)

    def _refuse(self, name: str, offsets: Any, reason: str, cause: BaseException | None = None) -> Any:
        info = self._stored.get((name, offsets))
        file = METADATA if info is None else info.relative_path
        raise CheckpointError(f"{self._path / file} is damaged: '{name}' cannot be read from it: {reason}") from cause


def _put(tree: Any, place: Sequence[Any], value: Any) -> None:
    *above, last = place
    for key in above:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or last in tree:
        raise ValueError(f"two values have the path {place}")
    tree[last] = value


def check_archive(file: BinaryIO, size: int) -> None:
    """ValueError unless a file of torch.save is intact: no entry is compressed or duplicate, and checksums are right.

    torch.load itself does not verify the checksums.
    """
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if len({part.filename for part in parts}) != len(parts):
            raise ValueError("it has two entries of one name")
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(p.file_size for p in parts) > size:
            raise ValueError("its entries are compressed, or larger than the file")
        for part in parts if torch.serialization.get_crc32_options() else ():
            with archive.open(part) as content:
                while content.read(_CHUNK):  # raises at the end if the checksum is wrong
                    pass
    file.seek(0)
