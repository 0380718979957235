"""Parameter groups, with the attributes that both versions of Megatron-FSDP have."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import Unit
from flatshard.megatron.utils import is_expert

CONTEXTS: weakref.WeakKeyDictionary[ParamGroup, Any] = weakref.WeakKeyDictionary()  # the `FsdpContext` of each group


class FsdpParameter(NamedTuple):
    """A parameter and all of its names within its unit."""

    fqns: tuple[str, ...]
    sharded: nn.Parameter


class ParameterGroup:
    """The parameters of a unit that are communicated together, with the attributes of both versions.

    A buffer has ``local_buffer`` (or ``data``), ``params``, and ``layout.size``, the elements of the whole buffer.
    Reading attributes raises ReferenceError if the model has been deleted.
    """

    def __init__(self, module: nn.Module, unit: Unit, group: ParamGroup, fsdp_unit_id: int | None = None) -> None:
        """``fsdp_unit_id``: the number of the unit; None for the root."""
        self._refs: tuple[Any, ...] = weakref.ref(module), weakref.ref(unit), weakref.ref(group)
        self.engine, self.fsdp_unit_id = weakref.proxy(group), fsdp_unit_id

    params = property(lambda self: tuple(member.sharded for member in self.engine.params))
    sharded_parameters = params
    parameter_names = property(lambda self: tuple(member.name for member in self.engine.params))
    requires_grad = property(lambda self: any(parameter.requires_grad for parameter in self.params))
    is_expert_param = property(lambda self: is_expert(self.params[0]))
    dtype = property(lambda self: self.engine.codec.dtype, doc="That of compute weights.")
    grad_dtype = property(lambda self: self.engine.gradients.grad_dtype, doc="That of reduced gradients.")
    main_weight = property(lambda self: self._view(self.engine.main))
    main_grad = property(lambda self: self._view(self.engine.gradients.main_grads.buffer))
    _unsharded_model_weight = property(lambda self: self._view(self.engine.source.buffer))

    @property
    def main_weight_buffer(self) -> Any:
        """Main weights, if the policy names their dtype; None for frozen parameters."""
        return self.main_weight if self.engine.policy.main_dtype is not None and self.requires_grad else None

    @property
    def model_weight_buffer(self) -> Any:
        """The compute weights of this rank between passes; main weights, if every gather casts those."""
        return self._view(getattr(self.engine.source.compute, "buffer", None), self.engine.main.local)

    @property
    def main_grad_buffer(self) -> Any:
        """Reduced gradients: empty before the first backward, None for frozen parameters."""
        empty = torch.empty(0, dtype=self.grad_dtype, device=self.engine.main.device)
        return self._view(self.engine.gradients.main_grads.buffer, empty if self.requires_grad else None)

    @property
    def fsdp_parameters(self) -> list[FsdpParameter]:
        module = self._refs[0]()
        names = {id(each): f"{name}." if name else "" for name, each in module.named_modules()} if module else {}
        return [
            FsdpParameter(tuple(names.get(id(site.module()), "") + site.name for site in member.sites), member.sharded)
            for member in self.engine.params
        ]

    def sync_model_weight_from_main_weight(self) -> None:
        module, unit, group = (ref() for ref in self._refs)
        if module is not None and unit is not None and group is not None and not group.main.local.is_meta:
            find_root(unit, module).refresh([unit], [group])

    def _view(self, buffer: Any, otherwise: torch.Tensor | None = None) -> Any:
        """A buffer of the engine, or one over ``otherwise``; None if there is neither."""
        local, layout = otherwise if buffer is None else buffer.local, self.engine.layout
        if local is None:
            return None
        whole = SimpleNamespace(size=layout.num_shards * layout.run_numel)
        return SimpleNamespace(local_buffer=local, data=local, layout=whole, params=self.params)


FsdpParameterGroup = ParameterGroup


def sync_model_weights_from_main_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Update compute weights from main weights, in all units that share a context with one of the parameters.

    All ranks must update the same units, and ``parameters`` may be of other units on another rank.
    """
    groups = (group_of(parameter) for parameter in parameters)
    for context in dict.fromkeys(CONTEXTS[group] for group in groups if group is not None and group in CONTEXTS):
        for group in context.parameter_groups:
            group.sync_model_weight_from_main_weight()
