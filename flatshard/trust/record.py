"""The flight record: the last collectives that this process has launched, in memory that outlives it.

One ring of fixed size per process. It is mapped from a file (`Record.keep_in`), so that it can be read after a crash,
and appending writes into that mapping and nothing else. Whether a collective has ended is looked up when somebody wants
to know: at a dump, and by the watch once nothing has been launched for a while (`Record.settle`).

    page of a header (JSON: rank, world, pid, ... what the process died of) | a page of groups | CAPACITY entries
"""

from __future__ import annotations

import json
import mmap
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

CAPACITY = 1024
MOST_RANKS = 1 << 20  # of a job; a record that says more is none
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PHASES = ("", "forward", "forward without gradients", "backward")

_HEADER, _GROUPS, _LABEL = 8192, 8192, 128
# number, launched at, ended at (0: not known), bytes, number in its group, step, phase, kind, group, name
_ENTRY = struct.Struct("<QddQIIBBH84s")
_ENDED = struct.Struct("<d")
_ENDED_AT = 16
_SIZE = _HEADER + _GROUPS + CAPACITY * _ENTRY.size


class Ended(Protocol):
    """Of what was launched."""

    @property
    def is_on_device(self) -> bool: ...

    def has_ended(self) -> bool: ...


class Wire:
    """One process group of a lane, as the record counts launches on it."""

    __slots__ = ("index", "label", "launched")

    def __init__(self, index: int, label: str) -> None:
        self.index, self.label, self.launched = index, label, 0


@dataclass(frozen=True)
class Entry:
    """One collective. ``of_group``: its number among those of its group. ``ended``: when, or 0 if nobody has looked."""

    number: int
    launched: float
    ended: float
    numbytes: int
    of_group: int
    step: int
    phase: str
    kind: str
    group: str
    name: str

    def __str__(self) -> str:
        phase = f", {self.phase}" if self.phase else ""
        return f"{self.kind} {self.name or '(unnamed)'} ({self.numbytes} bytes, step {self.step}{phase})"

    @property
    def what(self) -> tuple[object, ...]:
        """What must be the same on all ranks of the group."""
        return self.kind, self.name, self.numbytes, self.step, self.phase


@dataclass(frozen=True)
class Recorded:
    """A record as it was read."""

    header: dict[str, Any]
    entries: list[Entry]  # the oldest first

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


class _Encoded(dict[str, bytes]):
    """Names as they are written. Units have the same ones in every step."""

    def __missing__(self, name: str) -> bytes:
        if len(self) > 100_000:  # somebody makes them up as he goes
            self.clear()
        # the end of a long name says more than its beginning
        self[name] = encoded = name.encode()[-84:]
        return encoded


