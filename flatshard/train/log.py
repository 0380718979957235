"""The losses of a run as a file: one line of JSON per step, each step once, however often the run was broken off."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flatshard.train.settings import Mistake

if TYPE_CHECKING:
    from flatshard.train.trainer import Step

_BEGINNING = b'{"step": '  # of a line
_SECONDS = 1.0  # between two writes: each waits for the device


def check(path: Path) -> None:
    """Mistake where this file is something else than the log of a run; it is fine if there is none."""
    try:
        _end_of(path, 0)
    except OSError as error:
        raise Mistake(f"--losses {path}: {error.strerror}") from error


def _end_of(path: Path, done: int) -> int:
    """The bytes of the log that tell of the steps up to ``done``."""
    end, kept = 0, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
            break  # of a write that was killed
        try:
            number = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise Mistake(f"--losses {path}: not the log of a run, it would be lost; choose another name") from error
        end += len(line)
        kept = end if number <= done else kept
    return kept


class Log:
    """The log of a run that continues after step ``done``. What an earlier run has written beyond that is cut off.

    The numbers are written so that they can be read back to the last bit.
    """

    def __init__(self, path: Path, done: int) -> None:
        end = _end_of(path, done)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(end)
        self._waiting: list[Step] = []
        self._written = time.monotonic()

    def add(self, step: Step) -> None:
        """Take a step. It is written with the next ones, soon."""
        self._waiting.append(step)
        if time.monotonic() - self._written >= _SECONDS:
            self.write()

    def write(self) -> None:
        """Bring to disk all that was taken. A checkpoint of a step is begun after that: no line is ever missing."""
        for step in self._waiting:
            line = {"step": step.number, "loss": float(step.loss), "grad_norm": float(step.grad_norm), "lr": step.lr}
            self._file.write(json.dumps(line).encode() + b"\n")
        self._waiting.clear()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._written = time.monotonic()
