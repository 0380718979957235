"""``flatshard report``: a recording as one HTML file that needs nothing else, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

_LITTLE = 0.002  # of a step: a wait shorter than that is not worth a line
_PARTS = ("steps", "spans", "waits", "memory", "units")


@dataclass(frozen=True)
class Record:
    """What a run or a rehearsal has recorded (``--record``), and the log of the run, if there is one."""

    title: str
    data: Mapping[str, Any] = field(repr=False)
    curve: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    @classmethod
    def read(cls, path: str | Path, losses: str | Path | None = None) -> Record:
        """ValueError where a file is something else."""
        path = Path(path)
        try:
            data = json.loads(path.read_text())
            lines = [json.loads(line) for line in Path(losses).read_text().splitlines()] if losses else []
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{path if not losses else f'{path} or {losses}'}: is not a recording: {error}") from error
        if not isinstance(data, dict) or not all(isinstance(data.get(part), list) for part in _PARTS):
            raise ValueError(f"{path}: is not a recording; `flatshard rehearse --record FILE` makes one")
        if not all(isinstance(line, dict) and {"step", "loss"} <= line.keys() for line in lines):
            raise ValueError(f"{losses}: is not the log of a run (`flatshard train --losses FILE`)")
        found = cls(str(data.get("title") or path.name), data, lines)
        try:
            found._shown(), found.trace()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is damaged, or not a recording: {type(error).__name__}: {error}") from error
        return found

    @property
    def step_seconds(self) -> float:
        steps = self.data["steps"]
        return float(sum(step["end"] - step["begin"] for step in steps) / len(steps)) if steps else 0.0

    def exposed(self) -> list[dict[str, Any]]:
        """Where compute waits, the longest first: seconds per step, its share, and what might help."""
        steps = max(1, len(self.data["steps"]))
        waits: dict[tuple[str, str], float] = {}
        for wait in self.data["waits"]:
            key = wait["phase"], wait["unit"]
            waits[key] = waits.get(key, 0.0) + (wait["end"] - wait["begin"]) / steps
        rows = []
        for (phase, unit), seconds in sorted(waits.items(), key=lambda item: -item[1]):
            share = seconds / self.step_seconds if self.step_seconds else 0.0
            if share >= _LITTLE:
                what = "its reduce" if phase == "reduce" else f"its gather in {phase}"
                rows.append({"unit": unit, "what": what, "seconds": seconds, "share": share})
                rows[-1]["advice"] = self._advice(phase, unit)
        return rows

    def _advice(self, phase: str, unit: str) -> str:
        """What might hide a wait, from what was under way beside it."""
        lane = "reduce" if phase == "reduce" else "gather"
        sent = [span for span in self.data["spans"] if span["lane"] == lane and span["unit"] == unit]
        wire = sum(span["end"] - span["begin"] for span in sent) / max(1, len(sent))
        if phase == "reduce":
            return (
                "The last reduces have nothing behind them: smaller units at the bottom of the model, "
                "reduce_dtype=torch.bfloat16, or micro-batches."
            )
        order = [wait["unit"] for wait in self.data["waits"] if wait["phase"] == phase]
        if unit in order[:2]:
            return "Nothing runs before it in its pass that could hide it: a smaller first unit" + (
                ", or reshard_after_forward=False for it." if phase == "backward" else "."
            )
        before = order[order.index(unit) - 1]
        compute = [
            s for s in self.data["spans"] if s["lane"] == "compute" and s["unit"] == before and s["kind"] == phase
        ]
        beside = sum(span["end"] - span["begin"] for span in compute) / max(1, len(self.data["steps"]))
        if wire > beside:
            return (
                "Its gather takes longer than the compute of the unit before it: fewer bytes (param_dtype, HSDP), "
                "more tokens per step, or SchedulePolicy(max_gathered=3) where units differ."
            )
        return "It is launched too late: SchedulePolicy(max_gathered=3), or max_gathered_bytes."

    def figures(self) -> list[tuple[str, str]]:
        """The few numbers to look at first."""
        total = sum(row["seconds"] for row in self.exposed())
        found = []
        if self.data["steps"]:
            found = [("step", _time(self.step_seconds)), ("compute waits, per step", _time(total))]
            gathers = [span for span in self.data["spans"] if span["kind"] == "all_gather"]
            found.append(("gathers per step", f"{len(gathers) / len(self.data['steps']):.0f}"))
        derived = (self.data.get("rehearsal") or {}).get("derived") or {}
        if derived.get("tokens_per_second"):
            found.append(("tokens/s per rank", f"{derived['tokens_per_second']:,.0f}"))
        if derived.get("flops_per_second"):
            found.append(("model FLOP/s per rank", f"{derived['flops_per_second'] / 1e12:,.1f} T"))
        if self.curve:
            found.append(("loss", f"{self.curve[0]['loss']:.3f} → {self.curve[-1]['loss']:.3f}"))
        return found

    def about(self) -> str:
        """One line: where it ran."""
        known = self.data.get("rehearsal") or self.data.get("run") or {}
        rank = f"rank {known['rank']} of {known['world']}" if "rank" in known else ""
        network = f"modelled network {known['network']}" if "network" in known else ""
        torch = f"torch {known['torch']}" if "torch" in known else ""
        return ", ".join(filter(None, (rank, network, known.get("device", ""), torch)))

    def _shown(self) -> dict[str, Any]:
        known = self.data.get("rehearsal") or self.data.get("run") or {}
        exposed = self.exposed()
        said = f"Waits of less than {100 * _LITTLE:g}% of a step are left out." if exposed else "Nothing worth a line."
        return {
            **{part: self.data[part] for part in _PARTS},
            "title": self.title,
            "about": self.about(),
            "figures": self.figures(),
            "fixed": known.get("memory") or {},
            "exposed": exposed,
            "waited": said,
            "curve": list(self.curve),
        }

    def trace(self) -> str:
        """The recording as Perfetto and chrome://tracing read it."""
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
        """In a notebook: the page, in a frame of its own."""
        page = html([self]).replace("&", "&amp;").replace('"', "&quot;")
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 900px; border: 0"></iframe>'


def _event(name: str, thread: int, span: Mapping[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    begin, took = 1e6 * span["begin"], 1e6 * (span["end"] - span["begin"])
    return {"ph": "X", "pid": 0, "tid": thread, "name": name, "ts": begin, "dur": took, "args": details}


def html(records: Sequence[Record]) -> str:
    """One page for one recording, or for two side by side. It loads nothing."""
    page = resources.files("flatshard.tools").joinpath("report.html").read_text(encoding="utf-8")
    data = json.dumps([record._shown() for record in records], allow_nan=False).replace("<", "\\u003c")
    return page.replace("@DATA@", data)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
