"""Units and contexts of Megatron-FSDP's second version."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from flatshard.engine.units.unit import Phase, Unit, unit_of
from flatshard.megatron.experimental.parameter_group import CONTEXTS, ParameterGroup
from flatshard.module import FSDPModule, share_comm_ctx

_CONTEXT = "_flatshard_megatron_context"
_unit: Callable[[Any], Any] = unit_of  # the modules of a context always have one


@dataclass(eq=False)
class FsdpContext:
    """The units that were made in one `fully_shard_context`, or below one root."""

    use_symmetric_memory: bool = False
    unify_communication_stream: bool = False
    device: torch.device | None = None
    _units: list[weakref.ref[nn.Module]] = field(default_factory=list)
    _guards: list[Any] = field(default_factory=list)  # hooks that raise if a unit runs before `close`

    def _ordered(self, modules: Callable[[nn.Module], Iterator[nn.Module]], backwards: bool = False) -> list[nn.Module]:
        mine, roots = {id(unit) for unit in self.units}, self.roots
        return [each for root in (roots[::-1] if backwards else roots) for each in modules(root) if id(each) in mine]

    @property
    def roots(self) -> list[nn.Module]:
        """The outermost units."""
        below = {id(each) for unit in self.units for each in unit.modules() if each is not unit}
        return [unit for unit in self.units if id(unit) not in below]

    units = property(lambda self: [unit for ref in self._units if (unit := ref()) is not None])  # in order of creation
    forward_order = property(lambda self: self._ordered(nn.Module.modules), doc="Units in the order of a forward.")
    backward_order = property(lambda self: self._ordered(_backward, True), doc="Units in the order of a backward.")
    parameter_groups = property(lambda self: [group for unit in self.units for group in unit.parameter_groups])
    is_first_microbatch = property(lambda self: all(_unit(module).is_first for module in self.units))
    is_last_microbatch = property(lambda self: all(_unit(module).is_last for module in self.units))

    def add(self, module: nn.Module, is_open: bool) -> None:
        """Take in a new unit. While the context is open, a forward of the unit raises."""
        self._units.append(weakref.ref(module))
        module.__dict__[_CONTEXT] = self
        unit = _unit(module)
        unit.__class__ = AnnotatedUnit
        CONTEXTS.update(dict.fromkeys(unit.groups, self))
        if is_open:
            self._guards.append(module.register_forward_pre_hook(_refuse_forward, prepend=True))

    def close(self) -> None:
        """Let the units run, and their roots share lanes."""
        while self._guards:
            self._guards.pop().remove()
        roots: list[Any] = self.roots
        if len(roots) > 1 and not any(parameter.is_meta for root in roots for parameter in root.parameters()):
            share_comm_ctx(roots)


def _backward(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in reversed(list(module.children())):
        yield from _backward(child)


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise RuntimeError(f"{type(module).__name__} cannot run inside fully_shard_context. Exit fully_shard_context first")


_RANGE_PUSH = torch.cuda.nvtx.range_push


class AnnotatedUnit(Unit):
    """A unit whose forwards and backwards are NVTX ranges: on CUDA, or if ``torch.cuda.nvtx`` has been replaced."""

    @property
    def phase(self) -> Phase:
        return self.__dict__["phase"]  # type: ignore[no-any-return]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        before, self.__dict__["phase"] = self.__dict__["phase"], phase
        if phase is before or (self.device.type != "cuda" and torch.cuda.nvtx.range_push is _RANGE_PUSH):
            return
        if before is not Phase.RESTING:
            torch.cuda.nvtx.range_pop()
        if phase is not Phase.RESTING:
            torch.cuda.nvtx.range_push(f"MFSDP {self.name if self.index else '<root>'} {phase.value}")


class FsdpModule(FSDPModule):
    """The class that `fully_shard` of the second version adds to the class of a module."""

    Phase = Phase

    context = property(lambda self: self.__dict__[_CONTEXT], doc="The `FsdpContext` of this unit.")

    @property
    def name(self) -> str:
        """The name of this module within the root of its context; the root has an empty name."""
        named = (found for root in self.context.roots for found in root.named_modules())
        return str(next(name for name, each in named if each is self))

    phase = property(lambda self: _unit(self).phase, doc="Whether this unit is in forward, in backward or in neither.")

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        module, unit = cast(nn.Module, self), _unit(self)
        known = module.__dict__.setdefault("_flatshard_megatron_groups", {})
        return tuple(known.setdefault(id(group), ParameterGroup(module, unit, group)) for group in unit.groups)

    def is_root(self) -> bool:
        """Whether this unit is in no other unit."""
        return cast(nn.Module, self) in self.context.roots
