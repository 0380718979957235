"""The command ``flatshard train``: what is wrong with its arguments is said before torch is imported."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from flatshard.train import log
from flatshard.train.settings import FILE, Mistake, Settings, parse, read
from flatshard.train.stories import stories


def train(arguments: list[str]) -> int:
    """Train as the arguments say; the exit status."""
    try:
        settings = parse(arguments)
        check(settings)
        from flatshard.train.launch import run

        return run(settings)
    except Mistake as mistake:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun every rank finds the same mistake
            print(f"flatshard train: {mistake}", file=sys.stderr)
        return 2


def started_world() -> int:
    """The number of ranks that torchrun has started, this process among them; 0 where it has not."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 0


def check(settings: Settings) -> None:
    """Mistake where these settings cannot be trained here, before any process is started."""
    world = started_world()
    if world and settings.processes not in (None, world):
        raise Mistake(f"--processes {settings.processes}: torchrun has started {world}; leave it out")
    if world or settings.processes is not None:
        settings.rows_per_rank(world or settings.processes or 1)
    check_data(settings)
    if settings.losses is not None:
        log.check(settings.losses)
    if settings.checkpoint is not None:
        _check_folder(settings, settings.checkpoint)


def check_data(settings: Settings) -> None:
    """Mistake where there is too little to train on."""
    path = settings.data
    try:
        if path is not None and path.exists() and not path.is_file():
            raise Mistake(f"--data {path}: not a file")
        size = len(stories()) if path is None else path.stat().st_size
    except OSError as error:
        raise Mistake(f"--data {path}: {error.strerror}") from error
    if size <= settings.context:
        source = path or "the bundled text"
        raise Mistake(f"{source} has {size} bytes; --context {settings.context} needs more than that")


def _check_folder(settings: Settings, folder: Path) -> None:
    """Mistake where nothing can be saved in the folder, or where it has a run that these settings do not continue."""
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"--checkpoint {folder}: not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Mistake(f"--checkpoint {folder}: cannot be written to: {error.strerror}") from error
    if (folder / FILE).exists() and any(folder.glob("step-*")):
        settings.check_continues(read(folder / FILE).recipe, folder)
