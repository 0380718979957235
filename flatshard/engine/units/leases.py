"""Why the full weights of a unit stay gathered."""

from __future__ import annotations

from enum import Enum


class Lease(Enum):
    """A reason to keep the full weights of a unit. Modules have full parameters under the first two.

    Weights that were prefetched, or gathered by a recomputation before its backward, have no lease yet: the root uses
    them, or releases them at the end of the pass.
    """

    __hash__ = object.__hash__  # Enum's own is a Python function

    PASS = "a pass"  # has come to the unit, and has not left it
    USER = "gathered()"  # a body of it is running
    NEXT = "the next pass"  # uses them as they are, if they are still those of main by then
    GRAPH = "a graph of gradients"  # a backward has made one, which another will go through, reading the weights
