"""The flight record: the last collectives that this process has launched, in memory that survives it.

One ring buffer of fixed size per process. It is mapped from a file (`FlightRecord.keep_in`), so that it can be read
after a crash; appending only writes to that mapping. Whether a collective has ended is checked only at a dump, and by
the watch thread if nothing has been launched for a while (`FlightRecord.settle`).

    page of a header (JSON: rank, world, pid, ... the cause of death) | a page of groups | CAPACITY entries
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

CAPACITY = 1024
MOST_RANKS = 1 << 20  # in a job; a file that says more is no record
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "replay")
PHASES = ("", "forward", "forward without gradients", "backward")

_HEADER, _GROUPS, _LABEL = 8192, 8192, 128
# number, launched at, ended at (0: not known), bytes, number in its group, step, phase, kind, group, name
_ENTRY = struct.Struct("<QddQIIBBH84s")
_ENDED = struct.Struct("<d")
_ENDED_AT = 16
_SIZE = _HEADER + _GROUPS + CAPACITY * _ENTRY.size


@dataclass(slots=True)
class GroupRecord:
    """One process group of a lane, with the number of its launches. ``limit``: its timeout in seconds, or None."""

    index: int
    limit: float | None
    launched: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective. ``of_group``: its number in its group. ``ended``: the time, or 0 if it has not been checked."""

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
class ReadRecord:
    header: dict[str, Any]
    entries: list[Entry]  # the oldest first

    def status(self, entry: Entry) -> str:
        """The state of a launch, in a word or two."""
        if entry.number == self.header.get("timed_out"):
            return "timed out"
        return "ended" if entry.ended else "pending"


@lru_cache(maxsize=1 << 16)  # units have the same names in every step
def _encoded(name: str) -> bytes:
    return name.encode()[-84:]  # the end of a long name says more than its beginning


