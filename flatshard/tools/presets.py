"""Names of models and optimizers for ``flatshard plan``. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def _eight_bits(shape: tuple[int, ...], size: int) -> float:
    from flatshard.optim.adamw8bit import state_bytes

    return state_bytes(shape)


def _muon(shape: tuple[int, ...], size: int) -> float:
    """One moment for matrices, on their owners, and AdamW's two for all other parameters."""
    return float(size if len(shape) > 1 else 2 * size)


# Optimizer state: the number of tensors of a parameter's size, or a function of a parameter's shape and of the bytes of
# a main weight that returns bytes per element.
OPTIMIZERS: dict[str, int | Callable[[tuple[int, ...], int], float]] = {
    "adamw": 2,
    "adamw-8bit": _eight_bits,
    "muon": _muon,
    "adam": 2,
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
}

# Peak FLOP/s, dense in bfloat16, of devices whose name contains this.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
# Configurations in Hugging Face's format.
NAMED: dict[str, dict[str, Any]] = {
    name: {"model_type": kind, **dict(zip(_SIZES, sizes)), **others}
    for name, kind, sizes, others in (
        ("llama-1b", "llama", (2048, 16, 32, 8, 8192, 128256), {}),
        ("llama-8b", "llama", (4096, 32, 32, 8, 14336, 128256), {}),
        ("llama-70b", "llama", (8192, 80, 64, 8, 28672, 128256), {}),
        ("llama-405b", "llama", (16384, 126, 128, 8, 53248, 128256), {}),
        ("mixtral-8x7b", "mixtral", (4096, 32, 32, 8, 14336, 32000), _MIXTRAL),
        ("qwen3-30b-a3b", "qwen3_moe", (2048, 48, 32, 4, 6144, 151936), _QWEN),
    )
}


def config_file(source: str) -> Path:
    """The file of a configuration, which is given by its own path or by that of its folder."""
    path = Path(source)
    return path / "config.json" if path.is_dir() else path


def check_source(source: str) -> None:
    """ValueError unless ``source`` is a named shape, a file or folder, or module:callable."""
    if source in NAMED or ":" in source:
        return
    path = config_file(source)
    if path.suffix != ".json":
        raise ValueError(f"model {source!r}: must be one of {', '.join(NAMED)}, a config.json, or module:callable")
    if not path.is_file():
        raise ValueError(f"model {source!r}: cannot be read as JSON: {path} does not exist")
