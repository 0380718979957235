"""Changes to the parameters of a unit from outside: state dicts, `.to` and similar methods, plain assignment.

`engine/groups/changes.py` does the same for each group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.groups import changes
from flatshard.engine.groups.changes import Change, Names
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of, owner_of, retire
from flatshard.engine.parameters.sharded_param import ShardedParam, Site
from flatshard.engine.units.leases import Lease
from flatshard.engine.units.unit import Phase, Unit


def absorb(unit: Unit, ours: bool = False) -> None:
    """Adopt the parameters that the modules now hold instead of the unit's, raise, or wait for further changes.

    Modules of a list are converted or loaded one by one. ``ours``: keep the parameter objects.
    """
    for group in unit.groups:
        changes.absorb(group, unit.calls.are_awaited(), root=_root(unit), wait=True, ours=ours)
    for plain in unit.plain:
        plain.guard()


def absorb_moved(unit: Unit) -> None:
    """`absorb` before the parameters are used: nothing notifies a unit of changes to modules below its own."""
    for group in list(unit.groups):
        if not group.is_full and group.snapshot.has_changed():
            if unit.is_written:
                raise RuntimeError(f"unit '{unit.name}' is called within gathered(write=True); leave that first")
            group.release()  # it may have been prefetched
            if not unit.calls.are_awaited():
                _tie(unit, group)
            changes.absorb(group, unit.calls.are_awaited(), root=_root(unit))


def _tie(unit: Unit, group: ParamGroup) -> None:
    """Tie modules of ``unit`` to the parameter of another module, if they were given that parameter.

    Loaders tie output layers to embeddings only after sharding. Each module had its own parameter in a group. One of
    the two keeps its place, and the module of the other borrows it, as if they had shared it from the start. The place
    of the other parameter in its group stays empty: its part of the buffers is still gathered, but not used. A group
    with only empty places is dropped.
    """
    for index, param in enumerate(group.params):
        for site in list(param.sites):
            found = site.look()
            if found is not None and found is not param.sharded:
                _tie_site(unit, group, index, site, found)
    if not any(param.sites for param in group.params):
        unit.groups.remove(group)
        unit.needs.remove(group)


def _tie_site(unit: Unit, group: ParamGroup, index: int, site: Site, found: nn.Parameter) -> None:
    assert unit.root is not None
    param = group.params[index]
    for other in unit.root.units if group_of(found) is None else ():
        # No unit has it yet: the innermost unit adopts it.
        if other.index > unit.index and any(place.look() is found for each in _params(other) for place in each.sites):
            absorb_moved(other)
            break
    owner = owner_of(found) if group_of(found) is not None else None
    if owner is None or not is_cut_alike(found, param.sharded):
        return
    lender, lent = owner[0], owner[0].params[owner[1]]
    if not any(each is lent for other in unit.root.units for each in _params(other)):
        return  # of another model
    param.sites.remove(site)
    lent.sites.append(site)
    if lender is not group:
        unit.borrow(lender, lent, site)
    lender.snapshot.add(site, found)
    if not param.sites:
        retire(group, index, *owner)


def _params(unit: Unit) -> Iterator[ShardedParam]:
    return (param for group in unit.groups for param in group.params)


def check_change(unit: Unit, change: Change) -> None:
    """Raise if this change of all parameters could not be adopted."""
    if unit.root is not None:
        unit.root.recover_if_broken()  # the graph of a backward that raised may exist, but awaits no backward
    for group in unit.groups:
        changes.check_change(group, change, unit.calls.are_awaited(), _root(unit))


@contextmanager
def applying(unit: Unit) -> Iterator[None]:
    """Around `module._apply`."""
    unit.reshard()
    absorb(unit)  # parameters that were assigned before, with their gradients
    with ExitStack() as stack:
        for group in unit.needs:  # modules of this unit also convert parameters that it borrows
            stack.enter_context(changes.applying(group))
        yield
        absorb(unit)
        for group, _, _ in unit.borrowed:
            if not group.is_full:
                changes.absorb(group, unit.calls.are_awaited(), root=_root(unit), wait=True)


@contextmanager
def written(unit: Unit) -> Iterator[None]:
    """The modules hold whole copies of main weights. Writes to them are stored if the body does not raise.

    Entering is a collective call.
    """
    if unit.root is not None:
        unit.root.recover_if_broken()
    if unit.phase is not Phase.RESTING or unit.calls.are_awaited():
        raise RuntimeError(
            f"unit '{unit.name}' cannot be written to between a forward and its backward, which needs the old weights; "
            "run the backward first, or run the forward under torch.no_grad()"
        )
    unit.reshard()
    absorb_moved(unit)
    params = [param for group in unit.groups for param in group.params]
    for group in unit.groups:
        if group.is_extended:
            raise TypeError(f"parameter '{Names(group, _root(unit))[0]}' is a tensor subclass; write to its to_local()")
    with torch.no_grad():
        sharded: list[Any] = [param.sharded for param in params]
        copies = [nn.Parameter(each.full_tensor().detach().clone(), requires_grad=False) for each in sharded]
    for param, copied in zip(params, copies):
        copied.requires_grad_(param.sharded.requires_grad)
        for site in param.sites:
            site.put(copied)
    unit.is_written = True
    try:
        yield
        with torch.no_grad():
            for param, copied in zip(params, copies):
                part = _torch.local_of(param.sharded)
                part.copy_(_torch.part_of(copied, param.sharded) if part.shape != copied.shape else copied)
    finally:
        unit.is_written = False
        for param in params:
            for site in param.sites:
                site.put(param.sharded)
        for group in unit.groups:
            group.mark_stale()


def _root(unit: Unit) -> nn.Module | None:
    """The module at which names in errors start, if it is known."""
    units = unit.root.units if unit.root is not None else [unit]
    return next(iter(units[0].modules), None) if units and len(units[0].modules) == 1 else None


def hook_state_dicts(unit: Unit, module: nn.Module) -> None:
    """State dicts of ``module``, one of the unit's, hold sharded main weights; loaded values are written to main."""
    module.register_state_dict_pre_hook(functools.partial(_before_state_dict, unit))
    module.register_state_dict_post_hook(functools.partial(_after_state_dict, unit))
    module.register_load_state_dict_pre_hook(functools.partial(_before_load_state_dict, unit))
    module.register_load_state_dict_post_hook(functools.partial(_after_load_state_dict, unit))


