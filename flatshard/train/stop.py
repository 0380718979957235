"""Ending early: a signal, or a reader who has gone, asks for it; ranks agree, so that all end after the same step."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import FrameType

from flatshard.buffer import Exchange

_SECONDS = 1.0  # a terminal and a launcher may both pass on one Ctrl-C; a signal after that long is another one


class Stop:
    """``number``: the signal that asked this rank, or 0. Made when a rank can end in its own time."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def listen(self) -> None:
        """From now on SIGINT and SIGTERM ask for the end. Only a main thread can."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def heard(self, number: int) -> bool:
        """Remember the first signal. Whether this is another one, a moment later."""
        again = self.number != 0 and time.monotonic() - self._since > _SECONDS
        if not self.number:
            self.number, self._since = number, time.monotonic()
        return again

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.heard(number):
            os._exit(128 + number)  # asked again: end at once

    def lose_reader(self) -> None:
        """Nobody reads what this process prints: end, and print to nowhere until then."""
        self.number, self._since = self.number or signal.SIGPIPE, time.monotonic()
        print_nowhere()

    def agreed(self) -> int:
        """The signal that has asked any rank, or 0. The same on all ranks, which all call it after each step."""
        return max(reply[0] for reply in Exchange("control").gather(bytes([self.number])))


def reader_is_gone() -> bool:
    """Whether this process prints to a pipe that nobody reads any more. A print would tell, but may be long to come."""
    try:
        place = sys.stdout.fileno()
    except (OSError, ValueError):  # no file
        return False
    look = select.poll()
    look.register(place, 0)
    return any(seen & select.POLLERR for _, seen in look.poll(0))


def print_nowhere() -> None:
    """What is still in the buffer of stdout is lost, and no error when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def signal_name(number: int) -> str:
    """What people call the signal."""
    called: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGPIPE: "a closed pipe"}
    return called.get(number) or signal.Signals(number).name
