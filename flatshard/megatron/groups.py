"""Parameters of one unit that travel together, as Megatron-FSDP shows them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import Unit
from flatshard.megatron.utils import is_expert


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter and all its names, from its unit down."""

    fqns: tuple[str, ...]
    sharded: nn.Parameter


@dataclass(frozen=True)
class BufferView:
    """A buffer of the engine; ``layout.size`` is that of the whole."""

    local_buffer: torch.Tensor
    layout: Any
    params: tuple[nn.Parameter, ...]

    @property
    def data(self) -> torch.Tensor:
        """What this rank has of it."""
        return self.local_buffer


class ParameterGroup:
    """Parameters of one unit that travel together, by the names of both versions."""

    def __init__(self, module: nn.Module, unit: Unit, group: ParamGroup, fsdp_unit_id: int | None = None) -> None:
        """``fsdp_unit_id``: the number of the unit; None for what no unit but the model itself has."""
        self._module, self._unit, self._group = weakref.ref(module), weakref.ref(unit), weakref.ref(group)
        self.fsdp_unit_id = fsdp_unit_id

    @property
    def engine(self) -> ParamGroup:
        """The group of the engine."""
        group = self._group()
        if group is None:
            raise RuntimeError("the model of this parameter group has been deleted")
        return group

    @property
    def fsdp_parameters(self) -> list[FsdpParameter]:
        """Its parameters, with their names."""
        module = self._module()
        modules = [] if module is None else module.named_modules()
        names = {id(each): f"{name}." if name else "" for name, each in modules}
        return [
            FsdpParameter(tuple(names.get(id(site.module()), "") + site.name for site in member.sites), member.sharded)
            for member in self.engine.params
        ]

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The first name of each parameter, from its unit down."""
        return tuple(member.name for member in self.engine.params)

    @property
    def sharded_parameters(self) -> tuple[nn.Parameter, ...]:
        """What optimizers see."""
        return tuple(member.sharded for member in self.engine.params)

    params = sharded_parameters

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return any(parameter.requires_grad for parameter in self.params)

    @property
    def is_expert_param(self) -> bool:
        """Whether other ranks have others in the place of these."""
        return is_expert(self.params[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of compute."""
        return self.engine.codec.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of reduced gradients."""
        return self.engine.gradients.grad_dtype

    @property
    def main_weight(self) -> BufferView:
        """What the optimizer updates."""
        return self._view(self.engine.main.local)

    main_weight_buffer = main_weight

    @property
    def model_weight_buffer(self) -> BufferView:
        """Compute weights as they rest: main weights, where each gather derives them from those."""
        compute = self.engine.source.compute
        return self.main_weight if compute is None or compute.buffer is None else self._view(compute.buffer.local)

    @property
    def main_grad(self) -> BufferView | None:
        """Reduced gradients, once there are some."""
        buffer = self.engine.gradients.main_grads.buffer
        return None if buffer is None else self._view(buffer.local)

    @property
    def main_grad_buffer(self) -> BufferView | None:
        """The same, and empty before; None where there will be none."""
        empty = torch.empty(0, dtype=self.grad_dtype, device=self.engine.main.device)
        return self.main_grad or (self._view(empty) if self.requires_grad else None)

    @property
    def _unsharded_model_weight(self) -> BufferView | None:
        buffer = self.engine.source.buffer
        return None if buffer is None else self._view(buffer.local)

    def sync_model_weight_from_main_weight(self) -> None:
        """Bring compute weights up to date with main."""
        unit, module, group = self._unit(), self._module(), self.engine
        if unit is not None and module is not None and not group.main.local.is_meta:
            find_root(unit, module).refresh([unit], [group])

    def _view(self, local: torch.Tensor) -> BufferView:
        layout = self.engine.layout
        return BufferView(local, SimpleNamespace(size=layout.num_shards * layout.run_numel), self.params)
