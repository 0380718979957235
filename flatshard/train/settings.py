"""`TrainSettings`: the settings of a run, from flags, a file, or both. `LlamaConfig`: the shape of the bundled model.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

FILE = "settings.yaml"  # the file in the folder of a run that holds its settings
# Settings that may change when a run is continued.
_FREE = {"processes", "steps", "recompute", "loss_chunk", "microbatches", "strategy", "replicas", "layout", "reshard"}
_FREE |= {"offload", "sample", "sample_every", "prompt", "temperature", "checkpoint", "save_every", "keep", "losses"}
_FREE |= {"device_grads", "in_backward", "tensorboard", "wandb", "record", "timeout", "val_rows", "capture", "export"}
_SHAPE = ("width", "layers", "heads", "kv_heads", "ffn", "experts", "experts_per_token")  # of the bundled model


class Mistake(ValueError):
    """A mistake of the user, described in one line."""


@contextmanager
def errors_about(what: str) -> Iterator[None]:
    """A context in which an OSError becomes a Mistake about ``what``."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"{what}: {error.strerror}") from error


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model. ``recompute``: keep only the inputs of each block, and recompute it in backward.

    ``experts``: number of experts per block, of which each token is sent to ``chosen``; 0: a feed-forward layer.
    ``loss_chunk``: compute logits of this many tokens at a time, and again in backward; 0: of all tokens at once.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_tokens: int
    rope_theta: float = 5e5
    recompute: bool = False
    experts: int = 0
    chosen: int = 2
    loss_chunk: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width}: must be an even multiple of heads, {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads}: must be a multiple of kv-heads, {self.kv_heads}")
        if self.experts and not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"experts-per-token {self.chosen}: must be from 1 to the number of experts, {self.experts}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def flops_per_token(self, seq: int) -> float:
        """Model FLOPs of forward and backward per token: 6 per weight of a matrix, and those of causal attention."""
        ffn = 3 * self.width * self.ffn * (self.chosen if self.experts else 1) + self.width * self.experts
        block = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim + ffn
        return 6.0 * (self.layers * block + self.width * self.vocab) + 6.0 * self.layers * self.width * seq


