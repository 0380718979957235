"""The output of a run on rank 0: a progress bar in a terminal, otherwise plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from flatshard._sizes import peak_resident_bytes
from flatshard.train.log import Step
from flatshard.train.settings import FILE, TrainSettings
from flatshard.train.stop import reader_is_gone, signal_name
from flatshard.train.trainer import Trainer

_LINES = 12  # least number of lines of a run that is not in a terminal
_SILENCE = 60.0  # most seconds between two of these lines
_REFRESH = 0.1  # least seconds between two updates of the bar, because each waits for the device


@dataclass(frozen=True)
class Reading:
    """The progress of a run. ``speed``: tokens per second of all ranks since the last reading; ``flops``: FLOP/s.

    ``memory``: peak in bytes, allocated on an accelerator, or the resident set of this process on a CPU.
    ``left``: estimate of the seconds left; None in the first reading.
    """

    step: int
    loss: float
    speed: float
    flops: float
    memory: int
    left: float | None
    val_loss: float | None = None
    validated: int = 0  # the step of ``val_loss``

    def within(self, width: int = 1000) -> str:
        """As much of the reading as fits into ``width`` characters, the most important first."""
        scale, unit = next((s, u) for s, u in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if self.flops >= s or u == "G")
        parts = [f"loss {self.loss:.3f}"]
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3f}" + f" (step {self.validated})" * (self.validated < self.step))
        memory = f"{self.memory / 2**20:,.0f} MiB" if self.memory < 2**30 else f"{self.memory / 2**30:,.1f} GiB"
        parts += [f"{self.speed:6,.0f} tokens/s", f"{self.flops / scale:.1f} {unit}FLOP/s", memory]
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)

    __str__ = within


def headline(trainer: Trainer) -> str:
    """The first line of a run: model, processes and data."""
    count = trainer.parameters
    size = f"{count / 1e6:.2f}M" if count < 1e9 else f"{count / 1e9:.2f}B"
    world = trainer.mesh.size()
    ranks = f"{world} process" if world == 1 else f"{world} processes"
    tokens = len(trainer.text.tokens)
    amount = f"{tokens / 1e3:,.0f} kB" if trainer.text.vocab == 256 else f"{tokens:,} tokens"
    text = f"{trainer.text.name} ({amount})"
    how = [trainer.device.type, trainer.settings.precision, *["captured"] * trainer.settings.capture]
    return f"{size} parameters on {ranks} ({', '.join(how)}), {text}"


class PlainLines:
    """Lines for logs: a dozen per run, and in long runs at least one per minute."""

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        self._steps, self._say = steps, say
        self._every, self._last = max(1, steps // _LINES), time.monotonic()

    def due(self, step: int) -> bool:
        late = time.monotonic() - self._last >= _SILENCE
        return late or step in (1, self._steps) or step % self._every == 0

    def show(self, reading: Reading) -> None:
        self._last = time.monotonic()
        width = len(str(self._steps))
        is_known = reading.left is not None and reading.step < self._steps
        left = f"  {timedelta(seconds=round(reading.left or 0))} left" if is_known else ""
        self._say(f"step {reading.step:{width}}/{self._steps}  {reading}{left}")


class Bar:
    def __init__(self, bar: Any, steps: int) -> None:
        self._bar = bar
        self._steps = steps
        self._task = bar.add_task("", total=steps, reading="starting")
        self._last = 0.0

    def due(self, step: int) -> bool:
        return step == self._steps or time.monotonic() - self._last >= _REFRESH

    def show(self, reading: Reading) -> None:
        self._last = time.monotonic()
        # The width beside the count of steps and the time left. If the line is too long, rich cuts all columns.
        room = self._bar.console.width - len(f"{self._steps}/{self._steps}") - len("left 00:00:00") - 3
        text = reading.within(room - 8)
        self._bar.columns[0].bar_width = max(room - len(text), 4)
        self._bar.update(self._task, completed=reading.step, reading=text)


@contextmanager
def display(settings: TrainSettings, say: Callable[[str], None]) -> Iterator[PlainLines | Bar]:
    """A context with a progress bar if rich is installed and the output is a terminal, otherwise with plain lines."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(highlight=False)
        is_terminal = console.is_terminal
    except ImportError:
        is_terminal = False
    if not is_terminal:
        yield PlainLines(settings.steps, say)
        return
    columns = (
        BarColumn(complete_style="cyan", finished_style="cyan"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[reading]}", style="default"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield Bar(bar, settings.steps)


class ProgressMeter:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tokens = trainer.settings.batch * trainer.settings.context
        self._step, self._time = trainer.done, time.monotonic()
        self._first: tuple[int, float] | None = None
        self._val: tuple[float | None, int] = None, 0

    def read(self, step: Step) -> Reading:
        loss = float(step.loss)  # waits for the device, so the clock is read after it
        self._val = self._val if step.val_loss is None else (float(step.val_loss), step.number)
        now = time.monotonic()
        speed = (step.number - self._step) * self._tokens / max(now - self._time, 1e-9)
        self._step, self._time = step.number, now
        first, since = self._first = self._first or (step.number, now)
        left = None
        if step.number > first:
            left = (now - since) / (step.number - first) * (self._trainer.settings.steps - step.number)
        on_cpu = self._trainer.device.type == "cpu"
        memory = peak_resident_bytes() if on_cpu else torch.accelerator.max_memory_allocated()
        return Reading(step.number, loss, speed, speed * self._trainer.flops_per_token, memory, left, *self._val)


def run_with_display(trainer: Trainer) -> None:
    """Train, sample and print the progress. If stdout is a closed pipe, the run ends as after a signal."""
    began = time.monotonic()
    steps, folder = trainer.settings.steps, trainer.settings.checkpoint

    def say(text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            trainer.stop.end_for_closed_pipe()

    say(headline(trainer))
    if 0 < trainer.done < steps:
        say(f"continues after step {trainer.done} of {folder}")
    elif trainer.done:
        say(f"{folder} has step {trainer.done} already: to train on, give more --steps or another --checkpoint")
    meter = ProgressMeter(trainer)
    first = last = float("nan")
    with display(trainer.settings, say) as shown:
        for step in trainer.steps():
            if reader_is_gone():
                trainer.stop.end_for_closed_pipe()
            is_first = step.number == trainer.done + 1
            if step.sample is not None:
                say(f"\n{step.sample}\n")
            if is_first or trainer.stopped or step.val_loss is not None or shown.due(step.number):
                reading = meter.read(step)
                shown.show(reading)
                first, last = (reading.loss if is_first else first), reading.loss
    if trainer.reached > trainer.done:
        say(f"loss {first:.3f} -> {last:.3f} in {time.monotonic() - began:.0f} s")
    if trainer.stopped:
        ended = f"ended by {signal_name(trainer.stopped)} after step {trainer.reached} of {steps}"
        kept = "; nothing was saved: give --checkpoint FOLDER to save runs"
        if folder is not None:
            saved = folder / f"step-{trainer.reached}"
            kept = f", saved in {saved}; continue with: flatshard train --config {folder / FILE}"
        say(ended + kept)
    elif trainer.settings.sample:
        say(f"\n{trainer.sample()}")
