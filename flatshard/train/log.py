"""The log of a run: one line of JSON per step, also if the run was interrupted. This module does not import torch."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flatshard.train.settings import Mistake, TrainSettings, errors_about

if TYPE_CHECKING:
    from torch import Tensor

_BEGINNING = b'{"step": '  # the beginning of every line
_SECONDS = 1.0  # least time between two writes, because each waits for the device


@dataclass(frozen=True)
class Step:
    """One optimizer step. The tensors are scalars and equal on all ranks; reading one waits for the device.

    ``loss``: mean over the whole batch before the update, in nats per token. ``grad_norm``: before clipping.
    None with ``--in-backward``. ``val_loss`` and ``sample``: of the model after the update; None in steps without them.
    """

    number: int
    loss: Tensor
    grad_norm: Tensor | None
    lr: float
    val_loss: Tensor | None = None
    sample: str | None = None


def check_log(path: Path) -> None:
    """Mistake if this file exists and is not the log of a run, or cannot be written."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise Mistake(f"--losses {path}: not a file")  # devices may be endless
    with errors_about(f"--losses {path}"):
        _end_of(path, 0)
        if path.exists():
            path.open("ab").close()
        else:
            check_folder(path.parent)


def check_installed(name: str) -> None:
    """Mistake if the package with the name of this flag is not installed."""
    if find_spec(name) is None:
        raise Mistake(f"--{name}: {name} is not installed: pip install {name}")


def check_folder(folder: Path) -> None:
    """OSError if no file can be created in the folder."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _end_of(path: Path, done: int) -> int:
    """The number of bytes in the log for the steps up to ``done``."""
    end, kept = 0, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
            break  # the process was killed during a write
        try:
            number = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise Mistake(f"--losses {path}: exists and is not the log of a run; give another file") from error
        end += len(line)
        kept = end if number <= done else kept
    return kept


class Log:
    """The log of a run that continues after step ``done``. Lines of later steps in an existing file are removed.

    Numbers are written with all of their bits. They go to --losses, TensorBoard and Weights & Biases, where given.
    """

    def __init__(self, settings: TrainSettings, done: int) -> None:
        self._file: BinaryIO | None = None
        self._board: Any = None
        self._wandb: Any = None
        if settings.losses is not None:
            end = _end_of(settings.losses, done)
            settings.losses.parent.mkdir(parents=True, exist_ok=True)
            self._file = settings.losses.open("ab")
            self._file.truncate(end)
        if settings.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(settings.tensorboard), purge_step=done + 1 if done else None)
        if settings.wandb is not None:
            self._wandb = import_module("wandb").init(project=settings.wandb, config=settings.recipe)
        self._tokens = settings.batch * settings.context
        self._waiting: list[Step] = []
        self._written = time.monotonic()

    def add(self, step: Step) -> None:
        """Add a step. It is written together with the following ones, after `_SECONDS` at the earliest."""
        self._waiting.append(step)
        if time.monotonic() - self._written >= _SECONDS:
            self.write()

    def write(self) -> None:
        """Write all added steps to disk. Call it before a checkpoint is saved, so that no line can be missing."""
        lines = [_line(step) for step in self._waiting]  # waits for the device, so the clock is read after it
        now = time.monotonic()
        speed = round(len(lines) * self._tokens / max(now - self._written, 1e-9))
        for line in lines:
            line["tokens_per_second"] = speed
            if self._file is not None:
                self._file.write(json.dumps(line).encode() + b"\n")
            number = line.pop("step")
            if self._board is not None:
                for name, value in line.items():
                    self._board.add_scalar(name, value, number)
            if self._wandb is not None:
                self._wandb.log(line, step=number)
        self._waiting.clear()
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()
        self._written = now


def _line(step: Step) -> dict[str, Any]:
    values: dict[str, Any] = {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm, "val_loss": step.val_loss}
    return {"step": step.number, **{name: float(value) for name, value in values.items() if value is not None}}
