"""What others find under the names of PyTorch's private state of a unit, as far as well-known callers use it."""

from __future__ import annotations

import types
import weakref
from typing import Any

from torch import nn

from flatshard import _torch
from flatshard.engine.roots import scope_of, unit_of
from flatshard.engine.unit import Unit


class FSDPState:
    """What `fully_shard.state(module)` and `module._get_fsdp_state()` return.

    Pipelines reduce by it what the micro-batches of a stage have accumulated. Its other attributes are PyTorch's, and
    refused with a reason.
    """

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self._known, self._unit = weakref.ref(module), weakref.ref(unit)
        self._state_ctx = types.SimpleNamespace(all_states=())  # whose groups pipelines would tell one by one

    @property
    def unit(self) -> Unit:
        """The engine's own state of the module."""
        found = self._unit()
        assert found is not None
        return found

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.unit.modules)

    @property
    def _is_root(self) -> bool | None:
        """Whether it is the outermost unit; None before there has been a forward."""
        return None if self.unit.scope is None else self.unit.scope.units[0] is self.unit

    @property
    def _mp_policy(self) -> Any:
        return self.unit.policy

    def _lazy_init(self) -> None:
        """Do now what the first forward would do: this is a root, unless it is known to be below one."""
        module = self._known()
        assert module is not None
        scope_of(self.unit, module)

    def _root_post_backward_final_callback(self) -> None:
        self._lazy_init()
        scope = self.unit.scope
        assert scope is not None
        scope.reduce_accumulated()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: of PyTorch's private FSDPState, flatshard has no such part; flatshard.summary(model) shows what "
            "there is"
        )


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module that `fully_shard` was called on."""
    return None if unit_of(module) is None else module.__dict__[_STATE]


_STATE = "_flatshard_state"


def show_state(module: nn.Module) -> None:
    """Let `state_of`, and torch's own function, find the state of a module that has become a unit."""
    unit = unit_of(module)
    assert unit is not None
    module.__dict__[_STATE] = state = FSDPState(module, unit)
    _torch.let_torch_find(state, module)
