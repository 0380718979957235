"""Ranks tell each other what ends them, so that nobody waits for a rank that will not come.

A rank with an uncaught exception posts it to the store of the process group. A thread of every other rank looks there
once a second; whoever waits for a collective then gets the error of that rank, instead of a time-out. Where a wait
fails otherwise (a connection lost, a time-out), those who are left call the roll and name who does not answer.

The same thread writes the flight record to disk and to stderr on SIGUSR1, also while this rank hangs in a wait, where
no handler of Python's would run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from flatshard.trust.record import record

_log = logging.getLogger("flatshard")

_TICK = 1.0  # seconds between two looks at the store, per 512 ranks
_STALLED = 3  # looks without a launch after which the record is settled
GRACE = 3.0  # seconds that the others have to post why they end
# Work that a process group written in Python has made of a future answers so to a limit of time: it knows none.
_WITHOUT_LIMIT = "with finite timeout not implemented"


def _key(name: str) -> str:
    """A key in the store. torchrun keeps that when it starts ranks again: what those before them said is not for them.

    Nodes count restarts each for itself. Where they differ, ranks of one are not told, and find out by their waits.
    """
    return f"flatshard/start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


class PeerError(RuntimeError):
    """A collective did not end, because of another rank or of the network. Says which launch, and who, if known."""


class Alarm:
    """Of one process. `start` it once there is a process group; with another one it starts anew.

    It ends with the process group, whose store it must not keep: ranks could not meet at that port again.
    """

    def __init__(self) -> None:
        self.raised: str | None = None  # what another rank has posted
        self._abort: Callable[[], None] = lambda: None  # ends what this rank waits for on its device
        self._store: Any = None
        self._of: weakref.ref[Any] | None = None  # the process group's own, which goes when that is destroyed
        self._thread: threading.Thread | None = None
        self._rank, self._world = 0, 1
        self._calls = 0
        self._gave_up = False  # something is waited for no more, and has not ended
        self._pid = 0
        self._wake: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, of: Any, store: Any, rank: int, world: int, abort: Callable[[], None]) -> None:
        """Watch over a process group: one rank of so many, with the store that it was made with.

        ``of``: the object that lives as long as the process group. ``abort``: called by another thread when another
        rank has raised, to end what cannot look for itself.
        """
        if self._of is not None and self._of() is of and self._pid == os.getpid():
            return
        with self._lock:
            self._of = weakref.ref(of, self._left)
            self._store, self._rank, self._world, self._abort = store, rank, world, abort
            self.raised, self._calls = None, 0
            if self._pid != os.getpid():  # the first time in this process
                self._pid = os.getpid()
                self._start_thread()
                atexit.register(self._exit, self._pid)
                sys.excepthook = _Hook(self, sys.excepthook)
        record.tell(rank=rank, world=world, pid=os.getpid(), host=socket.gethostname(), started=time.time())
        try:
            folder = records_folder()
            if folder is not None:
                record.keep_in(folder, rank)
        except OSError as error:
            told = (
                f"the flight record is in memory only: {error}; set FLATSHARD_RECORD to a folder that can be written to"
            )
            warnings.warn(told, stacklevel=2)

    def _left(self, of: weakref.ref[Any]) -> None:
        """The process group is no more. If it was an error that ended it, it says so with its last breath."""
        if of is not self._of:
            return
        error = sys.exc_info()[1]
        if self._pid == os.getpid() and isinstance(error, Exception) and not isinstance(error, PeerError):
            self._tell_others(f"{type(error).__name__}: {_line(error)}")
        self._store = self._of = None

    def post(self, text: str) -> None:
        """Let the other ranks know what ends this one, unless one of them was first."""
        record.tell(error=text)
        self._tell_others(text)

    def _tell_others(self, text: str) -> None:
        if self._store is not None:
            try:
                self._store.compare_set(_key("raised"), "", f"{self._rank} {text}")
            except RuntimeError as error:
                # The process is ending already, and its own error is what its user must see.
                _log.error("flatshard: the other ranks could not be told: %s", _line(error))

    def explain(self, what: str, error: BaseException) -> PeerError:
        """Why a wait for a collective ended early. Asks the other ranks, for a few seconds."""
        self._calls += 1
        if self._store is None:
            return PeerError(f"{what}: {_line(error)}")
        answers = ""
        try:
            self._store.set(_key(f"roll/{self._calls}/{self._rank}"), what)
            absent = self._absent()
            if not absent and self.raised is None:
                answers = self._answers()
        except RuntimeError:
            absent = None
        if self.raised is not None:
            return PeerError(f"{self.raised}. Rank {self._rank} was waiting for {what}")
        if absent is None:
            who = "The store that ranks meet at is gone too: the rank or the agent that kept it has ended"
        elif absent:
            names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
            who = f"No answer from rank {names}: ended, crashed, or busy with something else"
        else:
            who = f"All ranks answer: {answers}"
        where = f"; `flatshard blame {record.folder}` compares the ranks' records" if record.folder else ""
        return PeerError(f"rank {self._rank} was waiting for {what}: {_line(error)}. {who}{where}")

    def outwait(self, work: Any, what: Callable[[], str], error: RuntimeError) -> None:
        """A wait for work has ended with an error. Goes on waiting if it was only impatient, else says why."""
        if _WITHOUT_LIMIT in str(error):
            work.wait()
            return
        has_ended = False
        while True:
            if _is_of_handler(error, work):
                raise error
            if has_ended:
                raise self.explain(what(), error) from error
            if self.raised is not None:
                self._gave_up = True
                raise PeerError(f"{self.raised}. Rank {self._rank} was waiting for {what()}")
            has_ended = work.is_completed()  # asked first: what ends while it is waited for may have ended well
            try:
                work.wait(PATIENCE)
                return
            except RuntimeError as again:
                error = again

    def _absent(self) -> list[int]:
        """Ranks that have not answered within the grace period, or fewer seconds if the reason is known."""
        until = time.monotonic() + GRACE
        others = [rank for rank in range(self._world) if rank != self._rank]
        while time.monotonic() < until:
            self._look()
            if self.raised is not None or self._answered(others):
                return []
            time.sleep(0.1)
        return self._silent(others)

    def _answered(self, ranks: Sequence[int]) -> bool:
        return bool(self._store.check([_key(f"roll/{self._calls}/{rank}") for rank in ranks]))

    def _answers(self) -> str:
        """What others wait for, of those who are not too many to ask."""
        said = {}
        for rank in range(min(self._world, 16)):
            said[rank] = self._store.get(_key(f"roll/{self._calls}/{rank}")).decode(errors="replace")
        return "; ".join(f"rank {rank} waits for {what}" for rank, what in said.items())

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Those who have not answered. Of thousands, few ever have not."""
        if not ranks or self._answered(ranks):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return self._silent(ranks[:half]) + self._silent(ranks[half:])

    def _look(self) -> None:
        """See whether another rank has raised."""
        store = self._store
        if store is None or self.raised is not None or not store.check([_key("raised")]):
            return
        rank, _, text = store.get(_key("raised")).decode(errors="replace").partition(" ")
        if int(rank) != self._rank:
            self.raised = f"rank {rank} raised {text}"

    # The thread

    def _start_thread(self) -> None:
        inside, outside = socket.socketpair()
        inside.setblocking(False)
        outside.setblocking(False)
        self._wake = outside
        if threading.current_thread() is threading.main_thread() and _is_free(signal.SIGUSR1):
            before = signal.set_wakeup_fd(outside.fileno(), warn_on_full_buffer=False)
            if before == -1:
                signal.signal(signal.SIGUSR1, _leave_to_watch)
            else:  # somebody's event loop: then a dump waits until Python runs
                signal.set_wakeup_fd(before)
                signal.signal(signal.SIGUSR1, lambda *_: self._dump())
        self._thread = threading.Thread(target=self._watch, args=(inside,), name="flatshard-watch", daemon=True)
        self._thread.start()

    def _watch(self, inside: socket.socket) -> None:
        selector = selectors.DefaultSelector()
        selector.register(inside, selectors.EVENT_READ)
        seen, idle = 0, 0
        while True:
            if selector.select(_TICK * max(1.0, self._world / 512)):
                woken = inside.recv(4096)
                if b"\0" in woken:
                    return
                if bytes([signal.SIGUSR1]) in woken and signal.getsignal(signal.SIGUSR1) is _leave_to_watch:
                    self._dump()
            idle = idle + 1 if record.number == seen else 0
            seen = record.number
            if idle == _STALLED and seen:
                record.settle(unasked=True)
            told = self.raised
            try:
                self._look()
            except RuntimeError:
                self._store = None  # it went away with the rank that kept it
                continue
            if told is None and self.raised is not None:
                self._abort()

    def _dump(self) -> None:
        path = record.dump()
        print(record.told(), file=sys.stderr)
        if path is not None:
            print(f"flatshard: written to {path}", file=sys.stderr)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        sys.stderr.flush()

    def _exit(self, pid: int) -> None:
        """The last thing that this process does in Python."""
        if pid != os.getpid():
            return
        self._stop_thread()
        self._of = None  # a process group that nobody has destroyed goes with the modules, when `_left` has none
        if "error" in record.header:
            if self._gave_up or record.is_pending():
                # Its process groups would wait for what will never end, until their time-out, before it is gone.
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            return
        folder = record.folder
        record.forget()
        if folder is not None and "FLATSHARD_RECORD" not in os.environ:
            with contextlib.suppress(OSError):  # other ranks have records there, or have just removed it
                folder.rmdir()

    def _stop_thread(self) -> None:
        """A thread that comes back from the store to an interpreter that is gone would abort the process."""
        if self._wake is not None and self._thread is not None:
            self._wake.send(b"\0")
            self._thread.join(_TICK)


