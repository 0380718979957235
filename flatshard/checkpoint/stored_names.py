"""Tensors that have other names in files than in the model, or are there in parts.

- Wrappers (megatron_fsdp, DistributedDataParallel) add the prefix ``module.`` to all names: `renaming`, `renamed`.
- Files hold a tensor under other names, in parts, or as one tensor per expert, by the user's rules: `StoredAs`.
- Transformers (since version 5) stores experts one by one, for example, and fuses them in the model. For each
  architecture it has a mapping from one to the other: `convert_tensors`. Of tensors that are only renamed, each rank
  reads its own rows. Tensors that are made of several others are made in full, one at a time, and then sharded.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatshard import _torch
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import TensorEntry, TensorFiles, swapped
from flatshard.checkpoint.progress import Advance
from flatshard.checkpoint.reader import Reader
from flatshard.engine.tree.unit_classes import original_classes

_EXPERT = "{expert}"


def renaming(saved: Collection[str], wanted: Collection[str]) -> Callable[[str], str]:
    """A function from saved names to names of the model: it replaces the prefix that wrappers added to all names."""
    saved_prefix, prefix = _module_prefix(saved), _module_prefix(wanted)
    return lambda name: prefix + name[len(saved_prefix) :] if name.startswith(saved_prefix) else name


def _module_prefix(names: Collection[str]) -> str:
    """The repetitions of ``module.`` that all names begin with."""
    prefix = ""
    while names and all(name.startswith(f"{prefix}module.") for name in names):
        prefix += "module."
    return prefix


def renamed(state: dict[str, Any], *, add: str = "", remove: str = "") -> dict[str, Any]:
    """A state dict of the same tensors with the prefix ``remove`` of each name replaced by ``add``.

    ``state``: the state dict of a model, or of an optimizer as torch's ``get_optimizer_state_dict`` returns it. With
    the result, torch.distributed.checkpoint reads and writes checkpoints of models that were wrapped:

        theirs = renamed(get_model_state_dict(model), add="module.")
        dcp.load({"model": theirs}, checkpoint_id=path)
        set_model_state_dict(model, renamed(theirs, remove="module."))
    """
    if not isinstance(state, dict):
        raise TypeError(f"renamed takes a state dict, not {type(state).__name__}")
    for what, given in (("add", add), ("remove", remove)):
        if not isinstance(given, str):
            raise TypeError(f"{what}={given!r}: must be a string")

    def change(name: str) -> str:
        if not name.startswith(remove):
            raise ValueError(f"'{name}' does not begin with remove={remove!r}")
        return add + name[len(remove) :]

    if state.keys() == {"state", "param_groups"}:
        return with_names(state, change)
    return {change(name): value for name, value in state.items()}


def with_names(optimizer: dict[str, Any], change: Callable[[Any], str]) -> dict[str, Any]:
    """The state dict of an optimizer with ``change`` applied to the names, or numbers, of its parameters."""
    groups = [{**group, "params": [change(name) for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {change(name): entries for name, entries in optimizer["state"].items()}, "param_groups": groups}


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


def check_names(names: Any) -> None:
    """TypeError unless ``names`` is a sequence of `StoredAs`."""
    if isinstance(names, str) or not all(isinstance(rule, StoredAs) for rule in names):
        raise TypeError(
            f"names={names!r}: must be a list of StoredAs, or a preset such as flatshard.checkpoint.MIXTRAL"
        )


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
        return swapped(sizes) if self.transposed else sizes

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor to write to the file, as a view of the full tensor."""
        part = _torch.in_box(whole, self.offsets, self.sizes)
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


def _pieces(name: str, shape: tuple[int, ...], rule: StoredAs, stars: tuple[str, ...]) -> list[StoredPiece]:
    stacked, parts = _EXPERT in rule.files[0], len(rule.files)
    if len(shape) < stacked + 2 * rule.transposed or (
        parts > 1 and (len(shape) <= rule.dim or shape[rule.dim] % parts)
    ):
        raise ValueError(
            f"'{name}' of shape {shape} cannot be stored by StoredAs(files={rule.files}, dim={rule.dim}, transposed="
            f"{rule.transposed}): it needs more dims, or a size of dim {rule.dim} that {parts} divides"
        )
    sizes, pieces = list(shape), []
    if parts > 1:
        sizes[rule.dim] //= parts
    if stacked:
        sizes[0] = 1
    for expert in range(shape[0]) if stacked else range(1):
        for number, pattern in enumerate(rule.files):
            offsets = [0] * len(shape)
            if parts > 1:
                offsets[rule.dim] = number * sizes[rule.dim]
            if stacked:
                offsets[0] = expert
            first, *others = pattern.split("*")
            stored = first + "".join(star + other for star, other in zip(stars, others))
            stored = stored.replace(_EXPERT, str(expert))
            pieces.append(StoredPiece(stored, tuple(offsets), tuple(sizes), stacked, rule.transposed))
    return pieces


