"""`gathered`: a context in which modules have their full parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from flatshard import _arguments
from flatshard.engine.groups.registry import group_of
from flatshard.engine.schedule.root import Root
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.changes import written
from flatshard.engine.units.leases import Lease
from flatshard.engine.units.unit import Phase, Unit, unit_with


@contextmanager
def gathered(module: nn.Module, *, recurse: bool = True, write: bool = False) -> Iterator[None]:
    """Within the context, the parameters of ``module`` are full tensors. All ranks must enter and leave it together.

    ``module`` is a model or a part of one. All units below it, and those that own its parameters, are gathered at the
    beginning and stay gathered through forwards and backwards, so an evaluation, or a generation token by token,
    gathers once. Parameters can also be used without a forward of their unit (a submodule, a method,
    ``F.linear(x, m.weight)``), and their gradients are reduced. They are in the compute dtype, and gathered again after
    an optimizer step. ``recurse=False``: do not gather the units inside ``module``.

    ``write``: the parameters are full copies in the main dtype, and what the body writes to them is stored in the
    sharded parameters on exit. Each rank stores its own shard, so all ranks must write the same values. Units cannot
    run a forward in the body. If the body raises, nothing is stored.
    """
    units = _units(module, recurse)
    if write:
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(written(unit))
            yield
        for unit in units:
            if Lease.USER in unit.leases:
                _hold(unit)  # an enclosing context shows what was written
        return
    for unit in units:
        _root(unit).recover_if_broken()  # an interrupted pass may have left full parameters in the modules
        unit.leases[Lease.USER] = unit.leases.get(Lease.USER, 0) + 1
    try:
        for unit in units:
            _hold(unit)
        yield
    finally:
        for unit in units:
            _root(unit).recover_if_broken()  # so that a pass that broke on this rank alone leaves no lease
            unit.leases[Lease.USER] -= 1
            if not unit.leases[Lease.USER]:
                del unit.leases[Lease.USER]
                _let_go(unit)


def _root(unit: Unit) -> Root:
    return find_root(unit, unit.modules[0])


def _hold(unit: Unit) -> None:
    if not unit.shows_full:
        _root(unit).gather_outside_pass([unit])
        unit.swap_in()
    unit.record_main_state()
    for group in unit.groups if torch.is_grad_enabled() else ():
        group.watch()  # gradients of parameters that are used without a forward have no other hook


def _let_go(unit: Unit) -> None:
    """The last context of a unit has ended: reshard it, or hide its weights if another lease needs them."""
    if Lease.PASS in unit.leases or unit.phase is not Phase.RESTING:
        return
    if unit.leases:
        unit.hide()
    else:
        unit.release()


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    """The units of a module's parameters, in the same order on all ranks, each with a root."""
    _arguments.module("gathered", module)
    below = [unit for _, unit in units_below(module)]
    groups = [group_of(parameter) for parameter in module.parameters()]
    around = [unit_with(group) for group in groups if group is not None]
    found = list(dict.fromkeys(unit for unit in (*around, *below) if unit is not None))
    if not recurse:
        inside = {unit for child in module.children() for _, unit in units_below(child)}
        found = [unit for unit in found if unit not in inside]
    if not found:
        raise ValueError(f"gathered: no parameter of {type(module).__name__} is sharded; call fully_shard first")
    for unit in found:
        _root(unit)
    return found
