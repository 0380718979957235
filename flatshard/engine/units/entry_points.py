"""Submodules of a unit that are called directly: an encoder that `generate` runs first, a head, a norm.

Their parameters are sharded at that time, and no forward of the unit is running that would gather them. Such a call
becomes a forward of the unit in which only that submodule runs. Only units that contain other units support this: users
who call layers of a block one by one unshard the block, and hooks on all layers would cost time in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flatshard.engine.units.unit import Unit


class EntryPoints:
    """The modules inside a unit of one module, and the running call of one of them, if there is one."""

    def __init__(self, unit: Unit, parts: Iterable[nn.Module]) -> None:
        self._unit = unit
        self._running: nn.Module | None = None
        for part in parts:
            part.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            part.register_forward_hook(self._after)
            part.register_forward_hook(self._after_exception, always_call=True)

    # Compilers look into these: within a compiled forward of the unit its parameters are full.

    def _before(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or self._unit.shows_full:
            return None
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