# The comment after a field is its help text.
@dataclass(frozen=True)
class TrainSettings:
    """The settings of a run. Equal settings give equal results, up to rounding, on any number of processes."""

    # Data
    data: Path | None = None  # text, chats (.jsonl), tokens (.bin), a folder of datasets; default: bundled stories
    tokenizer: Path | None = None  # a tokenizer.json; default: that of --model; without either, tokens are bytes
    token_dtype: Literal["uint16", "uint32"] = "uint16"  # dtype of the tokens in a .bin file
    vocab: int | None = None  # vocabulary size of a .bin file or dataset of tokens, if there is no tokenizer
    column: str = "text"  # column of a dataset that holds text or tokens
    end_token: int | None = None  # token to append to each document of a dataset
    # Amounts
    processes: int | None = None  # processes to start on this machine; default: one per GPU, or 2 on CPU
    steps: int = 220  # optimizer steps
    batch: int = 8  # rows per step, divided among the processes
    microbatches: int = 1  # gradient accumulation: micro-batches per step and process
    context: int = 128  # tokens per row
    # The model
    model: Path | None = None  # a Hugging Face checkpoint, or a config.json (new weights); default: a new Llama
    width: int = 128  # width of the model
    layers: int = 4  # number of blocks
    heads: int = 4  # number of attention heads
    kv_heads: int = 2  # number of key/value heads
    ffn: int = 384  # width of a feed-forward layer, or of an expert
    experts: int = 0  # experts per block; 0: an ordinary feed-forward layer
    experts_per_token: int = 2  # experts that each token is sent to
    # Sharding
    strategy: Literal["zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp"] = "zero3"  # what is sharded (docs/plan.md)
    replicas: int | None = None  # size of the outer axis of hsdp and hfsdp; default: the number of nodes
    layout: Literal["tensor", "flat", "auto"] = "tensor"  # layout of parameters in buffers
    reshard: bool = True  # free the weights of a block after forward, and all-gather them again in backward
    offload: bool = False  # keep main weights and optimizer state in host memory
    device_grads: float = 0.0  # with --offload: GB of gradients that stay on the device until the step
    in_backward: bool = False  # step each block when its gradients are complete, and free them (needs --clip 0)
    precision: Literal["float32", "bfloat16"] = "float32"  # compute dtype; main weights stay float32
    gather_format: Literal["none", "int8", "float8", "auto"] = "none"  # encoding of weights in all-gathers
    reduce_format: Literal["none", "int8", "bf16_fp32"] = "none"  # encoding of gradients in reduce-scatters
    rows: bool = False  # send only the rows of the embedding that a batch needs
    recompute: bool = False  # recompute blocks in backward to save memory
    loss_chunk: int = 1024  # tokens whose logits are computed at once; 0: all
    capture: bool = False  # on GPUs: capture the fourth step as one CUDA graph, and replay it from then on
    # Optimization
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"  # adamw8bit: state in 8 bits; muon: for blocks' matrices
    lr: float = 3e-3  # peak learning rate
    schedule: Literal["cosine", "constant"] = "cosine"  # learning rate after warm-up
    warmup: int = 10  # steps of linear warm-up
    weight_decay: float = 0.1  # weight decay of matrices
    clip: float = 1.0  # maximum gradient norm; 0: no clipping
    seed: int = 0  # seed of weights, batches and samples
    # Output
    val_every: int = 0  # validate every N steps, on the last twentieth of the data; 0: never
    val_rows: int = 32  # rows per validation
    sample: int = 240  # tokens of sample text at the end
    sample_every: int = 0  # write a sample every N steps; 0: only at the end
    prompt: str | None = None  # beginning of a sample; default: the first words of the data
    temperature: float = 0.5  # sampling temperature; 0: always take the most likely token
    checkpoint: Path | None = None  # folder for checkpoints; the run continues from the newest one in it
    save_every: int = 50  # save a checkpoint every N steps; the last step is always saved
    keep: int = 2  # number of newest checkpoints to keep
    losses: Path | None = None  # file for losses, a line of JSON per step; a run that is continued appends to it
    tensorboard: Path | None = None  # folder for TensorBoard
    wandb: str | None = None  # project of Weights & Biases
    export: Path | None = None  # folder to write the trained --model to, in Hugging Face's format
    record: Path | None = None  # file to record steps 3 to 5 in, for `flatshard report`
    timeout: int | None = None  # seconds that ranks wait for each other; default: torch's

    def validate(self) -> TrainSettings:
        """The settings themselves; Mistake if a value is not allowed."""
        at_least_one = ("processes", "steps", "batch", "context", "width", "layers", "heads", "kv_heads", "ffn")
        more = ("save_every", "keep", "timeout", "vocab", "microbatches", "experts_per_token", "replicas", "val_rows")
        for name in (*at_least_one, *more):
            self._require(name, lambda value: value >= 1, "at least 1")
        for name in ("warmup", "sample", "experts", "loss_chunk", "val_every", "sample_every", "end_token"):
            self._require(name, lambda value: value >= 0, "0 or more")
        for name in ("weight_decay", "clip", "temperature", "device_grads"):
            self._require(name, lambda value: 0 <= value < math.inf, "0 or more, and finite")
        self._require("lr", lambda value: 0 < value < math.inf, "more than 0, and finite")
        self._require("seed", lambda value: 0 <= value < 2**32, "0 or more, and below 2^32")
        self._require("timeout", lambda value: value <= 10**9, "at most 10^9")
        self._require("prompt", lambda value: value != "", "at least one character")
        uncaptured = {
            "--offload": (self.offload, "a CUDA graph cannot update weights in host memory"),
            "--experts": (self.experts > 0, "the host reads how many tokens each expert gets"),
            f"--optimizer {self.optimizer}": (self.optimizer != "adamw", "it reads its learning rate on the host"),
            "--record": (self.record is not None, "a replayed step cannot be recorded"),
        }
        for flag, (given, reason) in uncaptured.items():
            if self.capture and given:
                raise Mistake(f"--capture with {flag}: {reason}; leave out one of the two")
        if self.in_backward and (self.clip or self.optimizer == "muon"):
            what, reason = f"--clip {self.clip}", "gradients are freed before their norm is known; give --clip 0"
            if not self.clip:
                what, reason = "--optimizer muon", "Muon needs the gradients of all matrices; use another optimizer"
            raise Mistake(f"--in-backward with {what}: {reason}")
        if self.device_grads and (self.in_backward or not self.offload):
            what = "with --in-backward: it frees gradients" if self.in_backward else "without --offload: they all stay"
            raise Mistake(f"--device-grads {what}; leave it out")
        for name in _SHAPE if self.model is not None else ():
            if getattr(self, name) != getattr(TrainSettings, name):
                raise Mistake(f"{flag_of(name)} with --model: the model has a shape of its own; leave it out")
        if self.export is not None and self.model is None:
            raise Mistake(f"--export {self.export}: only a model of Transformers can be exported: give --model")
        if self.replicas is not None and self.strategy not in ("hsdp", "hfsdp"):
            raise Mistake(f"--replicas {self.replicas}: only --strategy hsdp and hfsdp have replicas")
        if self.rows and (self.offload or self.strategy not in ("zero3", "hsdp")):
            what = "--offload" if self.offload else f"--strategy {self.strategy}"
            raise Mistake(
                f"--rows with {what}: is not supported (--rows needs --strategy zero3 or hsdp, without --offload)"
            )
        try:
            self.shape()
        except ValueError as error:
            raise Mistake(str(error)) from error
        return self

    def _require(self, name: str, holds: Any, wanted: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise Mistake(f"{flag_of(name)} {value}: must be {wanted}")

    def shape(self, vocab: int = 256) -> LlamaConfig:
        names = ("width", "layers", "heads", "kv_heads", "ffn", "recompute", "experts", "loss_chunk")
        alike: dict[str, Any] = {name: getattr(self, name) for name in names}
        return LlamaConfig(vocab=vocab, max_tokens=self.context, rope_theta=1e4, chosen=self.experts_per_token, **alike)

    @property
    def tokenizer_file(self) -> Path | None:
        """The file of --tokenizer, or else of the folder --model. None: tokens are bytes."""
        own = None if self.model is None else self.model / "tokenizer.json"
        return own if self.tokenizer is None and own is not None and own.is_file() else self.tokenizer

    @property
    def recipe(self) -> dict[str, str]:
        """The settings, by flag, that must stay the same when a run is continued."""
        return {flag_of(each.name): str(getattr(self, each.name)) for each in fields(self) if each.name not in _FREE}

    @property
    def common(self) -> dict[str, str]:
        """The settings, by flag, that all ranks share. Nodes may have files in different places."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "processes"}
        return {flag_of(name): "a path" if isinstance(each, Path) else str(each) for name, each in given.items()}

    def check_continues(self, recipe: dict[str, str], where: Path) -> None:
        """Mistake unless these settings can continue the run in ``where``, which has this recipe."""
        own = self.recipe
        for flag, value in recipe.items():
            if own.get(flag) != value:
                differs = f"{where} was trained with {flag} {value}, not {own.get(flag)}"
                raise Mistake(f"{differs}; give the same flags, or another --checkpoint")

    def rows_per_rank(self, world: int) -> int:
        """The number of rows per rank and step. Mistake if ``world`` ranks cannot share the batch equally."""
        if self.batch % world:
            raise Mistake(f"--batch {self.batch}: must be a multiple of the number of processes, {world}")
        rows = self.batch // world
        if rows % self.microbatches:
            raise Mistake(f"--microbatches {self.microbatches}: must divide the {rows} rows that each process has")
        if world % (self.replicas or 1):
            raise Mistake(f"--replicas {self.replicas}: must divide the number of processes, {world}")
        return rows

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1. The cosine schedule ends at a tenth of the peak."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    def write(self, path: Path) -> None:
        """Write the settings that differ from the defaults to a file for `--config`."""
        import yaml

        given = {
            each.name: str(value) if isinstance(value, Path) else value
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        }
        text = yaml.safe_dump(given, sort_keys=False) if given else ""
        whole = path.with_suffix(".new")  # if the write fails, or is killed, the run can be continued as before
        whole.write_text(f"# flatshard train --config {path}\n{text}")
        whole.replace(path)


def check_alike(ranks: Sequence[dict[str, str]]) -> None:
    """Mistake if the values of a flag differ between ranks."""
    for rank, values in enumerate(ranks):
        for flag, value in values.items():
            if value != ranks[0].get(flag):
                differs = f"{flag} is {ranks[0].get(flag)} on rank 0, and {value} on rank {rank}"
                raise Mistake(f"{differs}; start all ranks with the same command, and the same data")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(arguments: list[str]) -> TrainSettings:
    """The settings from flags and, for flags that are not given, the file of ``--config``. Mistake if one is wrong.

    A flag that does not exist ends the process with status 2; ``--help`` ends it with 0.
    """
    try:
        import tyro
        import yaml  # noqa: F401
    except ImportError as error:
        raise Mistake(f"{error.name} is not installed: pip install 'flatshard[train]'") from error
    flag = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flag.add_argument("--config", nargs="?", const="")
    given, arguments = flag.parse_known_args(arguments)
    if given.config == "":
        raise Mistake("--config: needs a file (YAML or TOML)")
    default = TrainSettings() if given.config is None else read(Path(given.config))
    settings = tyro.cli(TrainSettings, args=arguments, prog="flatshard train", default=default, description=_ABOUT)
    return settings.validate()


_ABOUT = (
    "Train a language model on N processes of this machine, or as one rank of a job that torchrun or srun has started. "
    "The result does not depend on the number of processes. --config FILE (YAML or TOML) sets options, which flags "
    f"override; a run with --checkpoint FOLDER writes its settings to FOLDER/{FILE}."
)


def read(path: Path) -> TrainSettings:
    """The settings of a file. Mistake if it cannot be read, or has an unknown setting."""
    try:
        with errors_about(f"--config {path}"):
            text = path.read_text()
    except UnicodeDecodeError as error:
        raise Mistake(f"--config {path}: is not text") from error
    given = _parsed(path, text)
    if not isinstance(given, dict):
        raise Mistake(f"--config {path}: must be a mapping of settings, such as 'steps: 100'")
    known = {each.name: each for each in fields(TrainSettings)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "`flatshard train --help` lists them"
            raise Mistake(f"--config {path}: unknown setting {key!r}; {hint}")
        values[name] = _converted(path, known[name], value)
    return TrainSettings(**values)


def _converted(path: Path, field: dataclasses.Field[Any], value: Any) -> Any:
    """``value`` in the type of the field; Mistake if that is not possible."""
    kind = str(field.type)  # a string: annotations are not evaluated in this file
    wanted = kind.removesuffix(" | None")
    if value is None and kind != wanted:
        return None
    if wanted == "Path" and isinstance(value, str):
        return Path(value)
    if wanted == "float" and not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            return float(value)  # YAML reads 3e-4 as a string
    choices = get_args(get_type_hints(TrainSettings)[field.name]) if wanted.startswith("Literal[") else ()
    if type(value).__name__ == wanted or value in choices:
        return value
    must = f"one of {', '.join(choices)}" if choices else f"of type {'str' if wanted == 'Path' else wanted}"
    raise Mistake(f"--config {path}: {field.name} is {value!r}; it must be {must}")


def _parsed(path: Path, text: str) -> Any:
    import yaml

    try:
        return import_module("tomllib").loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except ImportError as error:
        raise Mistake(f"--config {path}: TOML needs Python 3.11 or newer; use a YAML file") from error
    except (ValueError, yaml.YAMLError) as error:
        raise Mistake(f"--config {path}: {' '.join(str(error).split())}") from error
