"""The settings of a user for a unit."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

from torch import nn

Modules = tuple[weakref.ref[nn.Module], ...]


@dataclass(frozen=True)
class Intent:
    """The settings from `fully_shard` and the setters of `FSDPModule`. Setters replace it: `Unit.configure`."""

    reshard_after_forward: bool | Literal["auto"] | None = None  # None: unless it is the outermost unit of a forward
    reshard_after_backward: bool = True
    unshard_in_backward: bool | None = None  # None: if its backward reads weights
    reduces: bool = True  # off: gradients stay unreduced
    all_reduces: bool = True  # off: gradients are reduced only as far as between micro-batches
    reduces_unused: bool = False  # on: unused parameters take part in reduces with zeros
    is_optional: bool = False  # a rank's batch may not use it; the rank still takes part in its collectives
    refuses_meta: bool = False  # on: a first use on the meta device raises, instead of initialising
    max_reducing: int | None = None  # None: as in the root's policy
    separate_groups: bool | None = None
    prefetch_in_forward: Modules | None = None
    prefetch_in_backward: Modules | None = None
