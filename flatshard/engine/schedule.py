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

    FORWARD = "forward"
    FORWARD_NO_GRAD = "forward without gradients"
    BACKWARD = "backward"


class Program:
    """The recorded order of needs of each kind of pass. Units are numbers, in the order of registration."""

    def __init__(self, num_units: int) -> None:
        registered = tuple(range(num_units))
        self._orders: dict[Pass, Sequence[int]] = {
            Pass.FORWARD: registered,
            Pass.FORWARD_NO_GRAD: registered,
            Pass.BACKWARD: registered[::-1],
        }
        self._recorded: set[Pass] = set()
        self._kind: Pass | None = None
        self._taken: list[int] = []
        self._cursor = 0

    @property
    def running(self) -> Pass | None:
        """The pass that has begun and not ended."""
        return self._kind

    def order(self, kind: Pass) -> tuple[int, ...]:
        """The order that the next pass of this kind is expected to follow."""
        return tuple(self._orders[kind])

    def begin(self, kind: Pass) -> None:
        """A pass starts. One that was broken off before is forgotten."""
        self._kind, self._taken, self._cursor = kind, [], 0

    def need(self, unit: int) -> None:
        """The running pass needs this unit now."""
        if self._kind is None:
            return
        self._taken.append(unit)
        order = self._orders[self._kind]
        # Units that were expected before and did not come were skipped; one that is not expected at all (another
        # branch, an evaluation of a part) leaves the prediction where it is.
        for at in range(self._cursor, len(order)):
            if order[at] == unit:
                self._cursor = at + 1
                return

    def upcoming(self) -> Iterator[int]:
        """The units expected after the one needed last, nearest first."""
        if self._kind is not None:
            yield from self._orders[self._kind][self._cursor :]

    def end(self) -> None:
        """The running pass is over, and predicts the next of its kind. The first forward also predicts backward."""
        if self._kind is None:
            return
        if self._taken:
            self._orders[self._kind] = tuple(self._taken)
            self._recorded.add(self._kind)
            if self._kind is Pass.FORWARD and Pass.BACKWARD not in self._recorded:
                self._orders[Pass.BACKWARD] = tuple(self._taken[::-1])
        self._kind = None

    def abandon(self) -> None:
        """The running pass was broken off; it predicts nothing."""
        self._kind = None

    def digest(self) -> int:
        """A number that two ranks share if, and almost surely only if, they have recorded the same orders."""
        text = repr([(kind.value, self._orders[kind]) for kind in Pass if kind in self._recorded])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
