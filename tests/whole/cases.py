"""Models, optimizers and gradients for the tests of whole matrices; the reference is the same optimizer unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

from flatshard import _torch, fully_shard

DIM = 6


class Block(nn.Module):
    """Matrices of several shapes, one of three parts, a tensor of experts, a vector and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.up = nn.Linear(DIM, 10)
        self.down = nn.Linear(10, DIM, bias=False)
        self.experts = nn.Parameter(torch.empty(4, DIM, DIM))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.scale * torch.tanh(q * k) * v + self.down(F.gelu(self.up(x)))
        return x + torch.einsum("bi,eio->bo", x, self.experts)


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, 13, bias=False)
        rng = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.2, generator=rng)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model: Net, **kwargs: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def inside(name: str, parameter: torch.Tensor) -> bool:
    """The matrices of the blocks, as everybody lets Muon have them."""
    return "blocks" in name and parameter.dim() >= 2


class Spectral(Optimizer):
    """An optimizer of a few lines that needs whole matrices, counts in its groups and on itself, and has odd state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.calls = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes over what it has loaded, beside what it was given, as many do to restore dtypes."""
        super().load_state_dict(state_dict)
        keys, params = (
            [p for g in groups for p in g["params"]] for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, p in zip(keys, params):
            self.state[p] = {name: self.state[p][name] for name in state_dict["state"].get(key, ())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["gram"] = [torch.zeros(p.shape[0], p.shape[0])] if p.dim() > 1 else []
                    state["count"] = torch.tensor(0.0)
                state["count"] += 1
                grad = p.grad
                if p.dim() > 1:
                    flat = grad.flatten(1)
                    state["gram"][0] = 0.9 * state["gram"][0] + flat @ flat.T  # a new tensor every step
                    grad = torch.linalg.solve(state["gram"][0] + torch.eye(p.shape[0]), flat).view_as(p)
                p.mul_(1 - 0.01 * group["lr"]).sub_(grad, alpha=group["lr"] / (1 + 0.1 * group["steps"]))


def muon(params: Any) -> Optimizer:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.1)


def shampoo(params: Any) -> Optimizer:
    return pytest.importorskip("pytorch_optimizer").Shampoo(params, lr=0.01, preconditioning_compute_steps=2)


def soap(params: Any) -> Optimizer:
    return pytest.importorskip("pytorch_optimizer").SOAP(params, lr=0.01, precondition_frequency=3)


def adafactor(params: Any) -> Optimizer:
    return torch.optim.Adafactor(params, lr=0.02, foreach=False)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": muon,
    "spectral": Spectral,
    "shampoo": shampoo,
    "soap": soap,
    "adafactor": adafactor,
}


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Whole gradients by name, the same on every rank; some steps have none for some parameters."""
    rng = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(p.shape, generator=rng) for name, p in model.named_parameters()}
    if step == 2:
        found.pop(next(name for name in found if name.endswith("blocks.1.up.weight")))
    return found


def give(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Let the parameters have gradients, each cut as its parameter is."""
    for name, parameter in model.named_parameters():
        if name not in whole:
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            part = _torch.part_of(whole[name], parameter).to(parameter.device, copy=True)
            parameter.grad = _torch.like_dtensor(parameter, part)
        else:
            parameter.grad = whole[name].to(parameter.device, copy=True)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def assert_equal_bits(ours: nn.Module, reference: nn.Module) -> None:
    """What this rank holds of each parameter is, bit by bit, what the reference has."""
    for (name, parameter), wanted in zip(ours.named_parameters(), reference.parameters(), strict=True):
        local, part = parameter.detach(), wanted.detach()
        if isinstance(parameter, DTensor):
            local, part = parameter.to_local().detach(), _torch.part_of(wanted.detach(), parameter)
        assert local.shape == part.shape, name
        assert torch.equal(bits(local), bits(part)), f"{name}: {(local - part).abs().max()}"
