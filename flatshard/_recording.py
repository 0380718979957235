"""Where compute waits for communication, by name: what the network costs a step, and which unit pays.

The engine names its waits; whoever wants to know records them. Without a recording this costs a comparison with None.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

active: Waits | None = None  # the recording that is on, if one is


class Waits:
    """The waits seen during a recording."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def around(self, name: str, device: torch.device) -> Iterator[None]:
        """The body makes the current stream (on CUDA) or the caller (on CPU) wait, and does nothing else."""
        before = _now(device)
        yield
        self._spans.setdefault(name, []).append((before, _now(device)))

    def seconds_per_step(self, steps: int, warmup: int) -> dict[str, float]:
        """Seconds by name and step, the longest first, of ``steps`` steps less the first ``warmup``."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for name, spans in self._spans.items():
            counted = spans[len(spans) * warmup // max(steps, 1) :]
            totals[name] = sum(_between(*span) for span in counted) / max(steps - warmup, 1)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


@contextmanager
def recording() -> Iterator[Waits]:
    """Record all waits of the body."""
    global active
    before, active = active, Waits()
    try:
        yield active
    finally:
        active = before


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:
    if isinstance(before, float):
        return float(after - before)
    return float(before.elapsed_time(after)) * 1e-3
