"""Why the full weights of a unit stay gathered."""

from __future__ import annotations

from enum import Enum


class Lease(Enum):
    """A reason to keep the full weights of a unit. Modules have full parameters under the first two.

    Weights that were prefetched, or gathered by a recomputation before its backward, have no lease yet: the root uses
    them, or releases them at the end of the pass.
    """

    __hash__ = object.__hash__  # Enum's own is a Python function

    PASS = "a pass"  # is running through the unit
    USER = "gathered()"  # its block is running
    NEXT = "the next pass"  # uses them if main has not changed by then
    GRAPH = "a graph of gradients"  # of a backward with create_graph=True; its own backward reads the weights
