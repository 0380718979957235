"""The command ``flatshard train``. Its arguments are checked before torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flatshard.train import log
from flatshard.train.bundled_text import bundled_text
from flatshard.train.environment import started_world
from flatshard.train.settings import FILE, Mistake, TrainSettings, errors_about, parse, read


def train(arguments: list[str]) -> int:
    try:
        settings = parse(arguments)
        check_settings(settings)
        from flatshard.train.launch import run

        return run(settings)
    except Mistake as mistake:
        # All ranks that torchrun or srun has started find the same mistake, so one per node prints it.
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            print(f"flatshard train: {mistake}", file=sys.stderr)
        return 2


def check_settings(settings: TrainSettings) -> None:
    """Mistake if a run with these settings is not possible. Called before any process is started."""
    world = started_world()
    if world and settings.processes not in (None, world):
        raise Mistake(f"--processes {settings.processes}: torchrun or srun has started {world}; leave the flag out")
    if world or settings.processes is not None:
        settings.rows_per_rank(world or settings.processes or 1)
    check_data(settings)
    if settings.losses is not None:
        log.check_log(settings.losses)
    if settings.tensorboard is not None:
        log.check_installed("tensorboard")
        with errors_about(f"--tensorboard {settings.tensorboard}"):
            log.check_folder(settings.tensorboard)
    if settings.wandb is not None:
        log.check_installed("wandb")
    if settings.export is not None:
        with errors_about(f"--export {settings.export}"):
            settings.export.mkdir(parents=True, exist_ok=True)
            if any(settings.export.iterdir()):
                raise Mistake(f"--export {settings.export}: is not empty; give a new folder")
    if settings.record is not None:
        with errors_about(f"--record {settings.record}"):
            settings.record.open("a").close()
    folder = settings.checkpoint
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise Mistake(f"--checkpoint {folder}: not a folder")
        with errors_about(f"--checkpoint {folder}: cannot be written to"):
            log.check_folder(folder)
        if (folder / FILE).exists() and any(folder.glob("step-*")):
            settings.check_continues(read(folder / FILE).recipe, folder)


_OTHER_TOKENIZERS = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def _refuse_bytes(model: Path) -> None:
    """Mistake if a model has a tokenizer in a file that is not read: it would train on bytes."""
    for name in _OTHER_TOKENIZERS:
        if (model / name).exists():
            write = f"AutoTokenizer.from_pretrained({str(model)!r}).save_pretrained({str(model)!r})"
            raise Mistake(f"--model {model}: has {name}, but no tokenizer.json, which {write} of Transformers writes")


def check_data(settings: TrainSettings) -> None:
    """Mistake if a file does not exist or a text is too short. Other files are checked when they are read."""
    for flag, given in (("data", settings.data), ("tokenizer", settings.tokenizer), ("model", settings.model)):
        if given is not None and not given.exists():
            raise Mistake(f"--{flag} {given}: No such file or directory")
    path = settings.data
    has_tokens = path is not None and (path.suffix == ".bin" or (path.is_dir() and settings.vocab is not None))
    if settings.model is not None and settings.tokenizer_file is None and not has_tokens:
        _refuse_bytes(settings.model)
    if path is not None and path.is_dir() and not any(path.glob("*.json")):
        raise Mistake(f"--data {path}: not a file, nor a dataset that save_to_disk has written")
    read_later = path is not None and (path.is_dir() or path.suffix in (".bin", ".jsonl"))
    if settings.tokenizer_file is not None or read_later:
        return
    size = len(bundled_text()) if path is None else path.stat().st_size
    if size <= settings.context:
        source = path or "the bundled text"
        needs = f"--context {settings.context} needs more: give a smaller --context, or more data"
        raise Mistake(f"{source} has {size} bytes; {needs}")
