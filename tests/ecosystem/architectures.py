"""Small models of many architectures of Transformers, from their configs, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

_COMMON = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_DECODER = {**_COMMON, "intermediate_size": 32, "max_position_embeddings": 32, "num_key_value_heads": 1}
_DECODER |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ENCODER_DECODER = {"vocab_size": 64, "d_model": 16, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_LAYERS |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class Architecture:
    model: str  # names of Transformers
    config: str
    options: dict[str, Any]
    inputs: Callable[[torch.Generator], dict[str, torch.Tensor]]
    prompt: tuple[str, ...] = ()  # inputs that `generate` is given; none: it has no such method
    tolerance: float = 1e-4

    def make(self) -> Any:
        torch.manual_seed(0)
        config = getattr(hf, self.config)(**self.options)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)  # ranks and the reference would drop different numbers
        return getattr(hf, self.model)(config).eval()


def _tokens(rng: torch.Generator, rows: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=rng)


def _text(rng: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(rng)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def _two_texts(rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(rng), "labels": _tokens(rng)}


def _pixels(rng: torch.Generator, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=rng)


def _labelled_images(rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(rng), "labels": torch.randint(0, 2, (2,), generator=rng)}


def _image_and_text(rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(rng), "pixel_values": _pixels(rng), "return_loss": True}  # type: ignore[dict-item]


def _image_in_text(rng: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(rng)
    tokens = torch.cat([torch.full((2, 4), 60), tokens.clamp(max=59)], dim=1)
    return {"input_ids": tokens, "labels": tokens, "pixel_values": _pixels(rng), "attention_mask": tokens.ne(0).long()}


def _speech(rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 20, generator=rng), "labels": _tokens(rng)}


_PROMPT = ("input_ids", "attention_mask")
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _DECODER, _text, _PROMPT),
    "llama-tied": Architecture(
        "LlamaForCausalLM", "LlamaConfig", {**_DECODER, "tie_word_embeddings": True}, _text, _PROMPT
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", _DECODER, _text, _PROMPT),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}, _text, _PROMPT),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", _DECODER, _text, _PROMPT),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 8}, _text, _PROMPT),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", {**_DECODER, "num_key_value_heads": 2}, _text, _PROMPT),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0},
        _text,
        _PROMPT,
    ),
    "gpt-neox": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_COMMON, "intermediate_size": 32, "pad_token_id": 0}, _text, _PROMPT
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {**_COMMON, "ffn_dim": 32, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "pad_token_id": 0},
        _text,
        _PROMPT,
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig", {**_COMMON, "intermediate_size": 32}, _text),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_ENCODER_DECODER, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        _two_texts,
        ("input_ids",),
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_ENCODER_DECODER, **_LAYERS, "max_position_embeddings": 32, "forced_eos_token_id": None},
        _two_texts,
        ("input_ids",),
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_ENCODER_DECODER, **_LAYERS, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        _speech,
        ("input_features",),
    ),
    "vit": Architecture("ViTForImageClassification", "ViTConfig", _VISION, _labelled_images),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_COMMON, "intermediate_size": 32, "max_position_embeddings": 32, "eos_token_id": 2},
            "vision_config": _VISION,
            "projection_dim": 8,
        },
        _image_and_text,
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **_DECODER},
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 8},
            "image_token_index": 60,
            "image_token_id": 60,
        },
        _image_in_text,
        ("input_ids", "attention_mask", "pixel_values"),
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4}, _text, _PROMPT
    ),
    "qwen3-moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_DECODER, **_EXPERTS, "num_experts": 4, "head_dim": 8},
        _text,
        _PROMPT,
    ),
    "deepseek-v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            **_EXPERTS,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        _text,
        _PROMPT,
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {**_COMMON, "state_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        _text,
        ("input_ids",),
    ),
}
