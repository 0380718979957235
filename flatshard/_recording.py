"""Records the timeline of steps: collectives by unit, where compute waits for them, and the memory that they take.

The engine reports its waits, and the lanes their launches, to the active `Recording`. Without one, each report is a
comparison with None.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

active: Recording | None = None  # the current recording, if any

# Seconds of `perf_counter`, or a CUDA event, or None in a capture.
Moment = Any


@dataclass
class Wait:
    """A wait for a collective in ``phase`` forward, backward or reduce. ``memory``: bytes by kind."""

    phase: str
    unit: str
    begin: Moment
    end: Moment
    memory: dict[str, int | None]
    root: int  # the id of the root of the unit

    @property
    def name(self) -> str:
        return f"reduce {self.unit}" if self.phase == "reduce" else f"{self.phase} gather {self.unit}"


@dataclass
class Launch:
    """A collective of a lane. On CPU its time begins when the collective before it in the lane has ended."""

    lane: str
    kind: str
    unit: str
    numbytes: int
    begin: Moment
    end: Moment = None


class Recording:
    """The waits, launches and step ends of the code in `recording`. A step ends with the first optimizer's step."""

    def __init__(self, only_waits: bool = True) -> None:
        self.only_waits = only_waits  # do not record launches, which cost two events each
        self.waits: list[Wait] = []
        self.launches: list[Launch] = []
        self.steps: list[Moment] = []
        self.is_over = False  # it has been stopped
        self._roots = weakref.WeakSet[Any]()  # described in `_units`
        self._units: list[dict[str, Any]] = []  # a row for each group
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._base: Moment = None  # the first event on the device

    def now(self, device: torch.device) -> Moment:
        """The current moment of the current stream (CUDA) or of the host."""
        if device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._base is None:
            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def around(self, phase: str, unit: str, root: Any) -> Iterator[None]:
        """Record the body as a wait of the current stream (on CUDA) or of the caller (on CPU)."""
        if root not in self._roots:
            self._roots.add(root)
            self._units += _described(root)
        device = root.device
        begin = self.now(device)
        yield
        end, memory = self.now(device), {}
        if not self.only_waits:
            groups = [group for each in root.units for group in each.groups]
            memory = {"gathered": root.gather_pool.live_bytes, "staging": root.reduce_pool.live_bytes}
            memory["gradients"] = sum(group.gradients.main_grads.live_bytes for group in groups)
            memory["allocated"] = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        self.waits.append(Wait(phase, unit, begin, end, memory, id(root)))

    def launched(
        self, lane: str, kind: str, unit: str, numbytes: int, begin: Moment, works: Sequence[Any], device: torch.device
    ) -> None:
        """Record a launch. On CPU it ends with ``works``; on CUDA the lane's stream must be the current one."""
        launch = Launch(lane, kind, unit, numbytes, begin)
        self.launches.append(launch)
        if device.type == "cuda":
            launch.end = self.now(device)
            return

        def ended(_: Any) -> None:
            launch.end = time.perf_counter()

        for work in works:
            if work is not None:
                work.get_future().add_done_callback(ended)
        if not works:
            launch.end = time.perf_counter()

    def stop(self) -> None:
        """Record nothing more, even if a recording that began within this one ends."""
        global active
        self.is_over = True
        if active is self:
            active = None

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.steps.append(self.now(torch.device("cpu" if self._base is None else "cuda")))

    def seconds(self, moment: Moment) -> float:
        """Seconds from a fixed start to a moment. The device must have passed it."""
        if moment is None:
            return 0.0
        return float(moment) if isinstance(moment, float) else float(self._base.elapsed_time(moment)) * 1e-3

    def seconds_per_step(self, steps: int, warmup: int) -> dict[str, float]:
        """Seconds of waiting per step by name, longest first. Of ``steps`` recorded steps, ``warmup`` are left out."""
        self._settle()
        spans: dict[str, list[float]] = {}
        for wait in self.waits:
            spans.setdefault(wait.name, []).append(self.seconds(wait.end) - self.seconds(wait.begin))
        totals = {
            name: sum(found[len(found) * warmup // max(steps, 1) :]) / max(steps - warmup, 1)
            for name, found in spans.items()
        }
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def gather_waits(self, first: int, root: Any) -> dict[str, float]:
        """Seconds of waiting for all-gathers by unit of a root, from wait number ``first`` on."""
        self._settle()
        found: dict[str, float] = {}
        for wait in self.waits[first:]:
            if wait.phase != "reduce" and wait.root == id(root):
                found[wait.unit] = found.get(wait.unit, 0.0) + self.seconds(wait.end) - self.seconds(wait.begin)
        return found

    def _settle(self) -> None:
        if self._base is not None:
            torch.cuda.synchronize()

    def to_dict(self, keep: int = 2, before: int = 0) -> dict[str, Any]:
        """The last ``keep`` complete steps, in seconds from the start of the first, and the units, for JSON.

        ``before``: how many steps were run before the recording began.
        """
        self._settle()
        ends = [self.seconds(moment) for moment in self.steps]
        bounds = list(pairwise(ends))[-keep:]
        if not bounds:
            raise ValueError("a recording needs at least two optimizer steps: the start of the first is not recorded")
        start, stop = bounds[0][0], bounds[-1][1]

        def span(begin: float, end: float, **fields: Any) -> dict[str, Any]:
            return {**fields, "begin": begin - start, "end": end - start}

        waits = [replace(wait, begin=self.seconds(wait.begin), end=self.seconds(wait.end)) for wait in self.waits]
        waits = [wait for wait in waits if start <= wait.begin < stop]
        computed = [each for each in _computed(waits, bounds) if each.end > each.begin]
        numbered = enumerate(bounds, len(ends) + 1 - len(bounds))
        return {
            "steps": [span(*bound, number=before + number) for number, bound in numbered],
            "spans": [
                span(each.begin, each.end, lane=each.lane, kind=each.kind, unit=each.unit, bytes=each.numbytes)
                for each in (*computed, *self._sent(start, stop))
            ],
            "waits": [span(wait.begin, wait.end, phase=wait.phase, unit=wait.unit) for wait in waits],
            "memory": [{"at": wait.end - start, **wait.memory} for wait in waits],
            "units": self._units,
        }

    def _sent(self, start: float, stop: float) -> Iterator[Launch]:
        free: dict[str, float] = {}
        for launch in self.launches:
            begin = max(self.seconds(launch.begin), free.get(launch.lane, 0.0))
            end = max(begin, begin if launch.end is None else self.seconds(launch.end))
            free[launch.lane] = end
            if begin < stop and end > start:
                yield replace(launch, begin=max(begin, start), end=min(end, stop))


def _computed(waits: Sequence[Wait], bounds: Sequence[tuple[float, float]]) -> Iterator[Launch]:
    """The spans of the compute stream between waits, named by the last wait; the last span is the optimizer."""
    for begin, end in bounds:
        phase, unit, at = "before forward", "", begin
        for wait in (wait for wait in waits if begin <= wait.begin < end):
            yield Launch("compute", phase, unit, 0, at, wait.begin)
            at = wait.end
            if wait.phase != "reduce":
                phase, unit = wait.phase, wait.unit
        yield Launch("compute", "optimizer", "", 0, at, end)


def _described(root: Any) -> list[dict[str, Any]]:
    """One row per parameter group: sizes, dtypes, placements and padding."""
    return [
        {
            "unit": unit.name or "(root)",
            "parameters": group.layout.payload,
            "dtype": str(group.main.dtype).removeprefix("torch."),
            "compute": str(group.codec.dtype).removeprefix("torch."),
            "placements": ", ".join(type(placement).__name__ for placement in group.main.placements),
            "bytes": group.main.local.numel() * group.main.local.element_size(),
            "gathered": group.gathered_bytes,
            "waste": group.layout.waste,
        }
        for unit in root.units
        for group in unit.groups
    ]


@contextmanager
def recording(only_waits: bool = False) -> Iterator[Recording]:
    """Record the body."""
    global active
    before, active = active, Recording(only_waits)
    hook = register_optimizer_step_post_hook(active._stepped)
    try:
        yield active
    finally:
        hook.remove()
        active = None if before is not None and before.is_over else before
