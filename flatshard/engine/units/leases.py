"""Why the full weights of a unit stay gathered."""

from __future__ import annotations

from enum import Enum


class Lease(Enum):
    """A reason to keep the full weights of a unit. Modules have full parameters under the first two.

    A unit without any is resharded.
    """

    __hash__ = object.__hash__  # Enum's own is a Python function

    PASS = "a pass"  # is running through the unit, or has recomputed it for its backward
    USER = "gathered()"  # its block is running
    PREFETCH = "prefetch"  # until the running pass reaches the unit, passes it over, or ends
    NEXT = "the next pass"  # uses them if main has not changed by then
    GRAPH = "a graph of gradients"  # of a backward with create_graph=True; its own backward reads the weights
