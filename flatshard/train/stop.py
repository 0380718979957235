"""End a run early after a signal or a closed pipe. Ranks agree on it, so that all end after the same step."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import FrameType
from typing import Any

from flatshard.buffer import Exchange

_SECONDS = 1.0  # a terminal and a launcher may both send one Ctrl-C; a later signal is a second one


class Stop:
    """A request to end the run after the current step. ``number``: the signal that this rank has received, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def listen(self) -> dict[int, Any]:
        """Handle SIGINT and SIGTERM from now on; returns the previous handlers. Must be called in the main thread."""
        return {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}

    def record(self, number: int) -> bool:
        """Record the first signal. Returns whether this is a second one, more than `_SECONDS` later."""
        again = self.number != 0 and time.monotonic() - self._since > _SECONDS
        if not self.number:
            self.number, self._since = number, time.monotonic()
        return again

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.record(number):
            os._exit(128 + number)  # the second signal ends the process at once

    def end_for_closed_pipe(self) -> None:
        """End the run because nobody reads stdout, and discard output until then."""
        self.number, self._since = self.number or signal.SIGPIPE, time.monotonic()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # then flushing it at exit raises no error

    def agreed(self) -> int:
        """The signal that any rank has received, or 0; the same on all ranks. All ranks must call it."""
        return max(reply[0] for reply in Exchange("control").gather(bytes([self.number])))


def reader_is_gone() -> bool:
    """Whether stdout is a pipe whose reader has ended. The next print would fail too, but may be minutes away."""
    try:
        place = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout is not a file
        return False
    look = select.poll()
    look.register(place, 0)
    return any(seen & select.POLLERR for _, seen in look.poll(0))


def signal_name(number: int) -> str:
    """The name of a signal, as users know it."""
    called: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGPIPE: "a closed pipe"}
    return called.get(number) or signal.Signals(number).name