class FlightRecord:
    """The ring buffer of this process. ``step`` and ``phase`` are those of the next launch."""

    def __init__(self) -> None:
        self.step, self.phase = 0, 0
        self.number = 0
        self.is_on_device = False  # what was launched ends on a GPU, if it does
        self.captures = False  # launches are captured into a CUDA graph, so their events must not be queried
        self.folder: Path | None = None
        self.header: dict[str, Any] = {"rank": 0, "world": 1}
        self._map = mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE)  # ranks may be forked from one process
        self._path: Path | None = None
        self._inode = 0  # of the file
        # What ends on the CPU keeps tensors alive, and is known weakly.
        self._launched: list[Callable[[], Any] | None] = [None] * CAPACITY
        self._oldest = 1  # all before this have ended
        self._groups: dict[str, GroupRecord] = {}

    def group(self, label: str, limit: float | None = None) -> GroupRecord:
        """The group record with this label; beyond a limit, groups share one. ``limit``: timeout in seconds."""
        index = len(self._groups)
        if label not in self._groups and index >= _GROUPS // _LABEL - 1:
            label = "others"
        if label not in self._groups:
            self._groups[label] = GroupRecord(index, limit)
            at = _HEADER + index * _LABEL
            self._map[at : at + _LABEL] = label.encode()[:_LABEL].ljust(_LABEL, b"\0")
        group = self._groups[label]
        group.limit = limit if limit is not None else group.limit
        return group

    def append(self, group: GroupRecord, kind: int, name: str, numbytes: int, launched: Any) -> None:
        """Record a launch. ``launched`` has ``is_on_device`` and ``has_ended()``, as tickets have."""
        number, now = self.number + 1, _now()
        group.launched = of_group = group.launched + 1
        slot = number % CAPACITY
        if self.captures:
            self._launched[slot] = None
        elif launched.is_on_device:
            self.is_on_device = True
            self._launched[slot] = lambda: launched
        else:
            self._launched[slot] = weakref.ref(launched)
        at = _HEADER + _GROUPS + slot * 128
        _pack(
            self._map, at, number, now, now if self.captures else 0.0, numbytes, of_group, self.step, self.phase, kind,
            group.index, _encoded(name),
        )  # fmt: skip
        self.number = number  # another thread reads up to here

    def settle(self) -> None:
        """Record for every launch whether it has ended."""
        for slot in range(CAPACITY):
            self._has_ended(slot)
        self.tell(looked=time.time())

    def _has_ended(self, slot: int) -> bool:
        """Whether a launch has ended, or cannot be checked; if it has, record that."""
        ref = self._launched[slot]
        if ref is None:
            return True
        launched = ref()  # None: it has been waited for, or is no longer used
        try:
            if launched is not None and not launched.has_ended():
                return False
        except RuntimeError:  # an error of CUDA, which the wait for it raises
            return False
        self._launched[slot] = None
        _ENDED.pack_into(self._map, _HEADER + _GROUPS + slot * _ENTRY.size + _ENDED_AT, time.time())
        return True

    def oldest_pending(self) -> Entry | None:
        last = self.number
        at = max(self._oldest, last - CAPACITY + 1)
        while at <= last and self._has_ended(at % CAPACITY):
            at += 1
        self._oldest = at
        return self._entry(at) if at <= last else None

    def pending(self) -> list[Entry]:
        """The launches that have not ended, the oldest first."""
        first, last = self.oldest_pending(), self.number
        numbers = () if first is None else range(first.number, last + 1)
        return [self._entry(number) for number in numbers if not self._has_ended(number % CAPACITY)]

    def last(self) -> Entry | None:
        return self._entry(self.number) if self.number else None

    def limit(self, entry: Entry) -> float | None:
        """The timeout of the process group of a launch, in seconds, if it is known."""
        group = self._groups.get(entry.group)
        return None if group is None else group.limit

    def _entry(self, number: int) -> Entry:
        entry = _unpacked(self._map, _HEADER + _GROUPS + number % CAPACITY * _ENTRY.size)
        assert entry is not None
        return entry

    def tell(self, **facts: Any) -> None:
        """Write facts about this process to the header."""
        self.header.update(facts)
        text = json.dumps(self.header).encode()
        while len(text) > _HEADER:  # only an error can be that long
            longest = max(self.header, key=lambda key: len(str(self.header[key])))
            self.header[longest] = str(self.header[longest])[: len(str(self.header[longest])) // 2]
            text = json.dumps(self.header).encode()
        self._map[:_HEADER] = text.ljust(_HEADER, b"\0")

    def keep_in(self, folder: Path, rank: int, **facts: Any) -> None:
        """Move the record to a file in this folder, which `forget` removes. Earlier launches are kept.

        OSError: the file cannot be created. The file of another process of this rank is replaced, not written to: if
        that process still runs, a file that becomes shorter would kill it, because it is mapped.
        """
        self.tell(rank=rank, **facts)
        path = folder / f"rank-{rank}.ring"
        if path == self._path:
            return
        path.with_suffix(".json").unlink(missing_ok=True)
        unnamed = path.with_suffix(f".{os.getpid()}")
        try:
            with unnamed.open("w+b") as file:
                file.write(self._map[:])  # to a full disk this fails here; in a mapping it would kill the process
                file.flush()
                mapped, inode = mmap.mmap(file.fileno(), _SIZE), os.fstat(file.fileno()).st_ino
            unnamed.replace(path)
        except OSError:
            unnamed.unlink(missing_ok=True)
            raise
        self.forget()
        self._map, self.folder, self._path, self._inode = mapped, folder, path, inode

    def forget(self) -> None:
        """Stop using the file, and remove it: there was no error."""
        if self._path is None:
            return
        copy = mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE)
        copy[:] = self._map[:]
        self._map, path, self._path, self.folder = copy, self._path, None, None
        with suppress(OSError):  # it was removed, or its folder
            if path.stat().st_ino == self._inode:  # else it is of a later process of this rank
                path.unlink()

    def read(self) -> ReadRecord:
        return decoded(self._map[:])

    def dump(self) -> str:
        """Write the record as JSON beside the ring buffer; returns the last entries and the path, for people."""
        self.settle()
        record = self.read()
        lines = [f"flatshard: the last collectives of rank {self.header['rank']}:"]
        lines += [f"  #{e.number} {record.status(e):<9} {e}, group {e.group}" for e in record.entries[-12:]]
        if self._path is not None:
            path = self._path.with_suffix(".json")
            try:
                path.write_text(json.dumps(asdict(record), indent=1))
                lines.append(f"flatshard: written to {path}")
            except OSError as error:  # a full disk, or a folder that was removed
                lines.append(f"flatshard: could not be written to {path}: {error}")
        return "\n".join(lines)