def _before_state_dict(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if unit.in_backward or not (unit.calls.are_awaited() or Lease.USER in unit.leases):
        unit.reshard()
        return
    for group in unit.needs:
        group.swap(to_full=False)  # without a release: one rank may save alone


def _after_state_dict(unit: Unit, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if Lease.USER in unit.leases and unit.is_gathered:
        unit.swap_in()
    # torch's asynchronous checkpoints fail for DTensors with a storage offset, which detached ones have.
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, DTensor) and value.storage_offset():
            state[name] = _torch.like_dtensor(value, _torch.local_of(value))


def _before_load_state_dict(unit: Unit, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    if unit.root is not None:
        unit.root.recover_if_broken()  # a backward that raised may still step weights on a thread
    unit.reshard()
    absorb(unit)  # parameters of the user; those that are loaded next are not the user's
    _cut_whole(unit, module, state, prefix)


def _cut_whole(unit: Unit, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Shard the entries of an unsharded model's state dict. ``state`` is load_state_dict's own."""
    sharded = {id(param.sharded): param.sharded for group in unit.needs for param in group.params}
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        whole = state.get(name)
        if id(parameter) not in sharded or not isinstance(whole, torch.Tensor) or isinstance(whole, DTensor):
            continue
        if whole.shape == parameter.shape and whole.dim() and not whole.is_meta and not _torch.is_wrapper(whole):
            part = _torch.part_of(whole.detach(), parameter).contiguous()
            state[name] = _torch.like_dtensor(parameter, part)


def _after_load_state_dict(unit: Unit, module: nn.Module, keys: Any) -> None:
    absorb(unit, ours=True)
    for group, param, site in unit.borrowed:
        if site.look() is not param.sharded:
            changes.absorb(group, unit.calls.are_awaited(), root=_root(unit), wait=True, ours=True)
    for group in unit.groups:
        group.mark_stale()  # also between the micro-batches of a step
