"""Ranks notify each other of their end, so that no rank waits for one that has ended.

A rank with an uncaught exception notifies all others (`watch`), and the ranks that are connected to a process detect
its end. A notified rank raises `PeerError` at its next launch or wait. If its main thread does not get there, because
it is in a call of CUDA, NCCL or the operating system, or if it has caught the error and continues, the watch thread
(`loop`) ends the process after a grace period, with the same message. If a process ends without a message,
only ranks that wait for it are notified: it may have finished its work.

The watch thread also ends a rank whose collective on a GPU has not ended after the timeout of its process group, and
writes the flight record to disk and to stderr on SIGUSR1 (`exits`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from typing import Any

from flatshard.trust import exits
from flatshard.trust.exits import leave
from flatshard.trust.loop import TICK, Loop
from flatshard.trust.record import Entry, record, records_folder
from flatshard.trust.watch import GRACE, PeerError, Verdict, Watch, Watched, grace_period, one_line

__all__ = ["GRACE", "Alarm", "PeerError", "Watched", "alarm", "leave"]

_log = logging.getLogger("flatshard")
_STALLED = 3  # looks without a launch after which the record is settled


class Alarm:
    """The alarm of one process. Call `start` when there is a process group; with another group it starts again.

    It ends with the process group, whose store it must not keep alive: ranks could not use that port again.
    """

    def __init__(self) -> None:
        self.gave_up = False  # something is waited for no more, and has not ended
        self._has_recovered = False  # an error was caught, and the process group destroyed
        self.verdict = Verdict()
        self._watch: Watch | None = None
        self._of: weakref.ref[Any] | None = None
        self._pid, self._starts = 0, 0
        self._loop: Loop | None = None
        self._oldest, self._age = 0, 0.0  # the oldest launch that has not ended, and for how long it has been that
        self._seen, self._idle_ticks = 0, 0  # launches, and looks without a new one
        self._may_query_events = False
        self._terminate_handler = exits.TerminateHandler(self._on_terminate)

    def explain(self, what: str, error: BaseException) -> PeerError:
        """Why a wait for a collective ended early. Asks the other ranks, for a few seconds."""
        return PeerError(f"{what}: {one_line(error)}") if self._watch is None else self._watch.explain(what, error)

    def await_culprit(self) -> None:
        """Call before this process ends because of another rank: that rank should end first."""
        if self._watch is not None:
            self._watch.await_culprit()

    # The process group begins and ends

    def start(self, of: Any, group: Watched) -> None:
        """Watch over a process group. ``of``: an object that exists as long as the group does, referenced weakly.

        ``FLATSHARD_ALARM=off``: record what is launched, and do nothing else.
        """
        if self._of is not None and self._of() is of and self._pid == os.getpid():
            return
        is_on = os.environ.get("FLATSHARD_ALARM", "").lower() not in ("off", "0")
        self.verdict, self.gave_up, self._has_recovered = Verdict(grace_period()), False, False
        self._of = weakref.ref(of, self._group_is_gone if is_on else None)
        self._starts += 1
        loop = self._loop_of_process() if is_on else None
        self._pid = os.getpid()
        self._begin_record(group)
        if self._watch is not None:
            self._watch.close(wait=0.0)
            self._watch = None
        if loop is not None:
            # torchrun keeps the store when it starts ranks again, so the prefix has the number of restarts: earlier
            # ranks' messages are not for these. Each node counts its own. Where the counts differ, ranks are not
            # connected, and learn of a failure by their waits.
            name = f"flatshard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self._starts}"
            self._watch = Watch(group, name, loop, self.verdict)
            self._watch.open()

    def _loop_of_process(self) -> Loop:
        """The loop, which is made the first time in this process."""
        if self._loop is not None and self._pid == os.getpid():
            return self._loop
        if self._loop is None:  # a process that was forked has these already
            os.register_at_fork(after_in_child=self._forked)
            exits.on_uncaught(self._uncaught)
            self._terminate_handler.install()
        self._loop = Loop(self._tick, lambda: TICK if self._watch is None else self._watch.pause(), exits.dump)
        self._loop.start()
        exits.at_exit(self._exit)
        return self._loop

    def _begin_record(self, group: Watched) -> None:
        record.header.pop("error", None)
        record.tell(rank=group.rank, world=group.world, pid=os.getpid(), host=socket.gethostname(), started=time.time())
        try:
            folder = records_folder(group.place)
            if folder is not None:
                record.keep_in(folder, group.rank)
        except OSError as error:
            remedy = "set FLATSHARD_RECORD to a folder that can be written to"
            warnings.warn(f"the flight record could not be written to a file: {error}; {remedy}", stacklevel=3)

    def _group_is_gone(self, of: weakref.ref[Any]) -> None:
        """The process group was destroyed. If an error was the reason, notify the other ranks."""
        watch = self._watch
        if of is not self._of or self._pid != os.getpid() or watch is None:
            return
        error = sys.exc_info()[1]
        is_own = isinstance(error, Exception) and _peer_error_in(error) is None
        if error is None:
            watch.await_others()
            self.verdict, self.gave_up = Verdict(), False
        elif is_own and watch.group.is_lost_peer(error):  # so is the text of a PeerError
            self._explain_lost_peer(error)
            is_own = False
        self.verdict.pause_grace()
        # Unless an exception ends the process, as that of a `finally` block does. A GPU may still have work to do.
        self._has_recovered = not record.is_on_device
        self._of = None
        if error is not None and is_own:
            watch.tell(_text_of(error), is_failure=False)  # it may be handled: `_uncaught` tells them if it is not
            watch.outlive_group()
        else:
            self._watch = None
            watch.close()

    def _forked(self) -> None:
        """In a forked process: the watch belongs to the parent."""
        if self._watch is not None:
            self._watch.drop()
            self._watch = None

    # On the watch thread

    def _tick(self, seconds: float) -> None:
        watch = self._watch
        if watch is not None and record.is_on_device and not self._may_query_events:
            watch.group.settle_in()
            self._may_query_events = True
        self._idle_ticks = self._idle_ticks + 1 if record.number == self._seen else 0
        self._seen = record.number
        if self._idle_ticks == _STALLED and self._seen:
            record.settle()
        if watch is not None and not self.verdict.is_failure:
            # Time in which this process, or the machine, was stopped does not count as waiting.
            overdue = self._overdue(min(seconds, 2 * TICK))
            if overdue is not None:
                threading.Thread(target=watch.time_out, args=overdue, daemon=True).start()
        if self.verdict.must_end(waits=record.is_on_device):  # on the CPU, the wait raises
            exits.end_stuck(self.verdict.reason)

    def _overdue(self, seconds: float) -> tuple[Entry, float] | None:
        """A launch on a device that has been the oldest for longer than its timeout, and that timeout in seconds.

        ``seconds``: since the last call. The time of a launch that waits behind another starts when it becomes the
        oldest.
        """
        entry = record.oldest_pending() if record.is_on_device else None
        if entry is None or entry.number != self._oldest:
            self._oldest, self._age = 0 if entry is None else entry.number, 0.0
            return None
        self._age += seconds
        limit = record.limit(entry)
        if limit is None or self._age < limit:
            return None
        self._age = 0.0
        return entry, limit

    # The process ends

    def _uncaught(self, error: BaseException) -> None:
        """An uncaught exception is about to be printed: notify the other ranks, and log the last launches."""
        if self._pid != os.getpid():
            return
        self._has_recovered = False
        of_peer = _peer_error_in(error)
        if of_peer is not None:
            record.tell(error=_text_of(of_peer))
        elif self._watch is not None and self._watch.group.is_lost_peer(error):
            self._explain_lost_peer(error)
        elif not self.verdict.explanation:
            self._post(error)
            if self.verdict.reason is not None:
                _log.error("flatshard: %s", self.verdict.reason)
        if record.number and record.folder is not None:
            _log.error("%s", record.dump())

    def _explain_lost_peer(self, error: BaseException) -> None:
        """A call of torch has raised because of another rank: find out why, for the last message of this rank."""
        pending, last = record.oldest_pending(), record.last()
        what = "a collective of torch.distributed" + ("" if last is None else f" after {last}")
        self.verdict.explanation = str(self.explain(what if pending is None else str(pending), error))

    def _post(self, error: BaseException) -> None:
        """Notify the other ranks of the end of this one."""
        record.tell(error=_text_of(error))
        if self._watch is not None:
            self._watch.tell(_text_of(error))

    def _on_terminate(self, is_distributed: bool) -> None:
        """A C++ exception is about to abort the process: of NCCL's watchdog, of Gloo, or of other code."""
        if self._pid != os.getpid():
            return
        if is_distributed and self._watch is not None and not record.is_on_device:
            self._watch.fail("Gloo has received data that it did not expect: ranks have launched different collectives")
        until = time.monotonic() + (GRACE if is_distributed else TICK)
        while self.verdict.reason is None and time.monotonic() < until:
            time.sleep(0.05)  # a rank that has ended says why, or its connection closes
        if self.verdict.reason is None and not is_distributed:
            return
        self.verdict.add("NCCL reported an error, which torch has logged above")
        self.verdict.resume_grace()
        while True:
            time.sleep(60)  # the main thread ends the process, or the watch does

    def _exit(self) -> None:
        error, watch = exits.ending_error(), self._watch
        if error is not None:
            self._has_recovered = False
            if "error" not in record.header:
                self._post(error)
        has_failed = "error" in record.header  # then the others were told, or this rank was
        if watch is not None and not has_failed:
            watch.await_others()
            watch.close()
        if str(record.header.get("error", "")).startswith(PeerError.__name__):
            self.await_culprit()
        if self._loop is not None:
            self._loop.stop()
        self._of = None  # a process group that was not destroyed is freed with the modules
        if has_failed and not self._has_recovered:
            exits.say_last(self.verdict.explanation)
            if self.gave_up or record.is_on_device or record.oldest_pending() is not None:
                exits.end_failed()
        self._terminate_handler.remove()
        if not has_failed:
            exits.remove_record()


def _peer_error_in(error: BaseException | None) -> PeerError | None:
    """The error of another rank that an exception is, or was raised from, or in the handling of."""
    seen = list[BaseException]()  # `raise error from error` makes a circle
    while error is not None and error not in seen and not isinstance(error, PeerError):
        seen.append(error)
        error = error.__cause__ or error.__context__
    return error if isinstance(error, PeerError) else None


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


alarm = Alarm()  # the one of this process
