"""Time-outs of collectives on a device, where nobody waits on the CPU: found by a look at the flight record."""

from __future__ import annotations

from collections.abc import Callable

from flatshard.trust.record import Entry, record

_STALLED = 3  # looks without a launch after which the record is settled


class LaunchWatch:
    """Looks at the launches of this process, about once a second and always on the same thread."""

    def __init__(self) -> None:
        self._oldest, self._age = 0, 0.0  # the oldest launch that has not ended, and for how long it has been that
        self._seen, self._idle = 0, 0  # launches, and looks without a new one
        self._is_prepared = False

    def prepare(self, settle_in: Callable[[], None]) -> None:
        """Call ``settle_in`` once, before CUDA events are asked for on this thread."""
        if record.is_on_device and not self._is_prepared:
            settle_in()
            self._is_prepared = True

    def settle_if_idle(self) -> None:
        """Once nothing has been launched for a while, write down what has ended."""
        self._idle = self._idle + 1 if record.number == self._seen else 0
        self._seen = record.number
        if self._idle == _STALLED and self._seen:
            record.settle()

    def overdue(self, seconds: float) -> tuple[Entry, float] | None:
        """A launch on a device that has been the oldest for longer than its time-out, and that time-out in seconds.

        ``seconds``: since the last look. A launch that waits behind another is as old as its turn.
        """
        entry = record.oldest_open() if record.is_on_device else None
        if entry is None or entry.number != self._oldest:
            self._oldest, self._age = 0 if entry is None else entry.number, 0.0
            return None
        self._age += seconds
        limit = record.limit(entry)
        if limit is None or self._age < limit:
            return None
        self._age = 0.0
        return entry, limit
