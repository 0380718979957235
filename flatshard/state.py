"""PyTorch's private `FSDPState` of a unit: the attributes that well-known libraries read."""

from __future__ import annotations

import types
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatshard import _torch
from flatshard.engine.groups.changes import Names
from flatshard.engine.schedule.root import Root, root_of
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import Unit
from flatshard.layout import is_sharded

_STATE = "_flatshard_state"


@dataclass(frozen=True)
class FSDPParam:
    """A parameter of a unit and its full name."""

    _param_fqn: str
    sharded_param: nn.Parameter


@dataclass(frozen=True)
class FSDPParamGroup:
    """The parameters of a unit, read-only."""

    _module_fqn: str
    fsdp_params: list[FSDPParam]
    _state: FSDPState

    is_unsharded = property(lambda self: self._state.unit.is_gathered, doc="Whether this rank has full parameters.")
    comm_ctx = property(lambda self: self._state._comm_ctx, doc="The streams of `FSDPState._comm_ctx`.")

    @property
    def mesh_info(self) -> Any:
        """PyTorch's description of the mesh."""
        unit = self._state.unit
        return _torch.mesh_info(unit.mesh, is_sharded(unit.groups[0].main.placements[-1]))

    def post_backward(self) -> None:
        """No effect. Pipelines call it for every group; `_root_post_backward_final_callback` handles all of them."""


class FSDPState:
    """What `fully_shard.state(module)` and `module._get_fsdp_state()` return.

    Pipelines use it to reduce the accumulated gradients of a stage. Other attributes of PyTorch's state raise
    AttributeError.
    """

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self._known, self._unit = weakref.ref(module), weakref.ref(unit)

    # For isinstance checks of code that looks for FSDP2's state. It does not inherit, so that missing attributes raise.
    __class__ = property(lambda self: _torch.FSDPState)

    @property
    def unit(self) -> Unit:
        """The unit of the module."""
        found = self._unit()
        assert found is not None
        return found

    _modules = property(lambda self: tuple(self.unit.modules))
    _mp_policy = property(lambda self: self.unit.policy)

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        """Of a unit with several modules: those that the running forward has not called yet."""
        modules, call = self._modules, self.unit.call
        return {module for module in modules if call is not None and id(module) in call.left} if modules[1:] else set()

    @property
    def _is_root(self) -> bool | None:
        """Whether it is the outermost unit; None before the first forward."""
        return None if self.unit.root is None else self.unit.root.units[0] is self.unit

    @property
    def _state_ctx(self) -> types.SimpleNamespace:
        """A namespace with ``all_states``, the states of all units of this root in the order of registration."""
        units = [self.unit] if self.unit.root is None else self.unit.root.units
        return types.SimpleNamespace(all_states=[state_of(unit.modules[0]) for unit in units])

    @property
    def _comm_ctx(self) -> types.SimpleNamespace:
        """The communication streams of this root; None before the first forward, and on CPU."""
        root = root_of(self.unit)
        gather, reduce = (None, None) if root is None else (root.gather_lane.stream, root.reduce_lane.stream)
        gathers = dict.fromkeys(("all_gather_copy_in_stream", "all_gather_stream"), gather)
        return types.SimpleNamespace(**gathers, reduce_scatter_stream=reduce, all_reduce_stream=reduce)

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        unit = self.unit
        root = None if unit.root is None else unit.root.units[0].modules[0]
        fqn = "" if self._is_root else unit.name
        found = []
        for group in unit.groups:
            names = Names(group, root)
            found += [FSDPParam(names[index], member.sharded) for index, member in enumerate(group.params)]
        return [FSDPParamGroup(fqn, found, self)] if found else []

    _fsdp_param_group = property(lambda self: next(iter(self._fsdp_param_groups), None))

    def _lazy_init(self) -> Root:
        """Set up the root, as the first forward does. This unit becomes the root if it has none."""
        module = self._known()
        assert module is not None
        return find_root(self.unit, module)

    def _root_post_backward_final_callback(self) -> None:
        self._lazy_init().reduce_accumulated()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"flatshard does not have the attribute {name} of PyTorch's private FSDPState; use flatshard.summary(model)"
        )


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module; None if `fully_shard` was not called on it."""
    found: FSDPState | None = module.__dict__.get(_STATE)
    return found


def show_state(module: nn.Module, unit: Unit) -> None:
    """Store the state of a module that is a unit, for `state_of` and for torch's function."""
    module.__dict__[_STATE] = state = FSDPState(module, unit)
    _torch.let_torch_find(state, module)
