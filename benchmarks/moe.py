"""A mixture of experts of Qwen3's shape: the trainer's Llama, with experts of which this rank has its part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Llama, LlamaConfig


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Each token goes to ``chosen`` of ``experts``; ``ffn`` is the width of one. ``ep`` ranks have different ones."""

    experts: int = 0
    chosen: int = 0
    ep: int = 1

    def flops_per_token(self, seq: int) -> float:
        dense = super().flops_per_token(seq)
        routed = 3 * self.width * self.ffn * (self.chosen - 1) + self.width * self.experts
        return dense + 6.0 * self.layers * routed


# Half of the layers of Qwen3-30B-A3B, so that main weights and optimizer state of one rank of 8 leave room on a device.
QWEN_MOE = MixtureConfig(
    2048, layers=24, heads=32, kv_heads=4, ffn=768, vocab=151936, max_tokens=8192, experts=128, chosen=8, ep=8
)
MOE_TINY = MixtureConfig(
    64, layers=3, heads=4, kv_heads=2, ffn=32, vocab=512, max_tokens=512, experts=16, chosen=2, ep=8
)


_ROWS = 8  # of bfloat16, 16 bytes: what kernels for groups of rows want these to be aligned to


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, got: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.splits = sent, got, group
        result = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(result, x, got, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Exchange.apply(grad.contiguous(), *ctx.splits), None, None, None


def exchange(x: Tensor, got: list[int], sent: list[int], group: Any) -> Tensor:
    """Send rows to the ranks of a group; without one, every rank's are its own."""
    return x if group is None else _Exchange.apply(x, got, sent, group)


class Experts(nn.Module):
    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        count = config.experts // config.ep
        self.gate = nn.Parameter(torch.empty(count, config.width, config.ffn))
        self.up = nn.Parameter(torch.empty(count, config.width, config.ffn))
        self.down = nn.Parameter(torch.empty(count, config.ffn, config.width))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows that are sorted by expert; where those of each end."""
        return grouped(F.silu(grouped(x, self.gate, ends)) * grouped(x, self.up, ends), self.down, ends)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its matrix: in one kernel where torch has one for it, which takes bfloat16."""
    if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weights, offs=ends)
    return torch.cat([part @ weight for part, weight in zip(x.tensor_split(ends[:-1].tolist()), weights)])


class Mixture(nn.Module):
    """Dropless: tokens are sent to the ranks of their experts, however many there are. The host waits for how many."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        config, rows = self.config, x.flatten(0, -2)
        weights, chosen = self.router(rows).float().softmax(-1).topk(config.chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        sent = torch.bincount(expert, minlength=config.experts).view(config.ep, -1)
        got = torch.empty_like(sent)
        if self.group is None:
            got.copy_(sent)
        else:
            dist.all_to_all_single(got, sent, group=self.group)
        out, back = torch.stack([sent.sum(1), got.sum(1)]).tolist()  # the host waits
        arrived = exchange(rows[order // config.chosen], back, out, self.group)
        place, ends, size = self._places(got, sum(back))
        inside = arrived.new_zeros(size, arrived.shape[1]).index_copy(0, place, arrived)
        there = self.experts(inside, ends)[place]
        home = exchange(there, out, back, self.group)
        mixed = torch.zeros_like(rows).index_add(
            0, order // config.chosen, home * weights.flatten()[order, None].to(home.dtype)
        )
        return mixed.view_as(x)

    def _places(self, got: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
        """Where each of the rows that have arrived goes, so that they lie by expert; where each expert's end; how many.

        Groups begin at multiples of ``_ROWS``; what that leaves open is the last one's. The host waits for nothing.
        """
        local = got.shape[1]
        expert = torch.arange(local, device=got.device).repeat(len(got))
        expert, order = torch.repeat_interleave(expert, got.flatten(), output_size=rows).sort(stable=True)
        counts, size = got.sum(0), -(-rows // _ROWS) * _ROWS + local * _ROWS
        ends = ((counts + _ROWS - 1) // _ROWS * _ROWS).cumsum(0)
        shift = ends.roll(1).index_fill(0, ends.new_zeros(1), 0) - (counts.cumsum(0) - counts)
        sorted_place = torch.arange(rows, device=got.device) + shift[expert]
        place = torch.empty_like(sorted_place).index_copy(0, order, sorted_place)
        return place, ends.index_fill(0, ends.new_full((1,), local - 1), size).to(torch.int32), size


def mixture(config: MixtureConfig) -> Llama:
    """On the current device; its experts exchange nothing until `connect` tells them with whom."""
    model = Llama(config)
    for block in model.blocks:
        block.ffn = Mixture(config)
    if model.cos.device.type != "meta":
        model.init_weights()
    return model


def connect(model: Llama, group: Any) -> None:
    for block in model.blocks:
        block.ffn.group = group


def is_expert(name: str) -> bool:
    return ".experts." in name
