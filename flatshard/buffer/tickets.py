"""Tickets: the ends of operations on lanes.

On CUDA a ticket is an event: waiting for it orders the current stream and never blocks the host. On CPU it holds the
work of the process group, and waiting for it completes that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.distributed import Work

from flatshard import _epochs, _torch
from flatshard.trust.alarm import alarm
from flatshard.trust.record import PHASES, record

Action: TypeAlias = Callable[[], None] | None  # what is to be done at the end of an operation, if anything
Tickets: TypeAlias = "Sequence[Ticket]"


_PATIENCE = timedelta(seconds=1)  # of one wait for work, after which it is checked whether another rank has ended
# The error of the work of a process group written in Python, which cannot wait with a timeout.
_WITHOUT_LIMIT = "with finite timeout not implemented"


class Ticket:
    """The end of an operation. A ticket without event and works is already done.

    The ticket of a collective has its number in the lane, kind, name and bytes.
    """

    __slots__ = (
        *("__weakref__", "_device", "_epoch", "_event", "_failed", "_then", "_works"),
        *("is_on_device", "kind", "name", "number", "numbytes"),
    )

    def __init__(self, event: Any = None, device: int = 0, works: Sequence[Work] = (), then: Action = None) -> None:
        self._event, self._epoch = event, _epochs.now
        self._device = device
        self._works = works
        self._then = then
        self._failed = False
        self.is_on_device = event is not None
        self.kind = self.name = ""
        self.number = self.numbytes = 0

    def wait(self) -> None:
        """Order what follows after the operation: the current stream on CUDA, the caller itself on CPU."""
        if self._event is not None and self._epoch == _epochs.now:
            self._event.wait(_torch.current_stream(self._device))
        for work in self._works:
            try:
                work.wait(_PATIENCE)
            except RuntimeError as error:
                self._failed = True
                _keep_waiting(work, self._what, error)
                self._failed = False
        self._works = ()
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def synchronize(self) -> None:
        """Block the caller until the operation has ended, on CUDA too."""
        if self._event is not None and self._epoch == _epochs.now:
            self._event.synchronize()
        self.wait()

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Order another stream after the operation."""
        if self._event is not None and self._epoch == _epochs.now:
            self._event.wait(stream)

    def has_ended(self) -> bool:
        """Whether the communication has ended without an error, even if further work remains. Thread-safe."""
        if self._event is not None:
            return self._epoch != _epochs.now or bool(self._event.query())
        return not self._failed and all(work.is_completed() for work in self._works)

    def _what(self) -> str:
        phase = f", {PHASES[record.phase]}" if record.phase else ""
        return f"{self.kind} {self.name or '(unnamed)'} (step {record.step}{phase})"


class Pending(Ticket):
    """A ticket of a deferred launch. Waiting for it, or querying it, launches it by ``launch``."""

    __slots__ = ("_launch", "launched")

    def __init__(self, launch: Callable[[], None]) -> None:
        super().__init__()
        self._launch = launch
        self.launched: Ticket | None = None  # which `launch` sets

    @property
    def _real(self) -> Ticket:
        if self.launched is None:
            self._launch()
        assert self.launched is not None
        return self.launched

    def wait(self) -> None:
        self._real.wait()

    def synchronize(self) -> None:
        self._real.synchronize()

    def order_before(self, stream: torch.cuda.Stream) -> None:
        self._real.order_before(stream)

    def has_ended(self) -> bool:
        return self._real.has_ended()


def _keep_waiting(work: Work, what: Callable[[], str], error: RuntimeError) -> None:
    """A wait for work has raised. Continue to wait if that was only the short timeout, else raise with the reason."""
    if _WITHOUT_LIMIT in str(error):
        work.wait()
        return
    has_ended = False
    try:
        while True:
            if _is_of_handler(error, work):
                raise error
            if has_ended:
                raise alarm.explain(what(), error) from error
            # Processes that the other rank has forked, such as DataLoader's, may keep its connections open.
            if alarm.verdict.is_failure or alarm.verdict.must_end(waits=True):
                alarm.gave_up = True
                raise alarm.verdict.error(what())
            has_ended = work.is_completed()  # before the wait: work that ends during it may have succeeded
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError as again:
                error = again
    finally:
        del error  # it refers to this frame, and so to the callers' tensors, until a garbage collection


def _is_of_handler(error: RuntimeError, work: Any) -> bool:
    """Whether a signal handler that ran during the wait raised the error, such as DataLoader's."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return trace is not None and trace.tb_frame.f_code is not getattr(type(work).wait, "__code__", None)


DONE = Ticket()  # has been waited for, and can be again and again
