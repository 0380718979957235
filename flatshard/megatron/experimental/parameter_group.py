"""Parameter groups, with the attributes that both versions of Megatron-FSDP have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import Unit
from flatshard.megatron.utils import is_expert

CONTEXTS: weakref.WeakKeyDictionary[ParamGroup, Any] = weakref.WeakKeyDictionary()  # the `FsdpContext` of each group


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter and all of its names within its unit."""

    fqns: tuple[str, ...]
    sharded: nn.Parameter


class ParameterGroup:
    """The parameters of a unit that are communicated together, with the attributes of both versions (`_VALUES`).

    A buffer has ``local_buffer`` (or ``data``), ``params``, and ``layout.size``, the elements of the whole buffer.
    """

    def __init__(self, module: nn.Module, unit: Unit, group: ParamGroup, fsdp_unit_id: int | None = None) -> None:
        """``fsdp_unit_id``: the number of the unit; None for the root."""
        self._module, self._unit, self._group = weakref.ref(module), weakref.ref(unit), weakref.ref(group)
        self.fsdp_unit_id = fsdp_unit_id

    @property
    def engine(self) -> ParamGroup:
        """The engine's group."""
        group = self._group()
        if group is None:
            raise RuntimeError("the model of this parameter group has been deleted")
        return group

    def __getattr__(self, name: str) -> Any:
        if name not in _VALUES:
            raise AttributeError(f"{name}: a parameter group of flatshard.megatron does not have this attribute")
        return _VALUES[name](self)

    @property
    def fsdp_parameters(self) -> list[FsdpParameter]:
        """The parameters with their names."""
        module = self._module()
        modules = [] if module is None else module.named_modules()
        names = {id(each): f"{name}." if name else "" for name, each in modules}
        return [
            FsdpParameter(tuple(names.get(id(site.module()), "") + site.name for site in member.sites), member.sharded)
            for member in self.engine.params
        ]

    def sync_model_weight_from_main_weight(self) -> None:
        """Update compute weights from main weights."""
        unit, module, group = self._unit(), self._module(), self.engine
        if unit is not None and module is not None and not group.main.local.is_meta:
            find_root(unit, module).refresh([unit], [group])

    def _view(self, buffer: Any, otherwise: torch.Tensor | None = None) -> Any:
        """A buffer of the engine, or one over ``otherwise``; None if there is neither."""
        local, layout = otherwise if buffer is None else buffer.local, self.engine.layout
        whole = SimpleNamespace(size=layout.num_shards * layout.run_numel)
        return None if local is None else SimpleNamespace(
            local_buffer=local, data=local, layout=whole, params=self.params
        )  # fmt: skip

    def _gradients(self) -> Any:
        empty = torch.empty(0, dtype=self.grad_dtype, device=self.engine.main.device)
        return self._view(self.engine.gradients.main_grads.buffer, empty if self.requires_grad else None)


_VALUES: dict[str, Callable[[ParameterGroup], Any]] = {
    "params": lambda group: tuple(member.sharded for member in group.engine.params),
    "sharded_parameters": lambda group: group.params,
    "parameter_names": lambda group: tuple(member.name for member in group.engine.params),
    "requires_grad": lambda group: any(parameter.requires_grad for parameter in group.params),
    "is_expert_param": lambda group: is_expert(group.params[0]),
    "dtype": lambda group: group.engine.codec.dtype,  # compute weights
    "grad_dtype": lambda group: group.engine.gradients.grad_dtype,  # reduced gradients
    "main_weight": lambda group: group._view(group.engine.main),
    "main_weight_buffer": lambda group: group.main_weight,
    # The compute weights of this rank between passes; main weights, if every gather casts those.
    "model_weight_buffer": lambda group: group._view(
        getattr(group.engine.source.compute, "buffer", None), group.engine.main.local
    ),
    "main_grad": lambda group: group._view(group.engine.gradients.main_grads.buffer),
    "main_grad_buffer": ParameterGroup._gradients,  # empty before the first backward; None for frozen parameters
    "_unsharded_model_weight": lambda group: group._view(group.engine.source.buffer),
}
FsdpParameterGroup = ParameterGroup


def sync_model_weights_from_main_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Update compute weights from main weights, in all units that share a context with one of the parameters.

    All ranks must update the same units, and ``parameters`` may be of other units on another rank.
    """
    found = (group_of(parameter) for parameter in parameters)
    for context in dict.fromkeys(CONTEXTS[group] for group in found if group is not None and group in CONTEXTS):
        for group in context.parameter_groups:
            group.sync_model_weight_from_main_weight()
