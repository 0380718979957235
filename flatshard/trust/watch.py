"""One rank's watch over one process group: it notifies the other ranks of its end, and receives theirs."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flatshard.trust.links import Links, Message
from flatshard.trust.loop import TICK, Loop
from flatshard.trust.record import Entry, parse_ranges, record

_log = logging.getLogger("flatshard")

GRACE = 3.0  # seconds that others have to say why a wait has failed
_FIRST_RETRY = 0.05  # seconds between the first two attempts to find the others; then twice as many, up to a tick
_NOTICE = 0.2  # seconds in which a launcher notices the end of a process; torchrun looks every tenth of a second
_FAREWELL = 5.0  # seconds that the rank which has the store waits for the others to end


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
    """What a rank knows of the end of its job.

    The first reason counts, because later ones follow from it. But a rank that is gone may have done all it had to: it
    is no reason for what comes after the grace period, unless this rank waits for it.
    """

    def __init__(self, grace: float = 5.0) -> None:
        self.reason: str | None = None  # what has ended another rank, or is to end this one
        self.is_failure = False  # the job is over
        self.explanation = ""  # why a call of torch's has failed, for the last words of this process
        self.culprit: int | None = None  # the rank that failed, if it is another one
        self.gone: set[int] = set()  # ranks whose processes have ended without a goodbye
        self._lost: list[int] = []  # those of them that are the reason
        self._grace, self._since = grace, 0.0

    def add(self, reason: str, is_failure: bool = True, by: int | None = None) -> None:
        """The job cannot continue. ``by``: the rank that is the reason, if it is another one."""
        if not self.is_current():
            self._since, self.reason, self.culprit, self._lost = time.monotonic(), reason, by, []
        self.is_failure = self.is_failure or is_failure

    def add_lost(self, rank: int) -> None:
        """A process has ended without a goodbye, perhaps together with others, as those of a node do."""
        if rank in self.gone:
            return  # by a message and by this rank's own connection
        is_new = not self.is_current()
        self.gone.add(rank)
        if is_new:
            self._since, self.culprit, self._lost = time.monotonic(), rank, []
        elif not self._lost:
            return
        self._lost.append(rank)
        self.reason = f"rank {self._lost[0]} ended without a message: it was killed or crashed"
        self.reason += f", then rank {_listed(self._lost[1:])}" if self._lost[1:] else ""

    def pause_grace(self) -> None:
        """Let this rank run without a time limit: its process group is gone, and the user decides what follows."""
        self._since = math.inf

    def resume_grace(self) -> None:
        self._since = min(self._since, time.monotonic())

    def must_end(self, waits: bool) -> bool:
        """Whether this rank has to end now, since it has not ended by itself. ``waits``: for what it has launched."""
        if self.reason is None or time.monotonic() - self._since <= self._grace:
            return False
        return self.is_failure or (waits and self.ends_wait())

    def is_current(self) -> bool:
        """Whether what ends this rank now is the reason that is known, or follows from it."""
        if self.reason is None:
            return False
        return self.is_failure or time.monotonic() - self._since <= self._grace or self.ends_wait()

    def ends_wait(self) -> bool:
        """Whether a launch of this rank will not end: a rank that takes part in it is gone, or is the reason."""
        missing = {*self.gone, self.culprit}
        return any(not missing.isdisjoint(parse_ranges(entry.group.split()[-1])) for entry in record.pending())

    def error(self, what: str) -> PeerError:
        """The error to raise at a launch or a wait. ``what``: that launch or wait."""
        oldest = record.oldest_pending() if record.is_on_device else None
        return record_error(PeerError(f"{self.reason}. Rank {record.header['rank']} was waiting for {oldest or what}"))


@dataclass(frozen=True)
class Watched:
    """The process group that is watched.

    ``store``: opens a separate connection to the store of the group, with a prefix. ``is_lost_peer``: whether an
    exception means that another rank is gone. ``settle_in``: a thread that queries CUDA events calls it once before.
    ``place``: where the ranks have met, the same text on all of a host.
    """

    store: Callable[[str], Any]
    kept: Any  # what keeps the store of all ranks alive, on the rank whose process has it; else None
    rank: int
    world: int
    is_lost_peer: Callable[[BaseException], bool] = lambda error: False
    settle_in: Callable[[], None] = lambda: None
    place: str = ""


class Survey:
    """The answers to the last question, from whichever rank it came, and this rank's own answer.

    If one rank waits for a collective that does not end, all do. Questions within a few seconds count as one, which
    each rank answers once.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.waits_for = ""  # what this rank waits for on the CPU, if that wait has failed
        self._others = set(range(world)) - {rank}
        self._states: dict[int, str] = {}
        self._left: set[int] = set()  # ranks that have ended well
        self._asked = -GRACE  # when

    def begin(self) -> bool:
        """A rank asks. Returns whether this is a new question, which drops earlier answers."""
        now = time.monotonic()
        if now - self._asked < GRACE:
            return False
        self._asked = now
        self._states.clear()
        return True

    def hear(self, message: Message) -> None:
        """An answer or a goodbye was received."""
        self._left.update(message.get("left", ()), message.get("gone", ()))
        if "state" in message:
            self._states[message["rank"]] = message["state"]

    def is_complete(self) -> bool:
        return self._others <= self._states.keys() | self._left

    def own_state(self) -> str:
        if self.waits_for:
            return f"waits for {self.waits_for}"
        entry, last = record.oldest_pending(), record.last()
        if entry is not None:
            return f"waits for {entry}"
        return "has launched nothing yet" if last is None else f"has launched nothing since {last}"

    def summary(self) -> str:
        """The answers of other ranks, and which ranks have ended or have not answered."""
        states, left = dict(self._states), self._others & self._left
        silent = sorted(self._others - states.keys() - left)
        sentences = [f"rank {rank} {state}" for rank, state in sorted(states.items())][:16]
        if left:
            sentences.append(f"rank {_listed(sorted(left))} has ended")
        if silent:
            sentences.append(f"no answer from rank {_listed(silent)}: it is stopped or cannot be reached")
        text = "; ".join(sentences)
        return text[:1].upper() + text[1:]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


