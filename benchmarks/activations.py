"""What `flatshard plan` says of activations, beside the allocator of a GPU after a forward of the same model.

    python -m benchmarks.activations --models llama-1b qwen3-0.6b --batch 1 --length 4096

Needs a GPU and Transformers. With recompute, the allocator is asked after forward: what the largest block saves while
it runs again in backward is left out of the estimate.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from flatshard.tools.activations import activations_of
from flatshard.tools.presets import NAMED

SHAPES = {
    **NAMED,
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]


def measure(name: str, batch: int, length: int, recompute: bool) -> dict[str, float]:
    """Bytes of both, and the error of the estimate."""
    config = AutoConfig.for_model(**SHAPES[name])
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    estimate = activations_of(shape, _blocks(shape), batch, length, torch.bfloat16)
    expected = sum(estimate.inputs) + estimate.rest if recompute else estimate.saved
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if recompute:
        model.gradient_checkpointing_enable()
    model.train()
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()  # libraries take memory of their own
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    found = torch.cuda.memory_allocated() - before
    del out
    return {"estimated": expected, "allocated": found, "error": expected / found - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-1b", "qwen3-0.6b"], choices=SHAPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    for name in options.models:
        for recompute in (False, True):
            found = measure(name, options.batch, options.length, recompute)
            print(json.dumps({"model": name, "recompute": recompute, **found}))


if __name__ == "__main__":
    main()
