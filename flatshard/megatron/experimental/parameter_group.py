"""Parameter groups of the second version, and the contexts of their units."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import group_of
from flatshard.megatron.groups import FsdpParameter, ParameterGroup

__all__ = ["CONTEXTS", "FsdpParameter", "FsdpParameterGroup", "sync_model_weights_from_main_weights"]

FsdpParameterGroup = ParameterGroup
CONTEXTS: weakref.WeakKeyDictionary[ParamGroup, Any] = weakref.WeakKeyDictionary()  # the `FsdpContext` of each group


def sync_model_weights_from_main_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Bring compute weights up to date with main, in all units that share a context with one of the parameters.

    Not in those alone that the parameters are of: on another rank these may be others.
    """
    found = (group_of(parameter) for parameter in parameters)
    for context in dict.fromkeys(CONTEXTS[group] for group in found if group is not None and group in CONTEXTS):
        for group in context.parameter_groups:
            group.sync_model_weight_from_main_weight()
