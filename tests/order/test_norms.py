"""Norms and infinities by name, where ranks have gradients of different parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import flatshard
from flatshard import fully_shard
from tests.order.cases import DIM, backward_of_all, make, rows

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


class Choice(nn.Module):
    """Each rank uses the trunk and some of the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return x + torch.stack([self.branches[number](x) for number in used]).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.choice = nn.Linear(DIM, DIM), Choice()

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return self.choice(torch.tanh(self.first(x)), used)


USED = [(0, 1), (0, 2), (0,), (0, 1, 2)]  # by rank; nobody uses the last branch


def trained(rank, world):
    """A model with gradients, and their local parts: None where this rank has given up what it has not used."""
    model, reference = make(Net), make(Net)
    fully_shard(model.choice)
    fully_shard(model)
    model(rows(rank), USED[rank]).square().mean().backward()
    backward_of_all([reference(rows(r), USED[r]).square().mean() for r in range(world)])
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert (ours.grad is None) == (theirs.grad is None)  # as in one process, on all ranks
    for branch in (each for number, each in enumerate(model.choice.branches) if number not in USED[rank]):
        branch.zero_grad()
    local = {name: None if p.grad is None else p.grad.to_local().clone() for name, p in model.named_parameters()}
    assert (local["choice.branches.2.weight"] is None) == (2 not in USED[rank])  # else there is nothing to test
    return model, reference, local


def _norms(rank, world, order):
    model, reference, local = trained(rank, world)
    found = flatshard.grad_norms(model, order)
    total = flatshard.clip_grad_norm_(model, 1e9, order)
    wanted = {name: p.grad.norm(order).item() for name, p in reference.named_parameters() if p.grad is not None}
    return found, total, wanted, local


@pytest.mark.parametrize("order", [2.0, math.inf], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_norms_by_name_are_the_same_on_all_ranks(interpreters, world, order):
    results = interpreters(world, _norms, order)
    found, total, wanted, _ = results[0]
    assert [result[0] for result in results] == [found] * world
    parts = [local for *_, local in results]
    used = [name for name in parts[0] if any(part[name] is not None for part in parts)]
    assert list(found) == used
    for name, norm in found.items():
        held = [part[name].flatten() for part in parts if part[name] is not None]
        assert norm == pytest.approx(torch.cat(held).norm(order).item(), rel=1e-5), name
        if len(held) == world:
            assert norm == pytest.approx(wanted[name], rel=1e-4), name
    assert torch.tensor(list(found.values())).norm(order).item() == pytest.approx(total.item(), rel=1e-5)


def _nonfinite(rank, world):
    model, _, local = trained(rank, world)
    named = dict(model.named_parameters())
    clean = flatshard.find_nonfinite(model)
    put = []
    for name, bad in (("choice.branches.2.weight", 1), ("choice.branches.0.bias", 0), ("first.weight", world // 2)):
        holds = bad == rank and local[name] is not None and local[name].numel()
        if holds:
            named[name].grad.to_local().view(-1)[0] = math.nan if bad else math.inf
            put.append((name, rank))
    return clean, flatshard.find_nonfinite(model), put


@pytest.mark.parametrize("world", [2, 4])
def test_infinities_are_named_alike_on_all_ranks(interpreters, world):
    results = interpreters(world, _nonfinite)
    put = [item for *_, mine in results for item in mine]
    names = ["first.weight", "choice.branches.0.bias", "choice.branches.2.weight"]
    assert sorted(name for name, _ in put) == sorted(names)
    wanted = sorted(put, key=lambda item: names.index(item[0]))
    for clean, found, _ in results:
        assert clean == []
        assert found == wanted