class Record:
    """The ring of this process. ``step`` and ``phase`` are those of what is launched next."""

    def __init__(self) -> None:
        self.step, self.phase = 0, 0
        self.number = 0
        self.folder: Path | None = None
        self.header: dict[str, Any] = {"rank": 0, "world": 1}
        self._map: mmap.mmap = mmap.mmap(-1, _SIZE)
        self._path: Path | None = None
        self._names = _Encoded()
        self._launched: list[weakref.ref[Ended] | None] = [None] * CAPACITY  # who owns them keeps tensors alive
        self._wires: dict[str, Wire] = {}

    def wire(self, label: str) -> Wire:
        """The wire of this name. Beyond so many all others are one."""
        if label not in self._wires:
            index = len(self._wires)
            if index == _GROUPS // _LABEL - 1:
                label = "others"
            if index < _GROUPS // _LABEL:
                self._wires[label] = Wire(index, label)
                at = _HEADER + index * _LABEL
                self._map[at : at + _LABEL] = label.encode()[:_LABEL].ljust(_LABEL, b"\0")
            else:
                label = "others"
        return self._wires[label]

    def append(self, wire: Wire, kind: int, name: str, numbytes: int, launched: Ended) -> None:
        """Something has been launched."""
        self.number = number = self.number + 1
        wire.launched = of_wire = wire.launched + 1
        slot = number % CAPACITY
        self._launched[slot] = weakref.ref(launched)
        at = _HEADER + _GROUPS + slot * 128
        _pack(
            self._map, at, number, _now(), 0.0, numbytes, of_wire, self.step, self.phase, kind, wire.index,
            self._names[name],
        )  # fmt: skip

    def settle(self, unasked: bool = False) -> None:
        """Write down of everything whether it has ended by now. ``unasked``: of what is on a device, leave it open.

        Asking for an event from another thread would break a capture that this process may be in.
        """
        now = time.time()
        for slot, ref in enumerate(self._launched):
            launched = None if ref is None else ref()
            if launched is None:
                is_over = ref is not None  # it has been waited for, or nobody cares
            else:
                is_over = not (unasked and launched.is_on_device) and launched.has_ended()
            if is_over:
                self._launched[slot] = None
                _ENDED.pack_into(self._map, _HEADER + _GROUPS + slot * _ENTRY.size + _ENDED_AT, now)
        self.tell(looked=now)

    def is_pending(self) -> bool:
        """Whether something that was launched has not ended."""
        launched = [each for ref in self._launched if ref is not None and (each := ref()) is not None]
        return not all(each.has_ended() for each in launched)

    def tell(self, **told: Any) -> None:
        """Put into the header what is to be known of this process."""
        self.header.update(told)
        self.header["number"] = self.number
        text = json.dumps(self.header).encode()
        while len(text) > _HEADER:  # only an error can be that long
            longest = max(self.header, key=lambda key: len(str(self.header[key])))
            self.header[longest] = str(self.header[longest])[: len(str(self.header[longest])) // 2]
            text = json.dumps(self.header).encode()
        self._map[:_HEADER] = text.ljust(_HEADER, b"\0")

    def keep_in(self, folder: Path, rank: int, **told: Any) -> None:
        """Be in a file of this folder from now on, which `forget` removes. What was launched so far comes along.

        OSError: it cannot be there. What an earlier process of this rank has left there is gone.
        """
        self.tell(rank=rank, **told)
        path = folder / f"rank-{rank}.ring"
        if path == self._path:
            return
        path.with_suffix(".json").unlink(missing_ok=True)
        try:
            with path.open("w+b") as file:
                file.write(self._map[:])  # to a full disk this fails here; in a mapping it would kill the process
                file.flush()
                mapped = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self.forget()
        self._map, self.folder, self._path = mapped, folder, path

    def forget(self) -> None:
        """Leave the file, and remove it: nothing went wrong."""
        if self._path is None:
            return
        copy = mmap.mmap(-1, _SIZE)
        copy[:] = self._map[:]
        self._map, path, self._path, self.folder = copy, self._path, None, None
        path.unlink(missing_ok=True)

    def read(self) -> Recorded:
        return decoded(self._map[:])

    def dump(self) -> Path | None:
        """Write what is known as JSON beside the ring; where."""
        self.settle()
        if self._path is None:
            return None
        path = self._path.with_suffix(".json")
        found = self.read()
        text = json.dumps({"header": found.header, "entries": [asdict(entry) for entry in found.entries]}, indent=1)
        path.write_text(text)
        return path

    def told(self, last: int = 12) -> str:
        """The last entries, a line each, for people."""
        self.settle()
        entries = self.read().entries[-last:]
        lines = [f"  #{e.number} {'ended  ' if e.ended else 'pending'} {e}, group {e.group}" for e in entries]
        return "\n".join([f"flatshard: the last collectives of rank {self.header['rank']}:", *lines])


_pack, _now = _ENTRY.pack_into, time.time
assert _ENTRY.size == 128

record = Record()  # of this process


def decoded(data: bytes) -> Recorded:
    """A ring as it lies in its file. ValueError if it is none."""
    if len(data) != _SIZE:
        raise ValueError(f"a flight record has {_SIZE} bytes; this has {len(data)}")
    text = data[:_HEADER].rstrip(b"\0")
    header = json.loads(text) if text else {"rank": 0, "world": 1}
    labels = [data[at : at + _LABEL].rstrip(b"\0") for at in range(_HEADER, _HEADER + _GROUPS, _LABEL)]
    found = []
    for at in range(_HEADER + _GROUPS, _SIZE, _ENTRY.size):
        number, launched, ended, numbytes, of, step, phase, kind, group, name = _ENTRY.unpack_from(data, at)
        if number and phase < len(PHASES) and kind < len(KINDS) and group < len(labels):
            label, text = labels[group].decode(errors="replace"), name.rstrip(b"\0").decode(errors="replace")
            found.append(
                Entry(number, launched, ended, numbytes, of, step, PHASES[phase], KINDS[kind], label, text)
            )  # fmt: skip
    return Recorded(header, sorted(found, key=lambda entry: entry.number))


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in short: 0-3, or 0-6/2 for every other one."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def in_range(text: str) -> list[int]:
    """The ranks that `ranges` has put into words; none, if they are other words."""
    start, dash, rest = text.partition("-")
    stop, _, step = rest.partition("/")
    if dash and start.isdecimal() and stop.isdecimal() and (step or "1").isdecimal() and int(step or 1):
        return list(range(min(int(start), MOST_RANKS), min(int(stop) + 1, MOST_RANKS), int(step or 1)))
    return [int(rank) for rank in text.split(",") if rank.isdecimal()]
