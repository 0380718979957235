"""``flatshard report``: draw a recording as one HTML file, or convert it to a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from flatshard._sizes import format_bytes
from flatshard.tools.presets import PEAK_FLOPS

_LITTLE = 0.002  # fraction of a step; shorter waits are not listed
_MAKES_ONE = "make one with `flatshard rehearse --record FILE` or `flatshard train --record FILE`"
_PARTS = ("steps", "spans", "waits", "memory", "units")
_FIXED = ("parameters", "optimizer state")  # memory that does not change during a step
_MOVING = ("gradients", "gathered", "staging")


class Figure(NamedTuple):
    """A number of a report, and a function that formats it."""

    name: str
    value: float
    write: Callable[[float], str]

    def __str__(self) -> str:
        return self.write(self.value)


@dataclass(frozen=True)
class Record:
    """A recording of a run or a rehearsal (``--record``), and the log of the run (``--losses``), if there is one."""

    title: str
    data: Mapping[str, Any] = field(repr=False)
    curve: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    file: str = ""
    peak_flops: float | None = None  # peak FLOP/s of the device, for MFU; None: looked up by the device's name

    @classmethod
    def read(cls, path: str | Path, losses: str | Path | None = None, peak_flops: float | None = None) -> Record:
        """Read a recording and a log. ValueError if a file cannot be read or is something else."""
        path = Path(path)
        data = (_parsed(path, lines=False) or [None])[0]
        if not isinstance(data, dict) or not all(isinstance(data.get(part), list) for part in _PARTS):
            raise ValueError(f"{path}: is not a recording; {_MAKES_ONE}")
        lines = _parsed(Path(losses), lines=True) if losses else []
        if lines is None or not all(isinstance(line, dict) and {"step", "loss"} <= line.keys() for line in lines):
            raise ValueError(f"{losses}: is not the log of a run; make one with `flatshard train --losses FILE`")
        try:
            record = cls(str(data.get("title") or path.name), _with_root(data), lines, path.name, peak_flops)
            record._page_data(), record.trace()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is damaged, or not a recording: {type(error).__name__}: {error}") from error
        return record

    @property
    def step_seconds(self) -> float:
        steps = self.data["steps"]
        return float(sum(step["end"] - step["begin"] for step in steps) / len(steps)) if steps else 0.0

    def waited(self) -> dict[tuple[str, str], float]:
        """Seconds per step that compute waits, by phase and unit."""
        seconds: dict[tuple[str, str], float] = {}
        for wait in self.data["waits"]:
            key = wait["phase"], wait["unit"]
            seconds[key] = seconds.get(key, 0.0) + (wait["end"] - wait["begin"]) / max(1, len(self.data["steps"]))
        return seconds

    def exposed(self) -> list[dict[str, Any]]:
        """Where compute waits, the longest first. Waits with the same advice are in one row."""
        rows: dict[str, dict[str, Any]] = {}
        for (phase, unit), seconds in sorted(self.waited().items(), key=lambda item: -item[1]):
            advice = self._advice(phase, unit)
            row = rows.setdefault(advice, {"units": [], "what": [], "seconds": 0.0, "advice": advice})
            what = "reduce-scatter" if phase == "reduce" else f"all-gather in {phase}"
            row["units"] += [unit] * (unit not in row["units"])
            row["what"] += [what] * (what not in row["what"])
            row["seconds"] += seconds
            row["share"] = row["seconds"] / self.step_seconds if self.step_seconds else 0.0
        listed = [row for row in rows.values() if row["share"] >= _LITTLE]
        return sorted(listed, key=lambda row: -row["seconds"])

    def _advice(self, phase: str, unit: str) -> str:
        """What to try against a wait, judged by what ran at the same time."""
        lane = "reduce" if phase == "reduce" else "gather"
        sent = [span for span in self.data["spans"] if span["lane"] == lane and span["unit"] == unit]
        wire = sum(span["end"] - span["begin"] for span in sent) / max(1, len(sent))
        if phase == "reduce":
            return (
                "No compute follows the last reduce-scatters to hide them. Try smaller first units in the model, "
                "reduce_dtype=torch.bfloat16, or gradient accumulation."
            )
        order = [wait["unit"] for wait in self.data["waits"] if wait["phase"] == phase]
        if unit in order[:2]:
            return "No compute runs before it in the pass to hide it. Try a smaller first unit" + (
                ", or reshard_after_forward=False for it." if phase == "backward" else "."
            )
        before = order[order.index(unit) - 1]
        compute = [
            s for s in self.data["spans"] if s["lane"] == "compute" and s["unit"] == before and s["kind"] == phase
        ]
        beside = sum(span["end"] - span["begin"] for span in compute) / max(1, len(self.data["steps"]))
        if wire > beside:
            return (
                "Its all-gather takes longer than the compute before it. Try fewer bytes (param_dtype, HSDP), "
                "more tokens per step, or SchedulePolicy(max_gathered=3) if units differ in size."
            )
        return "It is launched too late. Try SchedulePolicy(max_gathered=3), or max_gathered_bytes."

    def figures(self) -> list[Figure]:
        """The most important numbers of the recording."""
        steps, known, step = len(self.data["steps"]), self._facts, self.step_seconds
        if not step:
            return []
        exposed = 100 * sum(self.waited().values()) / step
        figures = [Figure("step", step, _time), Figure("exposed: compute waits", exposed, "{:.1f}%".format)]
        rates = {name: (known.get(f"{name}_per_step") or 0) / step for name in ("tokens", "flops")}
        if rates["tokens"]:
            figures.append(Figure("tokens/s per rank", rates["tokens"], "{:,.0f}".format))
        peak = self.peak_flops or next((f for n, f in PEAK_FLOPS.items() if n in known.get("device", "")), None)
        if rates["flops"] and peak:
            figures.append(Figure("MFU", 100 * rates["flops"] / peak, "{:.1f}%".format))
        elif rates["flops"]:
            figures.append(Figure("model GFLOP/s per rank", rates["flops"] / 1e9, "{:,.1f}".format))
        sent = sum(span["bytes"] for span in self.data["spans"]) / steps
        figures.append(Figure("communicated per step", sent, format_bytes))
        held = sum(known.get("memory", {}).get(name, 0) for name in _FIXED)
        moments = [held + sum(each.get(name) or 0 for name in _MOVING) for each in self.data["memory"]]
        moments += [each.get("allocated") or 0 for each in self.data["memory"]]
        figures.append(Figure("peak memory", max([known.get("memory", {}).get("peak", 0), *moments]), format_bytes))
        if self.curve:
            figures.append(Figure("last loss", self.curve[-1]["loss"], "{:.3f}".format))
        return figures

    @property
    def _facts(self) -> Mapping[str, Any]:
        """The description of the rehearsal or run in the recording."""
        facts: Mapping[str, Any] = self.data.get("rehearsal") or self.data.get("run") or {}
        return facts

    def about(self) -> str:
        """One line about rank, network, device and version of torch."""
        known = self._facts
        rank = f"rank {known['rank']} of {known['world']}" if "rank" in known else ""
        network = f"modelled network {known['network']}" if "network" in known else ""
        torch = f"torch {known['torch']}" if "torch" in known else ""
        return ", ".join(filter(None, (rank, network, known.get("device", ""), torch)))

    def _page_data(self) -> dict[str, Any]:
        return {
            **{part: self.data[part] for part in _PARTS},
            "title": self.title,
            "file": self.file,
            "about": self.about(),
            "figures": [(figure.name, str(figure)) for figure in self.figures()],
            "fixed": self._facts.get("memory") or {},
            "exposed": self.exposed(),
            "little": f"{100 * _LITTLE:g}%",
            "curve": list(self.curve),
        }

    def trace(self) -> str:
        """The recording as JSON for Perfetto and chrome://tracing."""
        lanes = {name: number for number, name in enumerate(["compute", "waits", "gather", "reduce"])}
        events: list[dict[str, Any]] = []
        for span in self.data["spans"]:
            thread = lanes.setdefault(span["lane"], len(lanes))
            name = f"{span['kind']} {span['unit']}".strip()
            events.append(_event(name, thread, span, {"bytes": span["bytes"]} if span["bytes"] else {}))
        for wait in self.data["waits"]:
            events.append(_event(f"waits: {wait['phase']} {wait['unit']}", lanes["waits"], wait, {}))
        for sample in self.data["memory"]:
            values = {name: sample.get(name, 0) for name in ("gathered", "staging", "gradients")}
            events.append({"ph": "C", "pid": 0, "name": "memory", "ts": 1e6 * sample["at"], "args": values})
        for name, thread in lanes.items():
            events.append({"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}})
        return json.dumps({"traceEvents": events})

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        page = html([self]).replace("&", "&amp;").replace('"', "&quot;")
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 900px; border: 0"></iframe>'


def _event(name: str, thread: int, span: Mapping[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    begin, took = 1e6 * span["begin"], 1e6 * (span["end"] - span["begin"])
    return {"ph": "X", "pid": 0, "tid": thread, "name": name, "ts": begin, "dur": took, "args": details}


def html(records: Sequence[Record]) -> str:
    """A page that shows one recording, or two side by side with their differences. It needs no other file."""
    page = resources.files("flatshard.tools").joinpath("report.html").read_text(encoding="utf-8")
    shown = {"reports": [record._page_data() for record in records], "differences": differences(records)}
    return page.replace("@DATA@", json.dumps(shown, allow_nan=False).replace("<", "\\u003c"))


def differences(records: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """For two recordings, each figure that both have: its name, both values, and the difference."""
    first, *others = ({figure.name: figure for figure in record.figures()} for record in records)
    rows = []
    for name, before in first.items():
        after = others[0].get(name) if others else None
        if after is not None:
            unit = " points" if str(before).endswith("%") else "%"
            change = after.value - before.value
            by = change if unit == " points" else 100 * change / before.value if before.value else 0.0
            rows.append((name, str(before), str(after), f"{by:+.1f}{unit}"))
    return rows


def _parsed(path: Path, lines: bool) -> list[Any] | None:
    """The JSON of a file, or of each of its lines; None if it is not JSON."""
    try:
        text = path.read_text()
        return [json.loads(each) for each in (text.splitlines() if lines else [text])]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError:
        return None


def _with_root(data: dict[str, Any]) -> dict[str, Any]:
    """The recording with the name "root" for the root unit, which has no path."""

    def renamed(row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "unit": "root"} if row["unit"].startswith(("(root)", "FSDP")) else row

    return {**data, **{part: [renamed(row) for row in data[part]] for part in ("spans", "waits", "units")}}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
