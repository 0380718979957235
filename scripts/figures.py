"""Writes the figures of the README's comparison, and of the table that it is taken from, from measured results.

    python scripts/figures.py [FOLDER]

``FOLDER`` (default: ``benchmarks/results``) holds the files that ``python -m benchmarks.table --json`` has written. For
each of the cases (a) to (d), the newest run that has all of flatshard, FSDP2 and Megatron-FSDP counts; for (f), with
weights in host memory, that of flatshard and FSDP2.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMPARED = ("flatshard", "fsdp2", "megatron-fsdp")
OFFLOADED = ("flatshard-in-backward", "fsdp2")
Rows = dict[str, dict[str, float]]  # of one case, by system


def newest(folder: Path) -> dict[str, Rows]:
    """The rows of each case, of the newest run with all systems. Of one date, the last name counts."""
    found: dict[str, Rows] = {}
    runs = [(path.name, json.loads(path.read_text())) for path in folder.glob("*.json")]
    tables = [(run["date"], name, run["cases"]) for name, run in runs if "benchmarks.table " in run.get("command", "")]
    for _, _, cases in sorted(tables, key=lambda each: each[:2]):
        for case, rows in cases.items():
            systems = {"f": OFFLOADED}.get(case, COMPARED)
            measured = {system: row for system, row in rows.items() if "ms" in row}  # else it failed
            if case in ("a", "b", "c", "d", "f") and {"limit", *systems} <= measured.keys():
                found[case] = measured
    return found


def readme(text: str, cases: dict[str, Rows]) -> str:
    """The README with the multiples of the compute limit, and the peaks of case (c), of these runs."""
    for case, rows in cases.items():
        systems, title, note = (OFFLOADED, "1.5B, weights", 15) if case == "f" else (COMPARED, rf"\({case}\)", 1)
        ratios = [f"{rows[system]['ms'] / rows['limit']['ms']:.3f}" for system in systems]
        text = _with_cells(text, rf"\| {title} [^|]*\|", ratios, note)
    return _with_cells(text, r"\| memory at the peak of \(c\)[^|]*\|", [_gb(cases["c"][s]["peak"]) for s in COMPARED])


def _with_cells(text: str, title: str, figures: list[str], note: int = 1) -> str:
    """The text with the figures of one line of a table replaced. The note says where they come from."""
    cells = "".join(f" {figure} [{note}] |" for figure in figures)
    replaced, count = re.subn(rf"({title})(?: [\d.]+ \[{note}\] \|)+", lambda line: line[1] + cells, text)
    if count != 1:
        raise ValueError(f"the README has {count} lines of figures that begin with {title!r}; there must be one")
    return replaced


def table(text: str, cases: dict[str, Rows]) -> str:
    """The page of results with the table of these runs in the section "Beside Megatron-FSDP"."""
    lines = []
    for case, rows in sorted((case, rows) for case, rows in cases.items() if case != "f"):
        # Captured steps have another limit, and torch does not count the memory of replays.
        for system in (system for system in rows if system != "limit" and not system.endswith("captured")):
            row, name = rows[system], "" if lines and lines[-1][0] == case else f"({case})"
            cells = [name, system, f"{row['ms']:.1f}", f"{row['ms'] / rows['limit']['ms']:.3f}"]
            cells += [f"{row['host_ms']:.0f}", f"{row['wire_ms']:.1f}", _gb(row["peak"]), _gb(row["reserved"])]
            lines.append((case, f"| {' | '.join(cells)} |"))
    before, heading, section = text.partition("## Beside Megatron-FSDP\n")
    body = "".join(f"{line}\n" for _, line in lines)
    changed = re.sub(r"(\|---[-|]*\n)(?:\|.*\n)+", lambda found: found[1] + body, section, count=1)
    return before + heading + changed


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


if __name__ == "__main__":
    cases = newest(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    for path, write in ((ROOT / "README.md", readme), (RESULTS / "README.md", table)):
        path.write_text(write(path.read_text(), cases))
