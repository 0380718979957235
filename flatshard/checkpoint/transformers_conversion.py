"""Files whose tensors have other names, or are cut otherwise, than a Transformers model has them.

Transformers (since version 5) stores experts one by one and holds them fused, for example, and says for each
architecture how the one becomes the other. What only has another name is read as ever, each rank its own rows. What is
made of several tensors is made whole, one at a time, and cut then.
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

from flatshard.checkpoint.files import TensorEntry, TensorFiles
from flatshard.checkpoint.reader import Reader
from flatshard.engine.tree.row_embedding import class_before


@dataclass
class _Recipe:
    """Tensors of the model that are made together, of others in the files."""

    target: str
    converter: Any
    sources: list[tuple[str, TensorEntry, str]]  # name in the files, entry, and the pattern that it has matched

    def make(self, model: Any, read: Callable[[str, TensorEntry], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for name, entry, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name, entry))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class ConvertingReader(Reader):
    """Reads what `convert_tensors` has found, and makes what it is made of."""

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
        if offsets is None or sizes is None:
            return whole
        return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))].contiguous()


def convert_tensors(model: Any, found: TensorFiles) -> dict[str, _Recipe]:
    """Let ``found`` say what the model calls its tensors; by name, how those are made that are made of several.

    For a model that is not one of Transformers, or needs no conversion, everything stays as it is.
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
    found.model = {"dict": [(name, {"tensor": name}) for name in tensors]}
    return made


def _mapping(model: Any) -> list[Any]:
    """How Transformers turns files into this model's weights."""
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
    """Within, the units of a model are of the classes that they were of before: some go by the names of those."""
    units: list[tuple[Any, type]] = [(each, type(each)) for each in model.modules() if isinstance(each, FSDPModule)]
    for module, cls in units:
        module.__class__ = class_before(cls)
    try:
        yield
    finally:
        for module, cls in units:
            module.__class__ = cls
