"""`gathered`: full parameters for a body of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from flatshard import _arguments
from flatshard.engine.groups.registry import group_of
from flatshard.engine.schedule.root import Root, root_of
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.changes import written
from flatshard.engine.units.leases import Lease
from flatshard.engine.units.unit import Unit, unit_with


@contextmanager
def gathered(module: nn.Module, *, recurse: bool = True, write: bool = False) -> Iterator[None]:
    """Within, the parameters of ``module`` are full tensors. All ranks enter and leave it together.

    ``module`` is a model or a part of one: all units below it, and those that hold its own parameters, are gathered
    when the body begins and stay gathered through whatever runs in it, forwards and backwards included; so an
    evaluation, or a generation token by token, gathers once. What the body calls without a forward (a submodule, a
    method, ``F.linear(x, m.weight)``) works too, and its gradients are reduced. They are in the compute dtype, and
    anew after an optimizer step. ``recurse=False``: not the units inside ``module``.

    ``write``: they are copies in the main dtype, whole over all axes, and what the body has written to them is in the
    sharded parameters afterwards; every rank keeps its own rows, so all are to write the same. No unit can run a
    forward in the body. If the body raises, nothing is written.
    """
    units = _units(module, recurse)
    if write:
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(written(unit))
            yield
        for unit in units:
            if Lease.USER in unit.leases:
                _hold(unit)  # the body around this one shows what was written
        return
    for unit in units:
        _root(unit).give_up_broken()  # which shows full weights of its own
        unit.leases[Lease.USER] = unit.leases.get(Lease.USER, 0) + 1
    try:
        for unit in units:
            _hold(unit)
        yield
    finally:
        for unit in units:
            _root(unit).give_up_broken()  # now: what one rank has done here alone changes no leases
            unit.leases[Lease.USER] -= 1
            if not unit.leases[Lease.USER]:
                del unit.leases[Lease.USER]
                _let_go(unit)


def _root(unit: Unit) -> Root:
    root = root_of(unit)
    assert root is not None
    return root


def _hold(unit: Unit) -> None:
    if not unit.shows_full:
        _root(unit).gather_apart([unit])
        unit.swap_in()
    unit.note_state()
    for group in unit.groups if torch.is_grad_enabled() else ():
        group.watch()  # of what is called without a forward, nothing else would tell that it has gradients


def _let_go(unit: Unit) -> None:
    """The last body that needs a unit is over: what becomes of its weights is for other leases to say."""
    if Lease.PASS in unit.leases or unit.is_in_use:
        return
    if unit.leases or _root(unit).is_about_to_use(unit):
        unit.hide()
    else:
        unit.release()


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    """The units of a module's parameters, in one order on all ranks, each with a root."""
    _arguments.module("gathered", module)
    below = [unit for _, unit in units_below(module)]
    groups = [group_of(parameter) for parameter in module.parameters()]
    around = [unit_with(group) for group in groups if group is not None]
    found = list(dict.fromkeys(unit for unit in (*around, *below) if unit is not None))
    if not recurse:
        inside = {unit for child in module.children() for _, unit in units_below(child)}
        found = [unit for unit in found if unit not in inside]
    if not found:
        raise ValueError(f"no parameter of {type(module).__name__} is sharded: fully_shard was not called on it")
    for unit in found:
        if unit.root is None:
            find_root(unit, unit.modules[0])
    return found
