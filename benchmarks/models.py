"""A Llama-shaped language model: RMSNorm, RoPE, grouped-query attention through SDPA, SwiGLU, untied head.

The parts that data parallelism shards one by one are ``embed``, each of ``blocks``, and ``head`` (final norm and output
projection).  Built on the meta device it is made real by ``to_empty`` and :meth:`Llama.init_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaConfig:
    """``recompute`` checkpoints every block (non-reentrant), inside whatever hooks a system puts on the block."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 128256
    max_tokens: int = 8192
    rope_theta: float = 5e5
    recompute: bool = False

    def flops_per_token(self, seq: int) -> float:
        """Model FLOPs of forward and backward: 6 per weight of a matrix product, and causal attention's."""
        head = self.width // self.heads
        block = 2 * self.width * (self.heads + self.kv_heads) * head + 3 * self.width * self.ffn
        return 6.0 * (self.layers * block + self.width * self.vocab) + 6.0 * self.layers * self.width * seq


LLAMA_1B = LlamaConfig(width=2048, layers=16, heads=32, kv_heads=8, ffn=8192)
LLAMA_8B = LlamaConfig(width=4096, layers=32, heads=32, kv_heads=8, ffn=14336)
LLAMA_TINY = LlamaConfig(width=256, layers=4, heads=4, kv_heads=2, ffn=768, vocab=2048, max_tokens=512)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        kv_width = config.kv_heads * self.head_dim
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, seq, width); tables: (seq, head_dim)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute and self.training:
            return checkpoint(self._forward, x, cos, sin, use_reentrant=False)
        return self._forward(x, cos, sin)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Head(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.projection = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class Llama(nn.Module):
    """Logits of ``tokens`` (batch, seq), or with ``targets`` the mean cross-entropy, computed in float32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        head_dim = config.width // config.heads
        self.register_buffer("cos", torch.empty(config.max_tokens, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(config.max_tokens, head_dim), persistent=False)
        if self.cos.device.type != "meta":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill the tables and every parameter; of a DTensor, its local part (so shards of one tensor look alike)."""
        for parameter in self.parameters():
            local = getattr(parameter, "_local_tensor", parameter)
            if parameter.dim() == 1:
                local.fill_(1.0)
            else:
                local.normal_(std=0.02)
        head_dim, device = self.cos.shape[-1], self.cos.device
        rates = self.config.rope_theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(self.config.max_tokens, device=device), rates).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq].to(x.dtype), self.sin[:seq].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (..., seq, head_dim), halves paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
