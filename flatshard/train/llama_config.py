"""`LlamaConfig`: the shape of the bundled model. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


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
            raise ValueError(f"experts-per-token {self.chosen}: must be from 1 to experts, {self.experts}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def flops_per_token(self, seq: int) -> float:
        """Model FLOPs of forward and backward per token: 6 per weight of a matrix, and those of causal attention."""
        ffn = 3 * self.width * self.ffn * (self.chosen if self.experts else 1) + self.width * self.experts
        block = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim + ffn
        return 6.0 * (self.layers * block + self.width * self.vocab) + 6.0 * self.layers * self.width * seq
