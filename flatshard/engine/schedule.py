"""The program: in which order units are needed, as it was recorded, and what follows from it.

A pass (a forward with gradients, one without, a backward) needs units one after another. The order of the last pass of
its kind predicts this one: what is needed next is gathered ahead. All ranks run the same code, so they record the same
orders; a digest confirms it once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from enum import Enum


class Pass(Enum):
    """What is going through the model."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    FORWARD = "forward"
    FORWARD_NO_GRAD = "forward without gradients"
    BACKWARD = "backward"


class Program:
    """The recorded order of needs of each kind of pass. Units are numbers, in the order of registration.

    A forward that enters at another unit than the root (generation, an evaluation of a part) is another kind of pass.
    Before the first pass from the root, the order of registration predicts it; before another, nothing does.
    """

    def __init__(self, num_units: int) -> None:
        registered = tuple(range(num_units))
        self._orders: dict[tuple[Pass, int], Sequence[int]] = {
            (Pass.FORWARD, 0): registered,
            (Pass.FORWARD_NO_GRAD, 0): registered,
            (Pass.BACKWARD, 0): registered[::-1],
        }
        self._recorded: set[tuple[Pass, int]] = set()
        self._kind: tuple[Pass, int] | None = None
        self._order: Sequence[int] = ()  # that of the running pass
        self._entry = 0  # of the last forward with gradients
        self._taken: list[int] = []
        self._cursor = 0

    @property
    def running(self) -> Pass | None:
        """The pass that has begun and not ended."""
        return None if self._kind is None else self._kind[0]

    def order(self, kind: Pass, entry: int = 0) -> tuple[int, ...]:
        """The order that the next pass of this kind from this unit on is expected to follow."""
        return tuple(self._orders.get((kind, entry), ()))

    def begin(self, kind: Pass, entry: int | None = None) -> None:
        """A pass starts, at unit ``entry``; a backward, where the last forward did. One broken off is forgotten."""
        if kind is Pass.FORWARD and entry is not None:
            self._entry = entry
        self._kind = (kind, self._entry if entry is None else entry)
        self._order = self._orders.get(self._kind, ())
        self._taken, self._cursor = [], 0

    def need(self, unit: int) -> None:
        """The running pass needs this unit now."""
        if self._kind is None:
            return
        self._taken.append(unit)
        order = self._order
        # Units that were expected before and did not come were skipped; one that is not expected at all (another
        # branch, an evaluation of a part) leaves the prediction where it is.
        for at in range(self._cursor, len(order)):
            if order[at] == unit:
                self._cursor = at + 1
                return

    def upcoming(self) -> Iterator[int]:
        """The units expected after the one needed last, nearest first."""
        if self._kind is not None:
            yield from self._order[self._cursor :]

    def end(self) -> None:
        """The running pass is over, and predicts the next of its kind. The first forward also predicts backward."""
        if self._kind is None:
            return
        if self._taken:
            self._orders[self._kind] = tuple(self._taken)
            self._recorded.add(self._kind)
            kind, entry = self._kind
            if kind is Pass.FORWARD and (Pass.BACKWARD, entry) not in self._recorded:
                self._orders[Pass.BACKWARD, entry] = tuple(self._taken[::-1])
        self._kind = None

    def abandon(self) -> None:
        """The running pass was broken off; it predicts nothing."""
        self._kind = None

    def digest(self) -> int:
        """A number that two ranks share if, and almost surely only if, they have recorded the same orders."""
        recorded = sorted((kind.value, entry, self._orders[kind, entry]) for kind, entry in self._recorded)
        text = repr(recorded)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
