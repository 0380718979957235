"""A unit of several groups, some of them on a mesh of their own, that are idle on some ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.order.cases import BOTH, compare, grads_of, rows

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]
DIM = 4


class Experts(nn.Module):
    """A gate for all ranks, and four experts, of which the ranks of an expert-parallel pair have two each."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM))
        if mesh is not None:
            self.experts = nn.Parameter(distribute_tensor(self.experts.data, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor, mine: slice | None) -> torch.Tensor:
        x = torch.tanh(self.gate(x))
        if mine is None:  # no token came here
            return x
        weights = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts[mine]
        return x + torch.einsum("eij,nj->ni", weights, x)


class Mixture(nn.Module):
    def __init__(self, mesh=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts(mesh) for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor, mine: slice | None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mine)
        return self.head(x)


def _train(rank, world, idle):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    own = _fsdp_common.FSDPMeshInfo(sparse["data"], shard_mesh_dim=0)

    def choose(parameter):
        return _fsdp_common.ShardPlacementResult(Shard(1), own) if parameter.dim() == 3 else None

    models, reference = [Mixture(sparse["expert"]) for _ in BOTH], Mixture()
    for model, by in zip(models, BOTH):
        for layer in model.layers:
            by(layer, mesh=mesh, shard_placement_fn=choose)
        by(model, mesh=mesh).set_reduce_scatter_unused_params(True)
    halves = [slice(0, 2), slice(2, 4)]
    for step, out in enumerate(idle):
        mine = [None if r in out else halves[r % 2] for r in range(world)]
        for model in models:
            model.zero_grad()
            model(rows(rank, step, dim=DIM), mine[rank]).square().mean().backward()
        losses = [reference(rows(r, step, dim=DIM), mine[r]).square().mean() for r in range(world)]
        named = dict(reference.named_parameters())
        found = torch.autograd.grad(sum(losses), list(named.values()), allow_unused=True)
        # The mean of all four ranks, and for each expert of the two that have it.
        wanted = {
            name: torch.zeros_like(p) if grad is None else grad / (2 if "experts" in name else 4)
            for (name, p), grad in zip(named.items(), found)
        }
        for title, model in zip(("ours", "control"), models):
            compare(grads_of(model), wanted, f"{title}, step {step}:")


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has no ShardPlacementResult")
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 of this torch reduces what is used only"
)
@pytest.mark.parametrize("idle", [[(), (0,), (3,), (1, 2)], [(1,), (), (0, 1)]], ids=["busy-at-first", "idle-at-once"])
def test_experts_that_are_idle_on_some_ranks(interpreters, idle):
    interpreters(4, _train, idle)