class _Hook:
    """In the place of ``sys.excepthook``: tells the other ranks, and what was launched last."""

    def __init__(self, alarm: Alarm, before: Callable[..., Any]) -> None:
        self._alarm, self._before = alarm, before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._alarm._pid == os.getpid() and self._alarm._world > 1:
            text = f"{kind.__name__}: {_line(error)}"
            if isinstance(error, PeerError):
                record.tell(error=text)
            else:
                self._alarm.post(text)
            if self._alarm.raised is not None and not isinstance(error, PeerError):
                _log.error("flatshard: %s", self._alarm.raised)
            path = record.dump() if record.number else None
            if path is not None:
                _log.error("%s\nflatshard: written to %s", record.told(), path)
        self._before(kind, error, trace)


PATIENCE = timedelta(seconds=1)  # of one wait for work; then it is seen whether another rank has raised
alarm = Alarm()  # of this process


def records_folder() -> Path | None:
    """Where the ranks of this job keep their records: FLATSHARD_RECORD, or a folder of this user's and this job's.

    None if that is ``off``: then they are in memory only.
    """
    given = os.environ.get("FLATSHARD_RECORD")
    if given == "off":
        return None
    if given:
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    job = "-".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    job = "".join(c if c.isalnum() or c in "-." else "_" for c in job).strip("-") or str(os.getpid())
    mine = Path(tempfile.gettempdir()) / f"flatshard-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid():
        raise PermissionError(f"{mine} belongs to another user; set FLATSHARD_RECORD to a folder of your own")
    folder = mine / job
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _leave_to_watch(number: int, frame: object) -> None:
    """In the place of a handler: the watch has been woken already."""


def _is_free(number: int) -> bool:
    """Whether nobody handles a signal: no function of Python's, and none of C's, as `faulthandler` has."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    action = ctypes.create_string_buffer(256)  # a struct sigaction begins with its handler, and is smaller than this
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None)
    if sigaction is None or sigaction(int(number), None, action) != 0:
        return False
    return not any(action.raw[: ctypes.sizeof(ctypes.c_void_p)])


def _is_of_handler(error: RuntimeError, work: Any) -> bool:
    """Whether it was not a wait that raised, but a handler of a signal that came meanwhile, as DataLoader's does."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return trace is not None and trace.tb_frame.f_code is not getattr(type(work).wait, "__code__", None)


def _line(error: BaseException) -> str:
    """What an error says, on one line, and not at length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else f"{text[:600]}..."
