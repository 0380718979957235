"""The bench of NCCL ranks itself: who the ranks are, what is where, and what a rank that fails leaves to the others."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import fully_shard
from tests.bench import RankError
from tests.nccl.device import moving


def _itself(rank: int, world: int) -> tuple[Any, ...]:
    total = torch.full((3,), rank + 1.0, device="cuda" if torch.cuda.is_initialized() else "cpu")
    dist.all_reduce(total)
    on_host = torch.full((3,), rank + 1.0)
    dist.all_reduce(on_host)
    return os.getpid(), dist.group.WORLD.group_name, os.environ.get("NCCL_HOSTID"), total, on_host


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_are_processes_that_add_up(nccl_ranks, world):
    first, again = (nccl_ranks(world, _itself) for _ in range(2))
    pids, _, hosts, *totals = zip(*first)
    assert len(set(pids)) == world
    assert set(hosts) == {None} or len(set(hosts)) == world  # the former without a GPU
    for total in (*totals[0], *totals[1]):
        assert total.eq(world * (world + 1) / 2).all()
    assert [found[0] for found in again] == list(pids)


def _where(rank: int, world: int, given: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(1)
    made = {"factory": torch.rand(3), "module": nn.Linear(3, 2), "filled": torch.empty(4).normal_(), "given": given}
    mesh = init_device_mesh("cpu", (world,))
    model = fully_shard(made["module"], mesh=mesh)
    model(made["factory"]).sum().backward()
    made.update(module=model.weight.to_local(), gradient=model.weight.grad.to_local())
    kind = "cuda" if torch.cuda.is_initialized() else "cpu"
    assert {value.device.type for value in made.values()} == {mesh.device_type} == {kind}
    assert torch.arange(2, device="cpu").device.type == "cpu"
    return made


def test_what_bodies_make_is_on_the_device_and_has_the_values_of_the_cpu(ranks):
    torch.manual_seed(1)
    wanted = torch.rand(3), nn.Linear(3, 2).weight, torch.empty(4).normal_()
    for number, found in enumerate(ranks(2, _where, torch.arange(5.0))):
        assert torch.equal(found["factory"], wanted[0])
        assert torch.equal(found["module"], wanted[1][number : number + 1].detach())
        assert torch.equal(found["filled"], wanted[2])
        assert torch.equal(found["given"], torch.arange(5.0))


def test_only_tests_and_modules_are_moved():
    meta = torch.device("meta")
    with moving(meta):
        assert torch.zeros(2).is_meta
        assert nn.LayerNorm(2).weight.is_meta
        assert torch.rand(2, generator=torch.Generator(), requires_grad=True).is_leaf
        assert not torch.zeros(2, device="cpu").is_meta
        optimizer = torch.optim.AdamW([weight := nn.Parameter(torch.zeros(2, device="cpu"))])
        weight.grad = weight.detach().clone()
        optimizer.step()
    assert not optimizer.state[weight]["step"].is_meta
    assert not torch.zeros(2).is_meta


def _fails_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("this rank is unlucky")
    total = torch.zeros(1, device="cuda" if torch.cuda.is_initialized() else "cpu")
    dist.all_reduce(total)
    total.item()


def test_a_rank_that_fails_is_shown_and_both_are_replaced(nccl_ranks):
    before = {found[0] for found in nccl_ranks(2, _itself)}
    with pytest.raises(RankError, match=r"rank 1 of 2 raised ValueError: this rank is unlucky"):
        nccl_ranks(2, _fails_on_one)
    assert before.isdisjoint(found[0] for found in nccl_ranks(2, _itself))
