"""`StoredAs`: tensors that files hold under other names, in parts, or as one tensor per expert."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import TensorEntry

_EXPERT = "{expert}"


@dataclass(frozen=True)
class StoredAs:
    """A rule that says under which names files hold a tensor of a model.

    ``name``: name of the tensor in the model. ``*`` matches one component of a name, for example the number of a layer.
    ``files``: names in the files, with as many ``*``. With ``{expert}``, files have one tensor for each index of dim 0
    of a stack ``(experts, ...)``. Of several names, each has an equal part of the tensor along ``dim``.
    ``transposed``: the last two dims are swapped in the files.

    For experts ``(experts, in, out)`` that files hold as weights of linear layers:

        StoredAs("blocks.*.experts.up", ("model.layers.*.mlp.experts.{expert}.up_proj.weight",), transposed=True)
    """

    name: str
    files: tuple[str, ...]
    dim: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"StoredAs(name={self.name!r}): must be the name of a tensor")
        files: Any = self.files
        if isinstance(files, str) or not all(isinstance(name, str) for name in files):
            raise TypeError(f"StoredAs(files={self.files!r}): must be a tuple of names")
        for name in self.files:
            if name.count("*") != self.name.count("*"):
                raise ValueError(f"StoredAs(files=): {name!r} must have as many * as name={self.name!r}")
        if not self.files or len({_EXPERT in name for name in self.files}) > 1:
            raise ValueError(f"StoredAs(files={self.files!r}): must be names that all have {_EXPERT}, or none of them")
        if _EXPERT in self.files[0] and self.dim == 0 and len(self.files) > 1:
            raise ValueError(f"StoredAs(dim=0): must be at least 1 for several names with {_EXPERT}, which use dim 0")


@dataclass(frozen=True)
class StoredPiece:
    """One tensor in a file: the part of a model's tensor with ``sizes`` elements from ``offsets``."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_slice: bool = False  # the tensor in the file has no dim 0: the part has one index of it
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        sizes = self.sizes[self.is_slice :]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor to write to the file, as a view of the full tensor."""
        part = whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes))]
        part = part[0] if self.is_slice else part
        return part.transpose(-1, -2) if self.transposed else part


def pieces_of(name: str, shape: Sequence[int], rules: Sequence[StoredAs]) -> list[StoredPiece]:
    """The tensors in files that hold a tensor of a model, by the first rule that matches its name."""
    shape = tuple(shape)
    for rule in rules:
        match = re.fullmatch(re.escape(rule.name).replace(r"\*", r"([^.]+)"), name)
        if match is not None:
            return _pieces(name, shape, rule, match.groups())
    return [StoredPiece(name, (0,) * len(shape), shape)]


def _pieces(name: str, shape: tuple[int, ...], rule: StoredAs, found: tuple[str, ...]) -> list[StoredPiece]:
    stacked, parts = _EXPERT in rule.files[0], len(rule.files)
    if len(shape) < stacked + 2 * rule.transposed or (
        parts > 1 and (len(shape) <= rule.dim or shape[rule.dim] % parts)
    ):
        raise ValueError(f"'{name}' of shape {shape} cannot be stored by {rule}: too few dims, or an indivisible one")
    sizes = list(shape)
    if parts > 1:
        sizes[rule.dim] //= parts
    if stacked:
        sizes[0] = 1
    made = []
    for expert in range(shape[0]) if stacked else range(1):
        for number, pattern in enumerate(rule.files):
            offsets = [0] * len(shape)
            if parts > 1:
                offsets[rule.dim] = number * sizes[rule.dim]
            if stacked:
                offsets[0] = expert
            first, *others = pattern.split("*")
            given = first + "".join(star + other for star, other in zip(found, others))
            given = given.replace(_EXPERT, str(expert))
            made.append(StoredPiece(given, tuple(offsets), tuple(sizes), stacked, rule.transposed))
    return made


def assemble(
    tensors: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]], rules: Sequence[StoredAs], where: object
) -> dict[str, TensorEntry]:
    """Tensors of a model of these shapes, as parts of tensors in files. Those that match no rule are unchanged.

    CheckpointError names parts that are missing, have another shape, or are of different dtypes.
    """
    found, misfit = dict(tensors), f"{where} does not fit the model"
    for name, shape in shapes.items():
        pieces = pieces_of(name, shape, rules)
        if len(pieces) == 1 and pieces[0].name == name:
            continue
        chunks, dtypes = [], set()
        for piece in pieces:
            entry = found.pop(piece.name, None)
            if entry is None:
                raise CheckpointError(f"{misfit}: '{piece.name}', a part of '{name}', is missing")
            if entry.shape != piece.shape:
                needed = f"as a part of '{name}' it must have shape {piece.shape}"
                raise CheckpointError(f"{misfit}: '{piece.name}' has shape {entry.shape}; {needed}")
            dtypes.add(entry.dtype)
            (chunk,) = entry.chunks
            chunks.append(replace(chunk, offsets=piece.offsets, sizes=piece.sizes, transposed=piece.transposed))
        if len(dtypes) > 1:
            raise CheckpointError(f"{where}: the parts of '{name}' have different dtypes: {sorted(map(str, dtypes))}")
        found[name] = TensorEntry(dtypes.pop(), shape, tuple(chunks))
    return found


_LAYER = "model.layers.*."
# Models of Hugging Face have stacked experts, and their files have one tensor per expert.
MIXTRAL = (
    StoredAs(_LAYER + "mlp.gate.weight", (_LAYER + "block_sparse_moe.gate.weight",)),
    StoredAs(
        _LAYER + "mlp.experts.gate_up_proj",
        tuple(_LAYER + f"block_sparse_moe.experts.{_EXPERT}.{part}.weight" for part in ("w1", "w3")),
    ),
    StoredAs(_LAYER + "mlp.experts.down_proj", (_LAYER + f"block_sparse_moe.experts.{_EXPERT}.w2.weight",)),
)
QWEN_MOE = (
    StoredAs(
        _LAYER + "mlp.experts.gate_up_proj",
        tuple(_LAYER + f"mlp.experts.{_EXPERT}.{part}_proj.weight" for part in ("gate", "up")),
    ),
    StoredAs(_LAYER + "mlp.experts.down_proj", (_LAYER + f"mlp.experts.{_EXPERT}.down_proj.weight",)),
)