class Watch:
    """The watch over one process group. ``name``: the key in the store by which the ranks find each other."""

    def __init__(self, group: Watched, name: str, loop: Loop, verdict: Verdict) -> None:
        self.group, self.verdict = group, verdict
        self._name, self._loop = name, loop
        self._links: Links | None = None
        self._survey = Survey(group.rank, group.world)
        self._retry_after = _FIRST_RETRY

    # Connections

    def open(self) -> None:
        """Connect to the neighbours, on the thread of the loop."""

        def connect() -> None:
            try:
                store = self.group.store(self._name)
                self._links = Links(store, self.group.rank, self.group.world, self._loop.selector, self._hear)
                self._links.open()
            except (OSError, RuntimeError) as error:
                _log.warning("flatshard: ranks are not connected; only time-outs show a failed rank: %s", error)

        self._loop.do(connect)

    def close(self, wait: float = GRACE) -> None:
        """Say goodbye, and wait for at most this many seconds until it is sent."""

        def disconnect() -> None:
            links, self._links = self._links, None
            if links is not None:
                links.close()

        self._loop.do(disconnect, wait)

    def outlive_group(self) -> None:
        """Keep the connections, but not the store; what other ranks do is no longer this rank's concern."""
        self.verdict = Verdict()
        self.group = replace(self.group, kept=None)
        self._loop.do(lambda: self._links.forget_store() if self._links is not None else None, GRACE)

    def drop(self) -> None:
        """In a forked process: the connections belong to the parent."""
        if self._links is not None:
            self._links.drop()
            self._links = None

    def await_others(self) -> None:
        """Wait for other ranks to end first: this rank hosts the store, and their threads log errors without it."""
        until = time.monotonic() + _FAREWELL
        while self.group.kept is not None and time.monotonic() < until:
            if self._links is None or not self._links.is_connected() or self.verdict.reason is not None:
                return
            time.sleep(0.02)

    def await_culprit(self) -> None:
        """Let the rank that failed end first: torchrun calls the first one the root cause, and ends the others."""
        until, verdict = time.monotonic() + GRACE, self.verdict
        while verdict.culprit is not None and time.monotonic() < until:
            links = self._links
            if links is None or verdict.culprit in verdict.gone | links.left:
                time.sleep(_NOTICE)
                return
            time.sleep(0.02)

    def pause(self) -> float:
        """The longest time to sleep, in seconds. Looks for ranks that have not connected yet."""
        self._retry_after = _FIRST_RETRY if self._find_others() else min(2 * self._retry_after, TICK)
        return TICK if self._retry_after == _FIRST_RETRY else self._retry_after

    def _find_others(self) -> bool:
        """Whether all neighbours have connected. Until then, a rank that ends leaves its message in the store."""
        links = self._links
        if links is None or not links.reads_store():  # which is read once more when all have connected
            return True
        try:
            links.connect_to_parent()
            message = links.stored("raised")
        except RuntimeError:
            links.forget_store()  # it went away with the rank that kept it
            return True
        if message is not None:
            rank, _, text = message.partition(" ")
            if int(rank) != self.group.rank:
                self.verdict.add(f"rank {rank} raised {text}", by=int(rank))
        if links.are_complete():
            links.forget_store()
        return links.are_complete()

    # Messages

    def tell(self, text: str, is_failure: bool = True) -> None:
        """Notify the other ranks of the end of this one. If it is no failure, only ranks that wait for this one end."""

        def send() -> None:
            if self._links is not None:
                self._links.tell({"raised": text, "rank": self.group.rank, "is_failure": is_failure})
            if not is_failure or self._links is None or self._links.are_complete():
                return
            try:  # those who connect later find it there
                self.group.store(self._name).compare_set("raised", "", f"{self.group.rank} {text}")
            except RuntimeError as error:
                # The process is ending already, and its own error is what its user must see.
                _log.error("flatshard: could not notify the other ranks: %s", one_line(error))

        self._loop.do(send, wait=GRACE)

    def _hear(self, message: Message) -> None:
        """A message of another rank, on the thread of the loop."""
        if "raised" in message:
            by = int(message["rank"])
            self.verdict.add(f"rank {by} raised {message['raised']}", bool(message["is_failure"]), by)
        elif "lost" in message:
            self.verdict.add_lost(int(message["lost"]))
        is_new = "ask" in message and self._survey.begin()
        self._survey.hear(message)
        if is_new:
            self._answer({})

    def _answer(self, question: Message) -> None:
        """Send what this rank waits for, which ranks have said goodbye to it, and its own question, if any."""
        if self._links is not None:
            gone = {"gone": sorted(self._links.left)} if self._links.left else {}
            answer = {"state": self._survey.own_state(), "rank": self.group.rank}
            self._links.tell({**question, **answer, **gone})

    # Failed waits

    def explain(self, what: str, error: BaseException) -> PeerError:
        """Why a wait for a collective ended early. Asks the other ranks, for a few seconds."""
        if self._links is None:
            return record_error(PeerError(f"rank {self.group.rank} was waiting for {what}: {one_line(error)}"))
        self._survey.waits_for = what
        others = self._ask()
        if self.verdict.is_current():
            return self.verdict.error(what)
        where = f"; `flatshard blame {record.folder}` compares the ranks' records" if record.folder else ""
        text = f"rank {self.group.rank} was waiting for {what}: {one_line(error)}. {others}"
        self.tell(f"PeerError: {text}")  # a rank that is busy with something else has to end too
        return record_error(PeerError(text + where))

    def time_out(self, entry: Entry, limit: float) -> None:
        """A collective has timed out. Not called on the thread of the loop, which receives the answers."""
        record.tell(timed_out=entry.number)
        self.fail(f"{entry} has not ended within {limit:g} s, the time-out of its process group")

    def fail(self, reason: str) -> None:
        """End all ranks. Not called on the thread of the loop either."""
        self.verdict.add(f"{reason}. {self._ask()}")
        self.tell(f"PeerError: {self.verdict.reason}")

    def _ask(self) -> str:
        """Ask the other ranks what they do. Returns early if the reason for a failure becomes known."""

        def send() -> None:
            if self._survey.begin():
                self._answer({"ask": self.group.rank})

        began = time.monotonic()
        self._loop.do(send)
        while not self.verdict.is_current() and time.monotonic() < began + GRACE and not self._survey.is_complete():
            time.sleep(0.05)
        return self._survey.summary()