_pack, _now = _ENTRY.pack_into, time.time
assert _ENTRY.size == 128

record = FlightRecord()  # the one of this process


def decoded(data: bytes) -> ReadRecord:
    """The contents of a ring buffer's file. ValueError if it is none."""
    if len(data) != _SIZE:
        raise ValueError(f"it has {len(data)} bytes instead of {_SIZE}")
    text = data[:_HEADER].rstrip(b"\0")
    header = json.loads(text) if text else {"rank": 0, "world": 1}
    places = range(_HEADER + _GROUPS, _SIZE, _ENTRY.size)
    entries = [entry for at in places if (entry := _unpacked(data, at)) is not None]
    return ReadRecord(header, sorted(entries, key=lambda entry: entry.number))


def _unpacked(data: bytes | mmap.mmap, at: int) -> Entry | None:
    number, launched, ended, numbytes, of, step, phase, kind, group, name = _ENTRY.unpack_from(data, at)
    if not number or phase >= len(PHASES) or kind >= len(KINDS) or group >= _GROUPS // _LABEL:
        return None
    place = _HEADER + group * _LABEL
    label, text = _decoded(data[place : place + _LABEL]), _decoded(name)
    return Entry(number, launched, ended, numbytes, of, step, PHASES[phase], KINDS[kind], label, text)


@lru_cache(maxsize=1 << 16)  # launches, and ranks, have few names: of thousands of records each is kept once
def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in short form: 0-3, or 0-6/2 for every second one; 0-3,5-7 for several ranges."""
    parts, at = [], 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at < 3:
            end = at + 1
        first, last = ranks[at], ranks[end - 1]
        parts.append(f"{first}" if first == last else f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        at = end
    return ",".join(parts)


def parse_ranges(text: str) -> list[int]:
    """The ranks of a text from `ranges`; none for any other text."""
    ranks: list[int] = []
    for part in text.split(","):
        start, dash, rest = part.partition("-")
        stop, _, step = rest.partition("/")
        if dash and start.isdecimal() and stop.isdecimal() and (step or "1").isdecimal() and int(step or 1):
            ranks += range(min(int(start), MOST_RANKS), min(int(stop) + 1, MOST_RANKS), int(step or 1))
        elif part.isdecimal():
            ranks.append(int(part))
    return ranks


def records_folder(place: str = "") -> Path | None:
    """The folder for the records of this job's ranks: FLATSHARD_RECORD, or a folder of this user and job.

    None if that is ``off``: the records are then in memory only. ``place``: where the ranks of the job have met.
    """
    given = os.environ.get("FLATSHARD_RECORD")
    if given == "off":
        return None
    if given:
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{place}"
    job = "".join(c if c.isalnum() or c in "-." else "_" for c in job).strip("-")[-200:] or str(os.getpid())
    user_folder = Path(tempfile.gettempdir()) / f"flatshard-{os.getuid()}"
    user_folder.mkdir(mode=0o700, exist_ok=True)
    if user_folder.is_symlink() or user_folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{user_folder} belongs to another user; set FLATSHARD_RECORD to a folder of your own")
    folder = user_folder / job
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
