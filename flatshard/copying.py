"""`copy.deepcopy` of sharded models: the copy has the same units, on copies of the shards. Nothing is gathered."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from flatshard import _torch
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import OWNER, SUCCESSOR, owner_of, successor_of
from flatshard.engine.parameters.sharded_param import attributes_of
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.parameters import Choices, owned_modules
from flatshard.engine.tree.unit_classes import original_classes
from flatshard.engine.units.changes import absorb
from flatshard.engine.units.unit import Unit, unit_of, unit_with
from flatshard.policy import Sharding
from flatshard.state import FSDPState

MakeUnit: TypeAlias = Callable[[Sequence[nn.Module], Choices], Unit]


class _NoCopy(TypeError, AssertionError):
    """Raised for a model that cannot be copied. PyTorch raises AssertionError."""


def copy_module(make_unit: MakeUnit, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The result of `copy.deepcopy` for a module that is a unit.

    First the modules are copied without units and hooks, and with meta parameters instead of the sharded ones. Then the
    copies are sharded with the same settings and get copies of the shards.
    """
    units = sorted((unit for _, unit in units_below(module)), key=lambda unit: unit.number)
    for unit in units:
        unit.reshard()
        absorb(unit)
    _check(module, units, memo)
    groups = [group for unit in units for group in unit.groups]
    members = [(group, index, each.sharded) for group in groups for index, each in enumerate(group.params)]
    dims: dict[int, int] = {}  # the dims that the new parameters are sharded on
    for group, index, sharded in members:
        memo[id(sharded)] = blank = _blank(group, index)
        dims[id(blank)] = group.layout.slots[index].dim
    for _, _, sharded in members:
        own = {name: value for name, value in attributes_of(sharded).items() if name not in (OWNER, SUCCESSOR)}
        memo[id(sharded)].__dict__.update(copy.deepcopy(own, memo))
    for owned in _owned(module):
        memo[id(owned)] = _not_copied
    with original_classes(module):
        made: nn.Module = copy.deepcopy(module, memo)
    for each in made.modules():
        _remove(vars(each))
    new = {id(unit): make_unit([memo[id(each)] for each in unit.modules], _choices(unit, memo, dims)) for unit in units}
    for _, _, sharded in members:
        _fill(sharded, memo[id(sharded)])
    for unit in units:
        absorb(new[id(unit)])
        _take_settings(unit, new)
    for _, _, sharded in members:  # for other objects that are copied with the model: an optimizer
        memo[id(sharded)] = successor_of(memo[id(sharded)])
    return made


def _not_copied(*args: Any) -> None:
    """A placeholder for objects that are not copied."""


def _check(module: nn.Module, units: Sequence[Unit], memo: dict[int, Any]) -> None:
    """Raise if a copy would not equal the original."""
    inside = set(module.modules())
    for unit in units:
        reason = None
        if not inside.issuperset(unit.modules):
            reason = "it is one unit with modules outside of the copy; copy the model that contains all of them"
        elif any(unit_with(group) not in units for group in unit.needs):
            reason = "it shares parameters with units outside of the copy; copy the model that contains all of them"
        elif any(id(member.sharded) in memo for group in unit.groups for member in group.params):
            reason = "an object with its parameters, such as an optimizer, was copied before it; copy the model first"
        elif any(group.is_extended for group in unit.groups):
            reason = "it has parameters of tensor subclasses"
        elif any(member.inner is not None and member.inner.hidden for group in unit.groups for member in group.params):
            reason = "it has parameters with Sharding(apart=...)"
        elif any(group.mesh != unit.mesh for group in unit.groups):
            reason = "it has parameters on another mesh"
        if reason is not None:
            raise _NoCopy(
                f"unit '{unit.name}' cannot be copied: {reason}. Otherwise build and shard another model, and load "
                "this model's state_dict() into it. FSDP does not support deepcopy"
            )


def _owned(module: nn.Module) -> Iterator[Any]:
    """The objects that units add to modules: the units, their states and hooks."""
    for each in module.modules():
        for name, value in vars(each).items():
            if name.endswith("_hooks"):
                yield from (hook for hook in value.values() if _is_ours(hook))
            elif isinstance(value, (Unit, FSDPState)):
                yield value
            elif isinstance(value, dict):
                yield from (state for state in value.values() if isinstance(state, FSDPState))


def _is_ours(hook: Any) -> bool:
    """Whether a hook, possibly wrapped by torch, is one of flatshard's."""
    while isinstance(hook, functools.partial) or hasattr(hook, "hook"):
        hook = hook.func if isinstance(hook, functools.partial) else hook.hook
    return str(hook.__module__).startswith("flatshard.")


def _remove(attributes: dict[str, Any]) -> None:
    for name, value in list(attributes.items()):
        if value is _not_copied:
            del attributes[name]
        elif isinstance(value, dict) and name != "_modules":
            _remove(value)


def _choices(unit: Unit, memo: dict[int, Any], dims: dict[int, int]) -> Choices:
    """The `Choices` for the copy of a unit."""
    plain = {id(site.look()) for each in unit.plain for site in each.sites}
    own = [p for _, module in owned_modules(unit.modules) for p in module.parameters(recurse=False)]
    ignored = frozenset(memo[id(p)] for p in own if OWNER not in p.__dict__ and id(p) not in plain)
    known: Choices = unit.choices
    where = replace(known.where, choose=lambda parameter: Sharding(dims[id(parameter)]))
    keeping = {memo[id(m.sharded)] for group in unit.groups if group.keeps_dtype for m in group.params}
    keeping |= {memo[id(each.parameter)] for each in unit.plain if each.keeps_dtype}
    precision = replace(known.precision, param_dtype_override_fn=lambda p: p.dtype if p in keeping else None)
    return replace(known, ignored=ignored, where=where, precision=precision)


def _blank(group: ParamGroup, index: int) -> nn.Parameter:
    """A parameter like the original before sharding, on the meta device."""
    member, (dtype, trainable) = group.params[index], group.made_for
    values = torch.empty(group.layout.slots[index].shape, dtype=dtype, device="meta")
    if member.inner is not None:
        values = _torch.dtensor_of(values, member.inner.spec)
    blank = nn.Parameter(values, trainable)
    if group.own_grad_dtype is not None:
        blank.grad_dtype = group.own_grad_dtype
    return blank


def _fill(sharded: nn.Parameter, blank: nn.Parameter) -> None:
    """Put a copy of a shard into the new modules."""
    found = owner_of(blank)
    assert found is not None
    group, index = found
    fresh = _torch.like_dtensor(sharded, _torch.local_of(sharded).detach().clone())
    for site in group.params[index].sites:
        site.put(_torch.as_parameter(fresh, sharded.requires_grad))


def _take_settings(unit: Unit, new: dict[int, Unit]) -> None:
    """Apply the settings of a unit to its copy."""
    intent, made = unit.intent, new[id(unit)]
    settings = dict(vars(intent))
    for name in ("prefetch_in_forward", "prefetch_in_backward"):
        if settings[name] is not None:
            others = [unit_of(module) for ref in settings[name] if (module := ref()) is not None]
            settings[name] = tuple(weakref.ref(new[id(each)].modules[0]) for each in others if id(each) in new)
    made.configure(**settings)
    made.policy = unit.policy
    for mine, theirs in zip(made.groups, unit.groups, strict=True):
        mine.set_policy(theirs.policy)
        mine.source.keeps_storage = theirs.source.keeps_storage
        given = theirs.gradients
        mine.gradients.configure(scale=given.scale, sums_only=given.sums_only, counts_unused=given.counts_unused)
