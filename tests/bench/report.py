"""The text a test failure shows: which rank failed first and how, and what the others were doing."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from .worker import Error


class RankError(Exception):
    """A body did not return on every rank. The message holds the tracebacks, exit codes and stacks, by rank."""


@dataclass(frozen=True)
class Died:
    """The process ended without an answer."""

    exitcode: int | None

    def __str__(self) -> str:
        if self.exitcode is not None and self.exitcode < 0:
            return f"died of {signal.Signals(-self.exitcode).name} (exit code {self.exitcode})"
        return f"died (exit code {self.exitcode})"


@dataclass(frozen=True)
class Cut:
    """The process was still running and was ended; `stack` is where it was."""

    stack: str

    def __str__(self) -> str:
        return "was still running"


def describe(name: str, world: int, replies: dict[int, Any], limit: float, *, finishing: bool) -> str:
    """The message for `replies`, which holds, in order of arrival, what became of every rank.

    Order: failures of a rank's own, first come first; deaths among them; ranks that were cut, with their stacks; ranks
    that only lost a peer, one line each; ranks that returned.
    """
    own = {r: e for r, e in replies.items() if isinstance(e, Died) or (isinstance(e, Error) and not e.lost_peer)}
    lost = {r: e for r, e in replies.items() if isinstance(e, Error) and e.lost_peer}
    if not own:
        # Nobody else is to blame: a lost connection is then the failure itself.
        own, lost = lost, {}
    cut = {r: e for r, e in replies.items() if isinstance(e, Cut)}
    rest = sorted(set(replies) - set(own) - set(lost) - set(cut))

    parts = [_headline(name, world, own, cut, limit, finishing)]
    parts += [_section(rank, world, event) for rank, event in [*own.items(), *sorted(cut.items())]]
    if lost:
        lines = [f"  rank {rank}: {event.headline}" for rank, event in sorted(lost.items())]
        parts.append("\n".join(["lost a peer, as a consequence:", *lines]))
    if rest:
        parts.append(f"{'cleaned up' if finishing else 'returned'}: rank {', '.join(map(str, rest))}")
    return "\n\n".join(parts)


def _headline(
    name: str, world: int, own: dict[int, Error | Died], cut: dict[int, Cut], limit: float, finishing: bool
) -> str:
    after = ", while leaving the process group after the body (a collective that was never waited for?)"
    where = after if finishing else ""
    if not own:
        ranks = ", ".join(map(str, sorted(cut)))
        return f"{name}: cut{where}, rank {ranks} of {world} did not return within the limit of {limit:g} s"
    rank, event = next(iter(own.items()))
    what = str(event) if isinstance(event, Died) else f"raised {event.headline}"
    return f"{name}: rank {rank} of {world} {what}{where}"


def _section(rank: int, world: int, event: Error | Died | Cut) -> str:
    title = f"---- rank {rank} of {world} "
    if isinstance(event, Error):
        return f"{title:-<100}\n{event.text.rstrip()}"
    if isinstance(event, Died):
        return f"{title:-<100}\n{event}"
    stack = _without_own_threads(event.stack) or "(it gave no stack: it was stopped, or gone by then)"
    return f"{title + 'was still running; its stack, innermost call first ':-<100}\n{stack}"


def _without_own_threads(stack: str) -> str:
    threads = [thread for thread in stack.strip().split("\n\n") if "in _leave_with_parent" not in thread]
    return "\n\n".join(threads)
