"""Ranks tell each other what ends them, so that no rank waits for one that will not come.

A rank with an uncaught exception says so to all others (`links`), and a rank whose process is gone is missed by those
that are connected to it. A rank that was told raises `PeerError` at its next launch or wait. If its main thread does
not come to one, because it sits in a call of CUDA, NCCL or the operating system, or if it has caught that error and
is still there, the watch thread ends the process after a grace period, with the same words. Of a process that is gone
without a word only those are told who wait for it: it may have done all it had to.

The watch thread also ends a rank whose collective on a GPU has not ended after the time-out of its process group, and
writes the flight record to disk and to stderr on SIGUSR1.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import util
from types import TracebackType
from typing import Any, NoReturn

from flatshard.trust.links import Links, Message
from flatshard.trust.loop import Loop
from flatshard.trust.record import in_range, record, records_folder
from flatshard.trust.uncaught import Uncaught

_log = logging.getLogger("flatshard")

_TICK = 1.0  # seconds between two looks at the record
_HASTE = 0.05  # seconds between the first two attempts to find the others; then twice as many, up to a tick
_STALLED = 3  # looks without a launch after which the record is settled
GRACE = 3.0  # seconds that others have to say why a wait has failed
_FAREWELL = 5.0  # seconds that the rank which has the store waits for the others to end
_LINGER = (
    1.0  # seconds for which a process that ends with an error keeps NCCL's threads, which have to send, and to log
)


class PeerError(RuntimeError):
    """A collective did not end, because of another rank or of the network. Says which launch, and who, if known."""


def grace() -> float:
    """Seconds that a rank has, once it was told of another's end, to end by itself: ``FLATSHARD_GRACE``, or 5."""
    given = os.environ.get("FLATSHARD_GRACE", "")
    try:
        return float(given) if given else 5.0
    except ValueError:
        raise ValueError(f"FLATSHARD_GRACE={given!r}: must be a number of seconds") from None


@dataclass(frozen=True)
class Watched:
    """The process group that an alarm is for.

    ``store``: a connection of one's own to the store of the group, with a prefix. ``is_lost_peer``: whether an
    exception says that another rank is gone. ``settle_in``: a thread that asks for CUDA events calls it once before.
    """

    store: Callable[[str], Any]
    kept: Any  # what keeps the store of all ranks alive, on the rank whose process has it; else None
    rank: int
    world: int
    is_lost_peer: Callable[[BaseException], bool] = lambda error: False
    settle_in: Callable[[], None] = lambda: None


