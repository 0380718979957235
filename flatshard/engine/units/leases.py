"""Why the full weights of a unit stay gathered."""

from __future__ import annotations

from enum import Enum


class Lease(Enum):
    """A reason for which the full weights of a unit stay, until it ends. Modules show them under the first two.

    What was gathered ahead of its use, or by a recomputation whose backward is next, has none yet: it is the root's to
    use, or to give back at the end of the pass.
    """

    __hash__ = object.__hash__  # Enum's own is a Python function

    PASS = "a pass"  # has come to the unit, and has not left it
    USER = "gathered()"  # a body of it is running
    NEXT = "the next pass"  # uses them as they are, if they are still those of main by then
    GRAPH = "a graph of gradients"  # a backward has made one, which another will go through, reading the weights
