"""Modules of units: their classes before they were sharded, `nn.Embedding` by rows, and submodules called directly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from flatshard import _torch
from flatshard.engine.units.unit import Unit, unit_of


def class_before(cls: type) -> type:
    """The class of a module before it became a unit."""
    return next(base for base in cls.__mro__ if not issubclass(base, (FSDPModule, RowEmbedding)))


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """A context in which units below ``model`` have their original classes."""
    units: list[tuple[Any, type]] = [(each, type(each)) for each in model.modules() if isinstance(each, FSDPModule)]
    for module, cls in units:
        module.__class__ = class_before(cls)
    try:
        yield
    finally:
        for module, cls in units:
            module.__class__ = cls


class RowEmbedding(nn.Embedding):
    """The class that precedes `nn.Embedding` in the bases of a unit by rows."""

    @_torch.uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        unit = unit_of(self)
        assert unit is not None
        assert unit.rows is not None
        if unit.call is None or unit.root is None:
            raise RuntimeError(
                f"forward of '{unit.name}' was called directly, without the module's hooks, which rows=True needs: "
                "call the module"
            )
        return unit.root.gathers.look_up(unit, input)


class EntryPoints:
    """Submodules of a unit that are called directly (an encoder that `generate` runs first, a head, a norm).

    Their parameters are sharded at that time, and no forward of the unit is running that would gather them. Such a call
    becomes a forward of the unit in which only that submodule runs. Only units that contain other units support this:
    users who call layers of a block one by one unshard the block, and hooks on all layers would cost time in each step.
    """

    def __init__(self, unit: Unit, parts: Iterable[nn.Module]) -> None:
        self._unit = unit
        self._running: nn.Module | None = None  # the part whose call is running
        for part in parts:
            part.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            part.register_forward_hook(self._after)
            part.register_forward_hook(self._after_exception, always_call=True)

    # Compilers look into these: within a compiled forward of the unit its parameters are full.

    def _before(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or self._unit.shows_full:
            return None
        if not self._unit.modules:
            raise RuntimeError(
                f"{type(part).__name__} is a part of unit '{self._unit.name}', whose module has been deleted. Keep a "
                "reference to the module that fully_shard was called on (PEFT's merge_and_unload returns one inside it)"
            )
        self._running = part
        return self._unit._pre_forward(self._unit.modules[0], args, kwargs)

    def _after(self, part: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._running is not part:
            return None
        self._running = None
        return self._unit._post_forward(self._unit.modules[0], args, output)

    def _after_exception(self, part: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._running is not part:
            return
        self._running = None
        self._unit._after_exception(self._unit.modules[0], args, output)
