"""Compares the flight records of all ranks: which rank stopped where, and what the others waited for."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flatshard.trust.record import MOST_RANKS, Entry, ReadRecord, decoded, parse_ranges, ranges

_log = logging.getLogger("flatshard")


def read_records(folder: Path) -> dict[int, ReadRecord]:
    """The records of a folder by rank: rings, or the JSON of those that have been dumped. ValueError if it has none.

    Files that are not records are skipped with a warning if others are. If an earlier job of another size has left
    records there, only those of the last job are read.
    """
    records: dict[int, ReadRecord] = {}
    problems = []
    for path in sorted(folder.glob("rank-*.json")) + sorted(folder.glob("rank-*.ring")):  # rings know the most
        try:
            record = _read(path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{path} is not a flight record: {error}")
            continue
        records[record.header["rank"]] = record
    if records:
        for problem in problems:
            _log.warning("%s", problem)
        last = max(records.values(), key=_started).header.get("world", 1)
        return {rank: record for rank, record in records.items() if record.header.get("world", 1) == last}
    raise ValueError(*problems[:1] or [f"no flight records (rank-*.ring, rank-*.json) in {folder}"])


def _started(record: ReadRecord) -> float:
    at = record.header.get("started")
    return at if isinstance(at, (int, float)) else 0.0


def _read(path: Path) -> ReadRecord:
    """A record whose rank is possible, without entries that a crash, or a disk, has left in pieces."""
    if path.suffix == ".json":
        data = json.loads(path.read_text())
        record = ReadRecord(data["header"], [Entry(**entry) for entry in data["entries"]])
    else:
        record = decoded(path.read_bytes())
    rank, world = record.header["rank"], record.header.get("world", 1)
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world <= MOST_RANKS:
        raise ValueError(f"rank {rank!r} of {world!r} ranks is not possible")
    return ReadRecord(record.header, [entry for entry in record.entries if _is_sound(entry)])


def _is_sound(entry: Entry) -> bool:
    words = (entry.phase, entry.kind, entry.group, entry.name)
    numbers = (entry.number, entry.numbytes, entry.of_group, entry.step)
    times = all(isinstance(at, (int, float)) and 0 <= at < 2**33 for at in (entry.launched, entry.ended))
    return times and all(isinstance(each, str) for each in words) and all(type(each) is int for each in numbers)


def blame(records: dict[int, ReadRecord]) -> str:
    world = max(int(record.header.get("world", 1)) for record in records.values())
    sentences = [f"Records of {len(records)} of {world} ranks."]
    absent = sorted(set(range(world)) - set(records))
    if absent:
        sentences.append(f"No record of rank {ranges(absent)}: it ended without an error, or its record is elsewhere.")
    for rank, record in sorted(records.items()):
        if "error" in record.header and not str(record.header["error"]).startswith("PeerError"):
            last = f" after {record.entries[-1]}" if record.entries else ""
            sentences.append(f"Rank {rank} raised {record.header['error']}{last}.")
    for rank, record in sorted(records.items()):
        sentences += [f"On rank {rank} {e} timed out." for e in record.entries if record.status(e) == "timed out"]
    by_group = _by_group(records)
    differences = [diff for group, ranks in by_group.items() if (diff := _first_difference(group, ranks)) is not None]
    if differences:
        sentences += [text for _, text in sorted(differences)][:2]
    elif len(sentences) == 1:
        heard = [f"Rank {rank} ended: {said}." for rank, record in sorted(records.items()) if (said := _heard(record))]
        sentences += heard[:1]
        sentences.append("In every group all ranks launched the same collectives, as far as the records go back.")
    pending = Counter(str(e) for r in records.values() for e in r.entries if not e.ended and "looked" in r.header)
    if not differences and pending:
        text, count = pending.most_common(1)[0]
        # A rank without a record may not have launched it, and one that was killed may have launched it before.
        remedy = "" if absent or any(map(_heard, records.values())) else ": check the network"
        sentences.append(f"{count} {'rank' if count == 1 else 'ranks'} launched {text}, which has not ended{remedy}.")
    return " ".join(sentences)


def _heard(record: ReadRecord) -> str:
    """What a rank has heard about the end of another one, if anything."""
    kind, _, text = str(record.header.get("error", "")).partition(": ")
    return text if kind == "PeerError" else ""


def _by_group(records: dict[int, ReadRecord]) -> dict[str, dict[int, list[Entry]]]:
    """Per group of ranks: the launches of each of its ranks."""
    groups: dict[str, dict[int, list[Entry]]] = {}
    for rank, record in records.items():
        for entry in record.entries:
            if entry.group not in groups:
                members = parse_ranges((entry.group.split() or [""])[-1])
                groups[entry.group] = {member: [] for member in members if member in records}
            groups[entry.group].setdefault(rank, []).append(entry)
    return groups


def _first_difference(group: str, ranks: dict[int, list[Entry]]) -> tuple[float, str] | None:
    """The first launch of a group in which its ranks differ, when it was, and who did what instead."""
    at = {rank: {entry.of_group: entry for entry in entries} for rank, entries in ranks.items()}
    first = max((min(numbers) for numbers in at.values() if numbers), default=1)  # before, some ring has gone round
    for number in sorted({number for numbers in at.values() for number in numbers if number >= first}):
        launches = {rank: numbers[number] for rank, numbers in at.items() if number in numbers}
        kinds = {entry.what for entry in launches.values()}
        if len(launches) == len(at) and len(kinds) == 1:
            continue
        when = min(entry.launched for entry in launches.values())
        by_what: dict[str, list[int]] = {}
        for rank, entry in launches.items():
            by_what.setdefault(str(entry), []).append(rank)
        clauses = [f"rank {ranges(sorted(who))} launched {what}" for what, who in sorted(by_what.items())]
        missing = sorted(set(at) - set(launches))
        if missing:
            before = at[missing[0]].get(number - 1)
            stopped = f"rank {ranges(missing)} launched nothing more in this group"
            clauses.append(stopped + (f" after {before}" if before is not None else ""))
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        return when, f"In group '{group}', launch {number}, at {clock}: {'; '.join(clauses)}."
    return None


def last_launches(records: dict[int, ReadRecord], last: int = 5) -> Sequence[str]:
    """The last launches of each rank, a line each."""
    lines = []
    for rank, record in sorted(records.items()):
        lines.append(f"rank {rank}, process {record.header.get('pid', '?')} on {record.header.get('host', '?')}:")
        lines += [f"  #{e.number} {record.status(e)} {e}, {e.group}" for e in record.entries[-last:]]
    return lines
