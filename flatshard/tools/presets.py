"""Names that ``flatshard plan`` knows. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def _eight_bits(shape: tuple[int, ...], size: int) -> float:
    from flatshard.optim.adamw8bit import state_bytes

    return state_bytes(shape)


def _muon(shape: tuple[int, ...], size: int) -> float:
    """One moment for matrices, at their owners, and AdamW's two for all else."""
    return float(size if len(shape) > 1 else 2 * size)


# Tensors of a parameter's size in the state of an optimizer; or bytes for each element of a parameter, by its shape and
# the bytes of a main weight.
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

# FLOP/s at best, dense in bfloat16, of devices whose name has this in it.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}

_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
NAMED: dict[str, dict[str, Any]] = {
    name: {
        **_LLAMA_3,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }
    for name, width, layers, heads, ffn in (
        ("llama-1b", 2048, 16, 32, 8192),
        ("llama-8b", 4096, 32, 32, 14336),
        ("llama-70b", 8192, 80, 64, 28672),
        ("llama-405b", 16384, 126, 128, 53248),
    )
}
NAMED["mixtral-8x7b"] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
NAMED["qwen3-30b-a3b"] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def check_source(source: str) -> None:
    """ValueError where ``source`` is neither a named shape, nor a file or folder, nor module:callable."""
    if source in NAMED or ":" in source:
        return
    path = Path(source)
    if path.suffix != ".json" and not path.is_dir():
        raise ValueError(f"model {source!r}: must be one of {', '.join(NAMED)}, a config.json, or module:callable")
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"model {source!r}: cannot be read as JSON: there is no file {path}")
