"""What a unit has been told to do."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatshard.engine.unit import Unit


@dataclass
class Settings:
    """What policies, setters and `microbatch` say of a unit. The engine reads it and changes nothing here."""

    reshard_after_forward: bool | None  # None: unless it is the outermost unit of a forward
    is_auto: bool = False  # `reshard_after_forward` is chosen by the budget of the root
    reshard_after_backward: bool = True
    unshard_in_forward: bool = True
    unshard_in_backward: bool = True
    keeps_for_next: bool = False  # gathered between the micro-batches of a step
    is_first: bool = True  # of the micro-batches of an optimizer step
    is_last: bool = True
    reduces: bool = True  # off: gradients stay unreduced
    all_reduces: bool = True  # off: gradients go no further than they rest between micro-batches
    reduces_unused: bool = False  # on: what a backward does not use takes part in the reduces with zeros
    is_optional: bool = False  # a rank's batch may not use it; then it takes part in what the others launch for it
    refuses_meta: bool = False  # on: a first use without values is refused, not begun with initial ones
    max_reducing: int | None = None  # what the scope's policy says otherwise
    separate_groups: bool | None = None
    prefetch_in_forward: list[weakref.ref[Unit]] | None = None
    prefetch_in_backward: list[weakref.ref[Unit]] | None = None
