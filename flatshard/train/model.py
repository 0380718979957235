"""`Llama`: a decoder-only language model with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatshard.train.settings import LlamaConfig

__all__ = ["Llama", "LlamaConfig", "mean_loss"]


def _recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """``function(*args)``, recomputed in backward. It must not draw random numbers: their state is not restored."""
    out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return out


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, seq, width); tables: (seq, head_dim)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Mixture(nn.Module):
    """A layer of experts: each token is sent to those with the highest scores, and their outputs are averaged by score.

    Every rank has all experts of a block while the block is unsharded.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(config.experts, config.ffn, config.width))
        self.up = nn.Parameter(torch.empty(config.experts, config.ffn, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.ffn))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, experts = self.router(rows).float().softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(rows)
        for number, (gate, up, down) in enumerate(zip(self.gate.unbind(), self.up.unbind(), self.down.unbind())):
            row, place = (experts == number).nonzero(as_tuple=True)
            part = rows[row]
            done = F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            out = out.index_add(0, row, done * weights[row, place, None])
        return out.view_as(x)


class TransformerBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.ffn = Mixture(config) if config.experts else FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute and self.training:
            return _recomputed(self._forward, x, cos, sin)
        return self._forward(x, cos, sin)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Head(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.chunk = config.loss_chunk
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.projection = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the mean cross-entropy of ``targets``."""
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.projection(x)
            return logits
        return mean_loss(self.projection, x, targets, self.chunk)


NO_TARGET = -100  # marks targets that do not count in the loss


def mean_loss(projection: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The mean cross-entropy of ``targets`` for the logits ``projection(x)``, in float32. `NO_TARGET` counts as 0.

    ``chunk``: compute the logits of this many tokens at a time, and again in backward; 0: of all tokens at once.
    """
    rows, labels = x.flatten(0, -2), targets.flatten()

    def summed(part: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(projection(part).float(), label, reduction="sum", ignore_index=NO_TARGET)

    if not chunk or len(labels) <= chunk:
        return summed(rows, labels) / len(labels)
    pairs = zip(rows.split(chunk), labels.split(chunk))
    sums: list[Tensor] = [_recomputed(summed, *pair) for pair in pairs]
    return torch.stack(sums).sum() / len(labels)


class Llama(nn.Module):
    """Returns logits of ``tokens`` (batch, seq) or, with ``targets``, their mean cross-entropy in float32.

    Modules to make units of: ``embed``, each of ``blocks``, ``head``. If it is built on the meta device, call
    ``to_empty`` and `init_weights`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.head = Head(config)
        self.register_buffer("cos", torch.empty(config.max_tokens, config.head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(config.max_tokens, config.head_dim), persistent=False)
        if self.cos.device.type != "meta":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill all parameters and the tables of rotary embeddings. Of a DTensor, only the local shard is drawn.

        Matrices keep the scale of their input. Outputs of blocks start small, so that the residual stream keeps its
        scale too; logits start close to each other, so that the first loss is close to ln(vocab).
        """
        for name, parameter in self.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            scale = parameter.shape[-1] ** -0.5
            if parameter.dim() == 1:
                local.fill_(1.0)
            elif name.endswith((".o.weight", ".down.weight", ".down")):
                local.normal_(std=scale * (2 * self.config.layers) ** -0.5)
            else:
                local.normal_(std=0.2 * scale if name == "head.projection.weight" else scale)
        size, device = self.config.head_dim, self.cos.device
        rates = self.config.rope_theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(self.config.max_tokens, device=device), rates).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq].to(x.dtype), self.sin[:seq].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.head(x, targets)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (..., seq, head_dim); dim i is paired with dim i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
