"""A mixture of experts, in one process and over an axis of expert parallelism, and the meshes of its tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

DIM, FFN, EXPERTS, CHOSEN = 6, 8, 8, 2
Held = Literal["dtensor", "plain", "modules"]


@dataclass(frozen=True)
class Routing:
    """``capacity``: tokens of a rank that an expert takes at most; None: all (dropless).

    ``closed``: experts that no token is sent to. ``aux``: the weight of the loss that balances them.
    """

    capacity: int | None = None
    closed: tuple[int, ...] = ()
    aux: float = 0.1


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, got, sent, group):
        ctx.splits = sent, got, group
        result = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), got, sent, group=group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, *ctx.splits), None, None, None


def exchange(x: torch.Tensor, got: list[int], sent: list[int], group: Any) -> torch.Tensor:
    """Send rows to the ranks of a group, so many to each, and get so many of each; gradients go the way back."""
    return _Exchange.apply(x, got, sent, group)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.routing = Routing()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens x chosen: weights and experts; and the auxiliary loss."""
        logits = self.gate(x)
        shut = torch.zeros(EXPERTS).index_fill_(0, torch.tensor(self.routing.closed, dtype=torch.long), -torch.inf)
        probabilities = (logits + shut).softmax(-1)
        weights, chosen = probabilities.topk(CHOSEN)
        sent = F.one_hot(chosen, EXPERTS).sum(1).float().mean(0)
        aux = self.routing.aux * EXPERTS * (sent * probabilities.mean(0)).sum()
        return weights / weights.sum(-1, keepdim=True), chosen, aux


class Stacked(nn.Module):
    """Experts in two tensors (experts, in, out)."""

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, DIM, FFN))
        self.down = nn.Parameter(torch.empty(count, FFN, DIM))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Tokens that are sorted by expert; so many of each. What an expert gets no token of is not used."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = []
        for expert, part in enumerate(x.split(counts)):
            parts.append(torch.tanh(part @ up[expert]) @ down[expert] if len(part) else part)
        return torch.cat(parts)


class Expert(nn.Module):
    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up) @ self.down


class Listed(nn.Module):
    """Experts as modules."""

    def __init__(self, stacked: Stacked) -> None:
        super().__init__()
        self.each = nn.ModuleList(Expert(up, down) for up, down in zip(stacked.up.data, stacked.down.data))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = zip(self.each, x.split(counts))
        return torch.cat([expert(part) if len(part) else part for expert, part in parts])


class Mixture(nn.Module):
    """A router, experts of which this rank has some, and one that all tokens go through."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts: nn.Module = Stacked()
        self.shared = nn.Linear(DIM, DIM)
        self.group: Any = None  # of expert parallelism
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen, self.aux = self.router(x)
        order = chosen.flatten().argsort(stable=True)
        expert, token = chosen.flatten()[order], order // CHOSEN
        if self.router.routing.capacity is not None:
            place = torch.cat([torch.arange(len(run)) for run in expert.split(_counts(expert))])
            kept = place < self.router.routing.capacity
            order, expert, token = order[kept], expert[kept], token[kept]
        mixed = self.shared(x)
        done = self._exchange(x[token], _counts(expert))
        return mixed.index_add(0, token, done * weights.flatten()[order, None])

    def _exchange(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Send tokens to the ranks that have their experts, and bring what those make of them back."""
        if self.group is None:
            return self.experts(x, counts)
        ranks = self.group.size()
        sent = torch.tensor(counts).view(ranks, -1)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)  # the host waits for this
        out, back = sent.sum(1).tolist(), got.sum(1).tolist()
        arrived = exchange(x, back, out, self.group)
        by_expert = torch.repeat_interleave(torch.arange(got.shape[1]).repeat(ranks), got.flatten()).argsort(
            stable=True
        )
        done = self.experts(arrived[by_expert], got.sum(0).tolist())
        there = torch.empty_like(done).index_copy(0, by_expert, done)
        return exchange(there, out, back, self.group)


def _counts(expert: torch.Tensor) -> list[int]:
    return torch.bincount(expert, minlength=EXPERTS).tolist()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mixture = Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.norm(x))


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inside = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.output = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of a rank: of its tokens, and of its routers."""
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x).square().mean() + sum(block.mixture.aux for block in self.blocks)

    def route(self, routing: Routing) -> None:
        for block in self.blocks:
            block.mixture.router.routing = routing


def build(depth: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(depth)


def spread(model: Model, ep: DeviceMesh, held: Held) -> Model:
    """Leave each rank of ``ep`` its part of the experts, held in one of three collectives."""
    place, count = ep.get_local_rank(), EXPERTS // ep.size()
    for block in model.blocks:
        mixture = block.mixture
        mixture.group = ep.get_group()
        for name in ("up", "down"):
            whole = getattr(mixture.experts, name).data
            part = whole.narrow(0, place * count, count).clone()
            made = distribute_tensor(whole, ep, [Shard(0)]) if held == "dtensor" else part
            setattr(mixture.experts, name, nn.Parameter(made))
        if held == "modules":
            mixture.experts = Listed(mixture.experts)
    return model


def meshes(dp: int, ep: int, tp: int = 1) -> tuple[DeviceMesh, DeviceMesh]:
    """That of all ranks with data, and (edp, ep) for experts, of which the first axis has the same ones."""
    dense = init_device_mesh("cpu", (dp,), mesh_dim_names=("dp",))
    return dense, init_device_mesh("cpu", (dp // ep, ep), mesh_dim_names=("edp", "ep"))


def listed_as_stacked(name: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the experts that ranks hold as modules, one of the stacked tensors."""
    before, _, last = name.rpartition(".")
    locals_ = []
    for number in range(EXPERTS):
        key = f"{before}.each.{number}.{last}"
        if key in state:
            locals_.append(state[key])
    ranks = EXPERTS // len(locals_)  # each has the experts of all ranks one after another
    return torch.stack([locals_[i].chunk(ranks)[rank] for rank in range(ranks) for i in range(len(locals_))])
