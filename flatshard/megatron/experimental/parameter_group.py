"""Parameters of one unit that travel together, as Megatron-FSDP's second version shows them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatshard.engine.homes import group_of
from flatshard.engine.roots import scope_of
from flatshard.engine.unit import Unit
from flatshard.engine.weights import Group

CONTEXTS: weakref.WeakKeyDictionary[Group, Any] = weakref.WeakKeyDictionary()  # the `FsdpContext` of each group


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter and all its names, from its unit down."""

    fqns: tuple[str, ...]
    sharded: nn.Parameter


@dataclass(frozen=True)
class BufferView:
    """A buffer of the engine."""

    local_buffer: torch.Tensor
    layout: Any


@dataclass(frozen=True)
class _Extent:
    size: int


class ParameterGroup:
    """Parameters of one unit that travel together."""

    def __init__(self, module: nn.Module, unit: Unit, group: Group) -> None:
        self._module, self._unit, self._group = weakref.ref(module), weakref.ref(unit), weakref.ref(group)

    @property
    def _engine(self) -> Group:
        group = self._group()
        if group is None:
            raise RuntimeError("the model of this parameter group has been deleted")
        return group

    @property
    def fsdp_parameters(self) -> list[FsdpParameter]:
        """Its parameters, with their names."""
        module = self._module()
        names = (
            {} if module is None else {id(each): f"{name}." if name else "" for name, each in module.named_modules()}
        )
        return [
            FsdpParameter(tuple(names.get(id(site.module()), "") + site.name for site in member.sites), member.sharded)
            for member in self._engine.members
        ]

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The first name of each parameter, from its unit down."""
        return tuple(member.name for member in self._engine.members)

    @property
    def sharded_parameters(self) -> tuple[nn.Parameter, ...]:
        """What optimizers see."""
        return tuple(member.sharded for member in self._engine.members)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return any(member.sharded.requires_grad for member in self._engine.members)

    @property
    def main_weight(self) -> BufferView:
        """What the optimizer updates."""
        return _view(self._engine, self._engine.main.local)

    @property
    def main_grad(self) -> BufferView | None:
        """Reduced gradients, once there are some."""
        buffer = self._engine.gradients.main_grads.buffer
        return None if buffer is None else _view(self._engine, buffer.local)

    @property
    def _unsharded_model_weight(self) -> BufferView | None:
        buffer = self._engine.source.buffer
        return None if buffer is None else _view(self._engine, buffer.local)

    def sync_model_weight_from_main_weight(self) -> None:
        """Bring compute weights up to date with main."""
        unit, module, group = self._unit(), self._module(), self._engine
        if unit is not None and module is not None and not group.main.local.is_meta:
            scope_of(unit, module).refresh([unit], [group])


def _view(group: Group, local: torch.Tensor) -> BufferView:
    return BufferView(local, _Extent(group.layout.num_shards * group.layout.run_numel))


def sync_model_weights_from_main_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Bring compute weights up to date with main, in all units that share a context with one of the parameters.

    Not in those alone that the parameters are of: on another rank these may be others.
    """
    found = (group_of(parameter) for parameter in parameters)
    for context in dict.fromkeys(CONTEXTS[group] for group in found if group is not None and group in CONTEXTS):
        for group in context.parameter_groups:
            group.sync_model_weight_from_main_weight()