def assemble(
    tensors: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]], rules: Sequence[StoredAs], where: object
) -> dict[str, TensorEntry]:
    """Tensors of a model of these shapes, as parts of tensors in files. Those that match no rule are unchanged.

    CheckpointError names parts that are missing, have another shape, or are of different dtypes.
    """
    entries, misfit = dict(tensors), f"{where} does not fit the model"
    for name, shape in shapes.items():
        pieces = pieces_of(name, shape, rules)
        if pieces == pieces_of(name, shape, ()):  # as without rules
            continue
        chunks, dtypes = [], set()
        for piece in pieces:
            part = entries.pop(piece.name, None)
            if part is None:
                raise CheckpointError(f"{misfit}: '{piece.name}', a part of '{name}', is missing")
            if part.shape != piece.shape:
                needed = f"as a part of '{name}' it must have shape {piece.shape}"
                raise CheckpointError(f"{misfit}: '{piece.name}' has shape {part.shape}; {needed}")
            dtypes.add(part.dtype)
            (chunk,) = part.chunks
            chunks.append(replace(chunk, offsets=piece.offsets, sizes=piece.sizes, transposed=piece.transposed))
        if len(dtypes) > 1:
            raise CheckpointError(f"{where}: the parts of '{name}' have different dtypes: {sorted(map(str, dtypes))}")
        entries[name] = TensorEntry(dtypes.pop(), shape, tuple(chunks))
    return entries


_LAYER = "model.layers.*."


def _stacked(file_prefix: str, gate: str, up: str, down: str) -> tuple[StoredAs, StoredAs]:
    """Rules for models of Hugging Face, which have stacked experts, while their files have one tensor per expert."""
    names = [f"{_LAYER}{file_prefix}.experts.{_EXPERT}.{part}.weight" for part in (gate, up, down)]
    experts = _LAYER + "mlp.experts."
    return StoredAs(experts + "gate_up_proj", tuple(names[:2])), StoredAs(experts + "down_proj", tuple(names[2:]))


MIXTRAL = (
    StoredAs(_LAYER + "mlp.gate.weight", (_LAYER + "block_sparse_moe.gate.weight",)),
    *_stacked("block_sparse_moe", "w1", "w3", "w2"),
)
QWEN_MOE = _stacked("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass
class _Recipe:
    """How one or more tensors of the model are made from tensors in the files."""

    target: str
    converter: Any
    sources: list[tuple[str, TensorEntry, str]]  # name in the files, entry, and the pattern that the name matches

    def make(self, model: Any, read: Callable[[str, TensorEntry], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for name, entry, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name, entry))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


class ConvertingReader(Reader):
    """Reads tensors from files, and makes those for which `convert_tensors` has returned a recipe."""

    def __init__(self, source: TensorFiles, advance: Advance, model: nn.Module, recipes: dict[str, _Recipe]) -> None:
        super().__init__(source, advance)
        self._model, self._recipes = model, recipes
        self._made: tuple[_Recipe | None, dict[str, torch.Tensor]] = None, {}

    def read(
        self, name: str, entry: TensorEntry, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        recipe = self._recipes.get(name)
        if recipe is None:
            return super().read(name, entry, offsets, sizes)
        if self._made[0] is not recipe:
            self._made = None, {}  # one at a time
            self._made = recipe, recipe.make(self._model, super().read)
        whole = self._made[1][name]
        return whole if offsets is None or sizes is None else _torch.in_box(whole, offsets, sizes).contiguous()


def convert_tensors(model: Any, files: TensorFiles) -> dict[str, _Recipe]:
    """Rename the tensors in ``files`` to those of the model; returns recipes for tensors that are made of several.

    Changes nothing for a model that is not from Transformers or needs no conversion.
    """
    mapping = _mapping(model)
    if not mapping:
        return {}
    from transformers import core_model_loading as theirs

    renamings = [each for each in mapping if isinstance(each, theirs.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, theirs.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict(keep_vars=True)
    tensors: dict[str, TensorEntry] = {}
    recipes: dict[str, _Recipe] = {}
    for name in sorted(files.tensors, key=theirs.dot_natural_key):
        target, pattern = theirs.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if name in state and target not in state:
            target, pattern = name, None
        if pattern is None:
            tensors[target] = files.tensors[name]
        else:
            recipe = recipes.setdefault(target, _Recipe(target, by_pattern[pattern], []))
            recipe.sources.append((name, files.tensors[name], pattern))
    recipe_of = {}
    for recipe in recipes.values():
        on_meta = recipe.make(model, lambda _, entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        for name, value in on_meta.items():
            tensors[name], recipe_of[name] = TensorEntry(value.dtype, tuple(value.shape), ()), recipe
    files.tensors = tensors
    return recipe_of


def _mapping(model: Any) -> list[Any]:
    """The conversions from files to this model's weights that Transformers has."""
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        return []
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        return conversions
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 there was nothing to convert
        return []
    with original_classes(model):  # conversions are looked up by the name of the class
        mapping: list[Any] = get_model_conversion_mapping(model)
    return mapping
