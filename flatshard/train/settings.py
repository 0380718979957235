"""What a run is told: one frozen record, and the flags made from it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from flatshard.train.model import LlamaConfig


@dataclass(frozen=True)
class Settings:
    """All of a training run. Two runs with equal settings train alike, on any number of processes, up to rounding."""

    data: Annotated[Path | None, "text file to train on (default: bundled stories)"] = None
    processes: Annotated[int | None, "local processes (default: one per GPU, or 2 on CPU)"] = None
    steps: Annotated[int, "optimizer steps"] = 220
    batch: Annotated[int, "rows per step, divided among the processes"] = 8
    context: Annotated[int, "tokens (bytes) per row"] = 128
    width: Annotated[int, "width of the model"] = 128
    layers: Annotated[int, "blocks of the model"] = 4
    heads: Annotated[int, "attention heads"] = 4
    kv_heads: Annotated[int, "heads of keys and values"] = 2
    ffn: Annotated[int, "width inside a feed-forward layer"] = 384
    precision: Annotated[Literal["float32", "bfloat16"], "of compute; main weights stay float32"] = "float32"
    recompute: Annotated[bool, "recompute blocks in backward to save memory"] = False
    lr: Annotated[float, "peak learning rate"] = 3e-3
    schedule: Annotated[Literal["cosine", "constant"], "learning rate after warm-up"] = "cosine"
    warmup: Annotated[int, "steps of linear warm-up"] = 10
    weight_decay: Annotated[float, "AdamW's, on matrices"] = 0.1
    clip: Annotated[float, "largest norm of the gradient; 0 leaves it as it is"] = 1.0
    seed: Annotated[int, "of weights, batches and the sample"] = 0
    sample: Annotated[int, "bytes of sample text at the end"] = 240
    checkpoint: Annotated[Path | None, "folder of checkpoints: the run continues from the newest and writes more"] = (
        None
    )
    save_every: Annotated[int, "steps from one checkpoint to the next; the last step is always saved"] = 50
    keep: Annotated[int, "newest checkpoints to keep"] = 2
    losses: Annotated[
        Path | None, "file for the losses, a line of JSON per step; a run that continues, continues it"
    ] = None
    timeout: Annotated[int | None, "seconds that ranks wait for each other (default: torch's)"] = None
    prompt: Annotated[str | None, "how the sample starts (default: the first words of the text)"] = None
    temperature: Annotated[float, "of the sample; 0 always takes the likeliest byte"] = 0.5

    def __post_init__(self) -> None:
        for name in (
            "processes",
            "steps",
            "batch",
            "context",
            "width",
            "layers",
            "heads",
            "kv_heads",
            "ffn",
            "save_every",
            "keep",
            "timeout",
        ):
            self._require(name, lambda value: value >= 1, "at least 1")
        for name in ("warmup", "weight_decay", "clip", "seed", "sample", "temperature"):
            self._require(name, lambda value: value >= 0 and math.isfinite(value), "0 or more")
        self._require("lr", lambda value: value > 0 and math.isfinite(value), "more than 0")
        self._require("prompt", lambda value: value != "", "at least one character")
        _ = self.model  # raises where the shape is impossible

    def _require(self, name: str, holds: Any, wanted: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise ValueError(f"{flag_of(name)} {value}: must be {wanted}")

    @property
    def model(self) -> LlamaConfig:
        """The shape of the model; its tokens are bytes."""
        return LlamaConfig(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=256,
            max_tokens=self.context,
            rope_theta=1e4,
            recompute=self.recompute,
        )

    @property
    def recipe(self) -> dict[str, str]:
        """What a run must have in common with one that it continues, by flag."""
        free = (
            "processes",
            "steps",
            "recompute",
            "sample",
            "checkpoint",
            "save_every",
            "keep",
            "losses",
            "timeout",
            "prompt",
            "temperature",
        )
        return {flag_of(each.name): str(getattr(self, each.name)) for each in fields(self) if each.name not in free}

    def rows_per_rank(self, world: int) -> int:
        """The rows of one rank in each step. ValueError where ``world`` ranks cannot share them equally."""
        if self.batch % world:
            raise ValueError(f"--batch {self.batch} cannot be divided among {world} processes")
        return self.batch // world

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1. The cosine falls to a tenth of the peak at the last step."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of `Settings`, of its type and with its help."""
    hints = get_type_hints(Settings, include_extras=True)
    for each in fields(Settings):
        kind, text = get_args(hints[each.name])
        if kind is bool:
            parser.add_argument(flag_of(each.name), action="store_true", help=text)
            continue
        if get_origin(kind) in (Union, UnionType):
            kind = get_args(kind)[0]
        choices = get_args(kind) if get_origin(kind) is Literal else None
        parser.add_argument(
            flag_of(each.name),
            type=str if choices else kind,
            choices=choices,
            default=each.default,
            metavar=None if choices else _METAVARS[kind],
            help=text if each.default is None else f"{text} (default: %(default)s)",
        )


_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


def from_options(options: argparse.Namespace) -> Settings:
    """The settings that the flags say. ValueError for values that make no sense."""
    return Settings(**{each.name: getattr(options, each.name) for each in fields(Settings)})