class Alarm:
    """Of one process. `start` it once there is a process group; with another one it starts anew.

    It ends with the process group, whose store it must not keep: ranks could not meet at that port again.
    """

    def __init__(self) -> None:
        self.raised: str | None = None  # what has ended another rank, or is to end this one
        self.is_failure = False  # and the job is over: a process that is gone may have done all it had to
        self._lost = -1  # a rank that is gone; those who wait for it are to end
        self._group: Watched | None = None
        self._of: weakref.ref[Any] | None = None
        self._links: Links | None = None
        self._ended_at = 0.0  # when `raised` was set
        self._grace = 5.0
        self._states: dict[int, str] = {}  # what other ranks said they do, the last time that one of them asked
        self._left: set[int] = set()  # ranks that have ended well
        self._waits_for = ""  # of a wait on the CPU that has failed
        self._stuck, self._stuck_for = 0, 0.0  # the oldest launch that has not ended, and for how long it has been that
        self.gave_up = False  # something is waited for no more, and has not ended
        self._pid = 0
        self._has_left = False  # Python is about to end
        self._explained = ""  # why a call of torch's has failed
        self._loop: Loop | None = None
        self._haste = _HASTE
        self._seen, self._idle = 0, 0  # launches, and ticks without one
        self._has_settled_in = False
        self._starts = 0
        self._uncaught = Uncaught(self._torch_gives_up)

    # Beginning and end

    def start(self, of: Any, group: Watched) -> None:
        """Watch over a process group. ``of``: an object that lives as long as it, and is not kept here.

        ``FLATSHARD_ALARM=off``: record what is launched, and do nothing else.
        """
        if self._of is not None and self._of() is of and self._pid == os.getpid():
            return
        is_on = os.environ.get("FLATSHARD_ALARM", "").lower() not in ("off", "0")
        self._of = weakref.ref(of, self._group_is_gone if is_on else None)
        self._group, self._grace = group, grace()
        self._reset()
        self._starts += 1
        if is_on and (self._loop is None or self._pid != os.getpid()):  # the first time in this process
            self._loop = Loop(self._tick, self._pause, self._dump)
            self._loop.start()
            os.register_at_fork(after_in_child=self._drop_links)
            atexit.register(self._exit, os.getpid())
            # Processes of multiprocessing end without atexit.
            util.Finalize(None, self._exit, (os.getpid(),), exitpriority=1)
            if not isinstance(sys.excepthook, _Hook):
                sys.excepthook = _Hook(self, sys.excepthook)
            self._uncaught.install()
        self._pid = os.getpid()
        record.header.pop("error", None)
        record.tell(rank=group.rank, world=group.world, pid=os.getpid(), host=socket.gethostname(), started=time.time())
        try:
            folder = records_folder()
            if folder is not None:
                record.keep_in(folder, group.rank)
        except OSError as error:
            told = (
                f"the flight record is in memory only: {error}; set FLATSHARD_RECORD to a folder that can be written to"
            )
            warnings.warn(told, stacklevel=2)
        if is_on:
            self._open_links(group)

    def _reset(self) -> None:
        self.raised, self._waits_for, self._explained, self.gave_up = None, "", "", False
        self.is_failure, self._lost = False, -1
        self._states, self._left = {}, set()

    def _open_links(self, group: Watched) -> None:
        loop = self._loop
        assert loop is not None

        def begin() -> None:
            self._close_links()
            try:
                self._links = Links(group.store(self._name), group.rank, group.world, loop.selector, self._hear)
                self._links.open()
            except (OSError, RuntimeError) as error:
                _log.warning("flatshard: ranks cannot tell each other what ends them, but by time-outs: %s", error)

        loop.do(begin)

    @property
    def _name(self) -> str:
        """In the store. torchrun keeps that when it starts ranks again: what those before them said is not for them.

        Nodes count restarts each for itself. Where they differ, ranks are not connected, and find out by their waits.
        """
        return f"flatshard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self._starts}"

    def _group_is_gone(self, of: weakref.ref[Any]) -> None:
        """The process group is no more. If it was an error that ended it, the others are told."""
        group = self._group
        if of is not self._of or self._pid != os.getpid() or group is None:
            return
        error = sys.exc_info()[1]
        if error is None:
            self._await_others()
            self._reset()
        elif group.is_lost_peer(error):
            self._explain(error)
        elif isinstance(error, Exception) and not isinstance(error, PeerError):
            self._tell_others(f"{type(error).__name__}: {_line(error)}")
        self._ended_at = math.inf  # what comes now is up to the user
        self._of = self._group = None
        self._do(self._close_links, wait=GRACE)

    def _await_others(self) -> None:
        """The store ends with this rank, and threads of others that ask it complain: let them end first."""
        until = time.monotonic() + _FAREWELL
        while self._group is not None and self._group.kept is not None and time.monotonic() < until:
            if self._links is None or not self._links.are_there() or self.raised is not None:
                return
            time.sleep(0.02)

    def _close_links(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()

    def _drop_links(self) -> None:
        if self._links is not None:
            self._links.drop()
            self._links = None

    # What ranks tell each other

    def post(self, text: str) -> None:
        """Let the other ranks know what ends this one."""
        record.tell(error=text)
        self._tell_others(text)

    def _tell_others(self, text: str) -> None:
        group = self._group
        if group is None:
            return

        def tell() -> None:
            if self._links is not None:
                self._links.tell({"raised": text, "rank": group.rank})
                if not self._links.are_complete():  # those who connect later find it there
                    self._leave_in_store(group, text)

        self._do(tell, wait=GRACE)

    def _leave_in_store(self, group: Watched, text: str) -> None:
        try:
            group.store(self._name).compare_set("raised", "", f"{group.rank} {text}")
        except RuntimeError as error:
            # The process is ending already, and its own error is what its user must see.
            _log.error("flatshard: the other ranks could not be told: %s", _line(error))

    def _hear(self, message: Message) -> None:
        """A message of another rank, on the watch thread."""
        if "raised" in message:
            self._is_over(f"rank {message['rank']} raised {message['raised']}")
        elif "lost" in message:
            if self.raised is None:
                self._lost = int(message["lost"])
            lost = f"rank {message['lost']} has ended without a word: it was killed, or has crashed"
            self._is_over(lost, is_failure=False)
        elif "left" in message:
            self._left.add(message["left"])
        elif "state" in message:
            self._states[message["rank"]] = message["state"]
        elif "ask" in message and self._links is not None and self._group is not None:
            self._states.clear()
            self._links.tell({"state": self._state(), "rank": self._group.rank})

    def _is_over(self, why: str, is_failure: bool = True) -> None:
        """The job cannot go on. The first reason counts: others follow from it."""
        if self.raised is None:
            self._ended_at, self.raised = time.monotonic(), why
        self.is_failure = self.is_failure or is_failure

    def _state(self) -> str:
        """What this rank does, as others are told who ask."""
        if self._waits_for:
            return f"waits for {self._waits_for}"
        entry = record.oldest_open()
        if entry is not None:
            return f"waits for {entry}"
        last = record.last()
        return "has launched nothing yet" if last is None else f"has launched nothing since {last}"

    # Waits

    def error(self, what: str) -> PeerError:
        """For a rank that was told, and comes to a launch or a wait."""
        oldest = record.oldest_open() if record.is_on_device else None
        return _recorded(PeerError(f"{self.raised}. Rank {record.header['rank']} was waiting for {oldest or what}"))

    def explain(self, what: str, error: BaseException) -> PeerError:
        """Why a wait for a collective ended early. Asks the other ranks, for a few seconds."""
        group = self._group
        if group is None or self._links is None:
            return PeerError(f"{what}: {_line(error)}")
        self._waits_for = what
        who = self._others(group)
        if self.raised is not None:
            return self.error(what)
        return _recorded(PeerError(_told(group, what, _line(error), who)))

    def _explain(self, error: BaseException) -> None:
        """A call of torch's has raised because of another rank: find out why, for the last words of this one."""
        self._explained = str(self.explain(str(record.oldest_open() or record.last() or "a collective"), error))

    def _others(self, group: Watched) -> str:
        """What the other ranks do. Returns early if the reason for a failure comes to be known."""
        others = set(range(group.world)) - {group.rank}
        asked = time.monotonic()
        self._do(self._ask)
        while (
            self.raised is None and time.monotonic() < asked + GRACE and not others <= self._states.keys() | self._left
        ):
            time.sleep(0.05)
        return self._told_of(others)

    def _ask(self) -> None:
        self._states.clear()
        if self._links is not None and self._group is not None:
            self._links.tell({"ask": self._group.rank})

    def _told_of(self, others: set[int]) -> str:
        states, left = dict(self._states), others & self._left
        silent = sorted(others - states.keys() - left)
        said = [f"rank {rank} {state}" for rank, state in sorted(states.items())][:16]
        if left:
            said.append(f"rank {_names(sorted(left))} has ended")
        if silent:
            said.append(f"no answer from rank {_names(silent)}: stopped, or cut off")
        return "; ".join(said)

    # What the loop looks at

    def _do(self, action: Callable[[], None], wait: float = 0.0) -> None:
        if self._loop is not None:
            self._loop.do(action, wait)

    def _tick(self, seconds: float) -> None:
        if record.is_on_device and not self._has_settled_in and self._group is not None:
            self._group.settle_in()
            self._has_settled_in = True
        self._idle = self._idle + 1 if record.number == self._seen else 0
        self._seen = record.number
        if self._idle == _STALLED and self._seen:
            record.settle()
        # What was stopped meanwhile, this process or the machine, does not count as waiting.
        self._look_for_time_outs(min(seconds, 2 * _TICK))
        is_due = self.raised is not None and time.monotonic() - self._ended_at > self._grace
        if is_due and (self.is_failure or self._waits_for_lost()):
            self._end()

    def _waits_for_lost(self) -> bool:
        """Whether the oldest launch that has not ended, on a GPU, is among ranks of which one is gone."""
        entry = record.oldest_open() if record.is_on_device else None
        return entry is not None and self._lost in in_range(entry.group.split()[-1])

    def _pause(self) -> float:
        self._haste = _HASTE if self._find_others() else min(2 * self._haste, _TICK)
        return _TICK if self._haste == _HASTE else self._haste

    def _find_others(self) -> bool:
        """Whether there is nobody left to find. Until then, what those say who cannot wait for it is in the store."""
        links = self._links
        if links is None or links.are_complete():
            return True
        try:
            links.seek()
            said = links.said("raised")
        except RuntimeError:
            links.forget_store()  # it went away with the rank that kept it
            return True
        if said is not None and self._group is not None:
            rank, _, text = said.partition(" ")
            if int(rank) != self._group.rank:
                self._is_over(f"rank {rank} raised {text}")
        if links.are_complete():
            links.forget_store()
        return links.are_complete()

    def _look_for_time_outs(self, seconds: float) -> None:
        """Counts how long the oldest launch on a device has been that; beyond its limit the job is over."""
        if not record.is_on_device or self.raised is not None or self._group is None:
            return
        entry = record.oldest_open()
        if entry is None or entry.number != self._stuck:
            self._stuck, self._stuck_for = 0 if entry is None else entry.number, 0.0
            return
        self._stuck_for += seconds
        limit = record.limit(entry)
        if limit is not None and self._stuck_for >= limit:
            threading.Thread(target=self._time_out, args=(str(entry), entry.number, limit), daemon=True).start()
            self._stuck_for = 0.0

    def _time_out(self, what: str, number: int, limit: float) -> None:
        """A collective has timed out. On a thread of its own, since the answers of others come to the watch."""
        record.tell(timed_out=number)
        group = self._group
        if group is not None:
            late = f"{what} has not ended within {limit:g} s, the time-out of its process group"
            self._is_over(f"{late}. {_sentence(self._others(group))}")
            self._tell_others(f"PeerError: {self.raised}")

    def _torch_gives_up(self, is_distributed: bool) -> None:
        """A C++ exception would abort the process now: of torch's own watchdog of NCCL, or of some other code."""
        if self._pid != os.getpid():
            return
        until = time.monotonic() + (GRACE if is_distributed else _TICK)
        while self.raised is None and time.monotonic() < until:
            time.sleep(0.05)  # what ended another rank says so, or is missed
        if self.raised is None and not is_distributed:
            return
        self._is_over("NCCL reports an error, which torch has logged above")
        self.is_failure = True
        self._ended_at = min(self._ended_at, time.monotonic())
        while True:
            time.sleep(60)  # the main thread ends the process, or the watch does

    # The end of the process

    def _end(self) -> None:
        """The main thread has not come to where it could raise."""
        rank = record.header["rank"]
        entry, frame = record.oldest_open(), sys._current_frames().get(threading.main_thread().ident or 0)
        waited = (
            f"Rank {rank} was waiting for {entry}"
            if entry is not None
            else f"Rank {rank} was waiting for no collective"
        )
        record.tell(error=f"PeerError: {self.raised}. {waited}")
        self._print_record()
        if frame is not None:
            print("flatshard: the main thread, the innermost call last:", file=sys.stderr)
            print("".join(traceback.format_stack(frame)[-4:]), end="", file=sys.stderr)
        where = f"; `flatshard blame {record.folder}` compares the ranks' records" if record.folder else ""
        print(f"flatshard: rank {rank} ends: {self.raised}. {waited}{where}.", file=sys.stderr)
        leave(1)

    def _tell_of(self, error: BaseException | None) -> None:
        """Processes of multiprocessing catch the error that ends them: it is in flight when they exit."""
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        if isinstance(error, Exception) and "error" not in record.header:
            self.post(f"{type(error).__name__}: {_line(error)}")

    def _print_record(self) -> None:
        if record.number:
            path = record.dump()
            print(record.told(), file=sys.stderr)
            if path is not None:
                print(f"flatshard: written to {path}", file=sys.stderr)
            sys.stderr.flush()

    def _dump(self) -> None:
        self._print_record()
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        sys.stderr.flush()

    def _exit(self, pid: int) -> None:
        """The last thing that this process does in Python."""
        if self._has_left or pid != os.getpid():
            return
        self._has_left = True
        self._tell_of(sys.exc_info()[1])
        if "error" not in record.header:
            self._await_others()
        if self._loop is not None:
            if "error" not in record.header:  # else the others were told, or this rank was
                self._do(self._close_links, wait=GRACE)
            self._loop.stop()
        self._of = None  # a process group that nobody has destroyed goes with the modules
        if "error" in record.header and (self.gave_up or record.is_on_device or record.is_pending()):
            # Its process groups would wait for what will never end, until their time-out, before it is gone.
            logging.shutdown()
            if record.is_on_device:
                time.sleep(_LINGER)
                why = self._explained or record.header["error"]
                print(f"flatshard: rank {record.header['rank']} ends: {why}", file=sys.stderr)
            leave(1)
        self._uncaught.remove()
        if "error" in record.header:
            return
        folder = record.folder
        record.forget()
        if folder is not None and "FLATSHARD_RECORD" not in os.environ:
            with contextlib.suppress(OSError):  # other ranks have records there, or have just removed it
                folder.rmdir()


class _Hook:
    """In the place of ``sys.excepthook``: tells the other ranks, and what was launched last."""

    def __init__(self, alarm: Alarm, before: Callable[..., Any]) -> None:
        self._alarm, self._before = alarm, before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alarm = self._alarm
        if alarm._pid != os.getpid():
            self._before(kind, error, trace)
            return
        text = f"{kind.__name__}: {_line(error)}"
        if isinstance(error, PeerError):
            record.tell(error=text)
        elif alarm._group is not None and alarm._group.is_lost_peer(error):
            alarm._explain(error)
        elif not alarm._explained:
            alarm.post(text)
            if alarm.raised is not None:
                _log.error("flatshard: %s", alarm.raised)
        path = record.dump() if record.number else None
        if path is not None:
            _log.error("%s\nflatshard: written to %s", record.told(), path)
        self._before(kind, error, trace)


alarm = Alarm()  # of this process


def _recorded(error: PeerError) -> PeerError:
    """An error that is in the record from now on, whoever catches it: processes that meet it do not end well."""
    record.tell(error=f"PeerError: {error}")
    return error


def _told(group: Watched, what: str, why: str, others: str) -> str:
    where = f"; `flatshard blame {record.folder}` compares the ranks' records" if record.folder else ""
    return f"rank {group.rank} was waiting for {what}: {why}. {_sentence(others)}{where}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def leave(status: int) -> NoReturn:
    """End the process now: an orderly end would wait for process groups that wait for what will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _line(error: BaseException) -> str:
    """What an error says, on one line, and not at length."""
    text = " ".join(str(error).split()) or "(no message)"
    return text if len(text) <= 600 else f"{text[:600]}..."
