"""The reason why this rank must end, after a notification, and whether its grace period is over."""

from __future__ import annotations

import math
import os
import time

from flatshard.trust.record import in_range, record


class PeerError(RuntimeError):
    """A collective did not end, because of another rank or of the network. Names the launch, and the rank if known."""


def record_error(error: PeerError) -> PeerError:
    """Write an error to the flight record, even if it is caught later: the process has not ended without an error."""
    record.tell(error=f"PeerError: {error}")
    return error


def one_line(error: BaseException) -> str:
    """The message of an error, shortened to one line."""
    text = " ".join(str(error).split()) or "(no message)"
    return text if len(text) <= 600 else f"{text[:600]}..."


def grace_period() -> float:
    """Seconds that a notified rank has to end by itself: ``FLATSHARD_GRACE``, or 5."""
    given = os.environ.get("FLATSHARD_GRACE", "")
    try:
        return float(given) if given else 5.0
    except ValueError:
        raise ValueError(f"FLATSHARD_GRACE={given!r}: must be a number of seconds") from None


class Verdict:
    """What a rank knows of the end of its job. The first reason counts; later ones follow from it."""

    def __init__(self, grace: float = 5.0) -> None:
        self.reason: str | None = None  # what has ended another rank, or is to end this one
        self.is_failure = False  # the job is over; a process that is gone may have done all it had to
        self.explanation = ""  # why a call of torch's has failed, for the last words of this process
        self._lost = -1  # a rank that is gone; those who wait for it are to end
        self._grace, self._since = grace, 0.0

    def add(self, reason: str, is_failure: bool = True) -> None:
        """The job cannot continue."""
        if self.reason is None:
            self._since, self.reason = time.monotonic(), reason
        self.is_failure = self.is_failure or is_failure

    def add_lost(self, rank: int) -> None:
        """A process has ended without a goodbye."""
        self._lost = rank if self.reason is None else self._lost
        self.add(f"rank {rank} ended without a message: it was killed or crashed", is_failure=False)

    def pause_grace(self) -> None:
        """Let this rank run without a time limit: its process group is gone, and the user decides what follows."""
        self._since = math.inf

    def resume_grace(self) -> None:
        self._since = min(self._since, time.monotonic())

    def must_end(self) -> bool:
        """Whether this rank has to end now, since it has not ended by itself."""
        if self.reason is None or time.monotonic() - self._since <= self._grace:
            return False
        entry = record.oldest_open() if record.is_on_device else None  # on the CPU, the wait raises
        return self.is_failure or (entry is not None and self._lost in in_range(entry.group.split()[-1]))

    def error(self, what: str) -> PeerError:
        """The error to raise at a launch or a wait. ``what``: that launch or wait."""
        oldest = record.oldest_open() if record.is_on_device else None
        return record_error(PeerError(f"{self.reason}. Rank {record.header['rank']} was waiting for {oldest or what}"))
