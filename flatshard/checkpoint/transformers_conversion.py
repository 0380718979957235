"""Read files whose tensors have other names than those of a Transformers model, or are its tensors in parts.

Transformers (since version 5) stores experts one by one, for example, and fuses them in the model. For each
architecture it has a mapping from one to the other. Of tensors that are only renamed, each rank reads its own rows.
Tensors that are made of several others are made in full, one at a time, and then sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from flatshard import _torch
from flatshard.checkpoint.files import TensorEntry, TensorFiles
from flatshard.checkpoint.reader import Reader
from flatshard.engine.tree.row_embedding import class_before


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
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class ConvertingReader(Reader):
    """Reads tensors from files, and makes those for which `convert_tensors` has returned a recipe."""

    def __init__(
        self, source: TensorFiles, advance: Callable[[int], None], model: nn.Module, recipes: dict[str, _Recipe]
    ) -> None:
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


def convert_tensors(model: Any, found: TensorFiles) -> dict[str, _Recipe]:
    """Rename the tensors in ``found`` to those of the model; returns recipes for tensors that are made of several.

    Changes nothing for a model that is not from Transformers or needs no conversion.
    """
    mapping = _mapping(model)
    if not mapping:
        return {}
    from transformers import core_model_loading as theirs

    renamings = [each for each in mapping if isinstance(each, theirs.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, theirs.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    here = model.state_dict(keep_vars=True)
    tensors: dict[str, TensorEntry] = {}
    recipes: dict[str, _Recipe] = {}
    for name in sorted(found.tensors, key=theirs.dot_natural_key):
        target, pattern = theirs.rename_source_key(name, renamings, converters, model.base_model_prefix, here)
        if name in here and target not in here:
            target, pattern = name, None
        if pattern is None:
            tensors[target] = found.tensors[name]
        else:
            recipe = recipes.setdefault(target, _Recipe(target, by_pattern[pattern], []))
            recipe.sources.append((name, found.tensors[name], pattern))
    made = {}
    for recipe in recipes.values():
        on_meta = recipe.make(model, lambda _, entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        for name, value in on_meta.items():
            tensors[name], made[name] = TensorEntry(value.dtype, tuple(value.shape), ()), recipe
    found.tensors = tensors
    return made


def _mapping(model: Any) -> list[Any]:
    """The conversions from files to this model's weights that Transformers has."""
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        return []
    known: list[Any] | None = getattr(model, "_weight_conversions", None)
    if known is not None:
        return known
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 there was nothing to convert
        return []
    with original_classes(model):
        found: list[Any] = get_model_conversion_mapping(model)
    return found


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """A context in which units have their original classes, because Transformers looks up conversions by class name."""
    units: list[tuple[Any, type]] = [(each, type(each)) for each in model.modules() if isinstance(each, FSDPModule)]
    for module, cls in units:
        module.__class__ = class_before(cls)
    try:
        yield
    finally:
        for module, cls in units:
            module.__class__ = cls
