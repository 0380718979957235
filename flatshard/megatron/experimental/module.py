"""Units, and what several of them share, as Megatron-FSDP's second version shows them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from flatshard.engine.units.unit import Phase, Unit, unit_of
from flatshard.megatron.experimental.parameter_group import CONTEXTS, ParameterGroup
from flatshard.module import FSDPModule, share_comm_ctx

_CONTEXT = "_flatshard_megatron_context"


class FsdpContext:
    """The units that were made within one `fully_shard_context`, or below one root."""

    def __init__(self, use_symmetric_memory: bool = False, unify_communication_stream: bool = False) -> None:
        self.use_symmetric_memory = use_symmetric_memory
        self.unify_communication_stream = unify_communication_stream
        self.is_first_microbatch = self.is_last_microbatch = True
        self.device: torch.device | None = None
        self._units: list[weakref.ref[nn.Module]] = []
        self._guards: list[Any] = []  # while the context is open no unit may run

    def _ordered(self, modules: Callable[[nn.Module], Iterator[nn.Module]], backwards: bool = False) -> list[nn.Module]:
        mine, roots = {id(unit) for unit in self.units}, self.roots
        return [each for root in (roots[::-1] if backwards else roots) for each in modules(root) if id(each) in mine]

    @property
    def roots(self) -> list[nn.Module]:
        """Units that lie in no other."""
        below = {id(each) for unit in self.units for each in unit.modules() if each is not unit}
        return [unit for unit in self.units if id(unit) not in below]

    units = property(lambda self: [module for ref in self._units if (module := ref()) is not None])  # as they were made
    forward_order = property(lambda self: self._ordered(nn.Module.modules), doc="Units as forwards come to them.")
    backward_order = property(lambda self: self._ordered(_backward, True), doc="Units as backwards come to them.")
    parameter_groups = property(lambda self: [group for unit in self.units for group in unit.parameter_groups])

    def add(self, module: nn.Module, is_open: bool) -> None:
        """A unit has been made."""
        self._units.append(weakref.ref(module))
        module.__dict__[_CONTEXT] = self
        unit = _unit(module)
        unit.__class__ = AnnotatedUnit
        CONTEXTS.update(dict.fromkeys(unit.groups, self))
        if is_open:
            self._guards.append(module.register_forward_pre_hook(_refuse_forward, prepend=True))

    def close(self) -> None:
        """All units have been made: they may run, and roots share lanes."""
        for guard in self._guards:
            guard.remove()
        self._guards = []
        roots: list[Any] = self.roots
        if len(roots) > 1 and not any(parameter.is_meta for root in roots for parameter in root.parameters()):
            share_comm_ctx(roots)


def _backward(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in reversed(list(module.children())):
        yield from _backward(child)


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise RuntimeError(f"{type(module).__name__} cannot run yet: Exit fully_shard_context first")


_RANGE_PUSH = torch.cuda.nvtx.range_push


class AnnotatedUnit(Unit):
    """A unit whose forwards and backwards are NVTX ranges, on CUDA or where something stands in for NVTX."""

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
    """What `fully_shard` of the second version adds to the class of a module."""

    Phase = Phase

    context = property(lambda self: self.__dict__[_CONTEXT], doc="The `FsdpContext` that it shares with others.")

    @property
    def name(self) -> str:
        """Its name from the outermost unit of its context down; that one's is empty."""
        named = (found for root in self.context.roots for found in root.named_modules())
        return str(next(name for name, each in named if each is self))

    phase = property(lambda self: _unit(self).phase, doc="Where the current pass stands, here.")

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Its parameters, as they travel together."""
        module, unit = cast(nn.Module, self), _unit(self)
        known = module.__dict__.setdefault("_flatshard_megatron_groups", {})
        return tuple(known.setdefault(id(group), ParameterGroup(module, unit, group)) for group in unit.groups)

    def is_root(self) -> bool:
        """Whether it lies in no other unit."""
        return cast(nn.Module, self) in self.context.roots


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit
