"""What the other ranks of a process group wait for, as they say when one of them asks."""

from __future__ import annotations

from collections.abc import Sequence

from flatshard.trust.links import Message
from flatshard.trust.record import record


class Survey:
    """The answers to the last question, whichever rank has asked it, and this rank's own answer."""

    def __init__(self, rank: int, world: int) -> None:
        self.waits_for = ""  # what this rank waits for on the CPU, if that wait has failed
        self._others = set(range(world)) - {rank}
        self._states: dict[int, str] = {}
        self._left: set[int] = set()  # ranks that have ended well

    def restart(self) -> None:
        """A rank asks: answers to earlier questions no longer count."""
        self._states.clear()

    def hear(self, message: Message) -> None:
        """An answer, or a goodbye."""
        if "left" in message:
            self._left.add(message["left"])
        elif "state" in message:
            self._states[message["rank"]] = message["state"]

    def is_complete(self) -> bool:
        return self._others <= self._states.keys() | self._left

    def own_state(self) -> str:
        """What this rank waits for."""
        if self.waits_for:
            return f"waits for {self.waits_for}"
        entry = record.oldest_open()
        if entry is not None:
            return f"waits for {entry}"
        last = record.last()
        return "has launched nothing yet" if last is None else f"has launched nothing since {last}"

    def summary(self) -> str:
        """What the others have answered, who has ended, and who says nothing."""
        states, left = dict(self._states), self._others & self._left
        silent = sorted(self._others - states.keys() - left)
        said = [f"rank {rank} {state}" for rank, state in sorted(states.items())][:16]
        if left:
            said.append(f"rank {_listed(sorted(left))} has ended")
        if silent:
            said.append(f"no answer from rank {_listed(silent)}: stopped, or cut off")
        text = "; ".join(said)
        return text[:1].upper() + text[1:]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
