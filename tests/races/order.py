"""What happens before what: streams and events with vector clocks, and memory that remembers who touched it last.

A stream's clock says, for every stream, how many of its operations are over before the next operation of this one. An
event carries the clock of the stream that recorded it, and a stream that waits for the event takes that over. Nothing
else orders two streams: not that the host called one operation before the other.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import TypeAlias

Place: TypeAlias = "tuple[tuple[CodeType, int], ...]"  # lines of source, the innermost first
ROOT = Path(__file__).parents[2]


class Stream:
    """A queue of operations. Its attributes are those of a CUDA stream that lanes ask for."""

    device_index = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Stream, int] = {self: 0}

    def next(self) -> int:
        """The time of another operation."""
        self.clock[self] += 1
        return self.clock[self]

    def knows(self, clock: dict[Stream, int]) -> bool:
        """Whether what follows here comes after all that the clock knows of."""
        return all(self.clock.get(stream, 0) >= time for stream, time in clock.items())

    def join(self, clock: dict[Stream, int]) -> None:
        """Let it be so."""
        for stream, time in clock.items():
            if self.clock.get(stream, 0) < time:
                self.clock[stream] = time


@dataclass(eq=False, slots=True)
class Access:
    """One operation of a stream, as the memory sees it that it reads or writes."""

    stream: Stream
    time: int
    what: str
    place: Place
    writes: bool

    def is_before(self, stream: Stream) -> bool:
        """Whether it is over before what the stream does next."""
        return stream.clock.get(self.stream, 0) >= self.time

    def __str__(self) -> str:
        return f"{'writes' if self.writes else 'reads'} it by {self.what}\n{_lines(self.place)}"


@dataclass(slots=True)
class _Span:
    """The bytes from ``start`` to the next span: who wrote them last, and who has read them since."""

    start: int
    written: Access | None
    read: dict[Stream, Access] = field(default_factory=dict)


class Block:
    """Memory between its allocation and its return. It goes back to the stream that it was allocated for."""

    def __init__(self, size: int, arena: Arena, owner: Stream, made: Access | None) -> None:
        self.size = size
        self.arena = arena
        self.owner = owner
        self.made = made
        self.is_temporary = False  # must be kept until the current stream has waited for all that is done with it
        self._spans = [_Span(0, made)]

    def touch(self, start: int, stop: int, access: Access) -> list[Access]:
        """Note an access to some bytes; the earlier ones that it conflicts with and is not ordered after."""
        first, last = self._cut(start), self._cut(stop)
        found: dict[Access, None] = {}
        for span in self._spans[first:last]:
            if span.written is not None and not span.written.is_before(access.stream):
                found[span.written] = None
            if not access.writes:
                span.read[access.stream] = access
                continue
            for reader in span.read.values():
                if not reader.is_before(access.stream):
                    found[reader] = None
        if access.writes:
            self._spans[first:last] = [_Span(start, access)]
        return list(found)

    def last(self) -> list[Access]:
        """The accesses after which nobody has written."""
        last = [access for span in self._spans for access in (span.written, *span.read.values())]
        return list(dict.fromkeys(access for access in last if access is not None))

    def pending(self, stream: Stream) -> list[Access]:
        """The accesses that may still be going on when the stream goes on."""
        return [access for access in self.last() if not access.is_before(stream)]

    def _cut(self, at: int) -> int:
        """The index of the span that begins here, which is made if there is none."""
        spans = self._spans
        if at <= 0 or at >= self.size:
            return 0 if at <= 0 else len(spans)
        index = bisect.bisect_left(spans, at, key=lambda span: span.start)
        if index == len(spans) or spans[index].start != at:
            before = spans[index - 1]
            spans.insert(index, _Span(at, before.written, dict(before.read)))
        return index


class Arena:
    """Where an allocator takes memory from: the ordinary heap, or a memory pool of its own.

    As PyTorch's allocator does, it gives memory that has come back to the next who asks on the same stream, without
    waiting for anything. So what may still be going on in it when it comes back has to be over when that stream is
    given memory again.
    """

    def __init__(self) -> None:
        self.returned: dict[Stream, list[tuple[Access, Place]]] = {}  # what was done in it last

    def take_back(self, owner: Stream, last: list[Access], place: Place) -> None:
        """Memory comes back in which this was done last."""
        self.returned.setdefault(owner, []).extend((access, place) for access in last)

    def hand_out(self, owner: Stream, user: Stream) -> list[tuple[Access, Place]]:
        """Memory of the owner is given to a stream: what may still be going on in it, and where it was given back."""
        returned = self.returned.pop(owner, ())
        return [(access, place) for access, place in returned if not access.is_before(user)]


@dataclass(frozen=True)
class Race:
    """Two accesses to one memory that nothing orders."""

    kind: str
    first: Access
    second: Access
    memory: str
    returned: Place | None = None  # where the memory was given back between the two

    def __str__(self) -> str:
        lines = [f"{self.kind}, without an event between them: {self.memory}"]
        lines += [f"  stream '{self.first.stream.name}' {self.first}"]
        if self.returned is not None:
            lines += [f"  it is given back\n{_lines(self.returned)}"]
        lines += [f"  stream '{self.second.stream.name}' {self.second}"]
        return "\n".join(lines)


def line_of(place: Place, number: int = 0) -> str:
    """One line of a place, as a report shows it."""
    if number >= len(place):
        return "(no line of ours)"
    code, line = place[number]
    return f"{Path(code.co_filename).relative_to(ROOT)}:{line} in {code.co_name}"


def _lines(place: Place) -> str:
    return "\n".join(f"      {line_of(place, number)}" for number in range(max(1, len(place))))
