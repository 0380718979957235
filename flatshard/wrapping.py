"""Which modules of a model `shard_model` makes units."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

# An embedding or a head becomes a unit if it has at least this fraction of a block's parameters.
_LARGE = 0.25


def unit_modules(
    model: nn.Module, units: Literal["auto"] | Sequence[type[nn.Module] | str] = "auto"
) -> list[list[nn.Module]]:
    """The modules of each unit, inner units first and ``model`` last. ``units``: as in `flatshard.shard_model`."""
    chosen = _repeated(model) if units == "auto" else instances(model, units, "units", "'auto' or ")
    together = _large(model, chosen) if units == "auto" else []
    return [*([module] for module in reversed(chosen)), *together, [model]]


def instances(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], what: str, options: str = ""
) -> list[nn.Module]:
    """The submodules of ``model`` that are instances of these classes, which may be given by import path.

    ValueError if there are none and ``model`` is no instance either. ``what``, ``options``: for the error, the name of
    the argument and its other values.
    """
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        wrong = ValueError if isinstance(classes, str) else TypeError
        raise wrong(f"{what}={classes!r}: must be {options}a list of classes or import paths")
    resolved = tuple(_resolve(each, what) for each in classes)
    found = [module for module in model.modules() if isinstance(module, resolved) and module is not model]
    if not found and not isinstance(model, resolved):
        names = ", ".join(cls.__name__ for cls in resolved)
        raise ValueError(f"{what}: {type(model).__name__} contains no module of {names or 'an empty list of classes'}")
    return found


def _resolve(given: type[nn.Module] | str, what: str) -> type[nn.Module]:
    found: Any = given
    if isinstance(given, str):
        try:
            found = pkgutil.resolve_name(given)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{what}: cannot import {given!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TypeError(f"{what}: {given!r} is not a subclass of nn.Module")
    return found


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: instances of its ``_no_split_modules``, or outermost modules repeated in a container."""
    names = getattr(model, "_no_split_modules", None)
    if names:
        named = [module for module in model.modules() if type(module).__name__ in set(names) and module is not model]
        if named:
            return named
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if container in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        children = [child for child in container if any(True for _ in child.parameters())]
        repeated = [c for c in children if sum(type(c) is type(other) for other in children) > 1]
        for child in repeated:
            if child not in inside and any(True for _ in child.children()):  # a block, not a single layer
                found.append(child)
                inside.update(child.modules())
    return found


def _large(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Large embeddings and linear layers outside of blocks; those that share a weight are in one list.

    The unit of a layer that PEFT has wrapped is its wrapper, which may read the weight itself (DoRA, trainable tokens).
    """
    inside = {module for block in blocks for module in block.modules()}
    wrappers = {id(base): each for each in model.modules() if (base := getattr(each, "base_layer", None)) is not None}
    by_weight: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if module in inside or module is model or not isinstance(module, (nn.Embedding, nn.Linear)):
            continue
        if is_large(module, blocks):
            outer: nn.Module = module
            while id(outer) in wrappers:
                outer = wrappers[id(outer)]
            by_weight.setdefault(id(module.weight), []).append(outer)
    return list(by_weight.values())


def is_large(module: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether an embedding or a head is large enough, beside the blocks of its model, to be a unit."""
    largest = max((sum(parameter.numel() for parameter in block.parameters()) for block in blocks), default=math.inf)
    return sum(parameter.numel() for parameter in module.parameters(recurse=False)) >= _LARGE * largest
