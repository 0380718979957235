"""Classes of units: the class of a module before it was sharded, and `nn.Embedding` whose forward looks up rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from flatshard import _torch
from flatshard.engine.units.unit import unit_of


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
        return unit.root.look_up(unit, input)
