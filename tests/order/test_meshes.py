"""Units on different meshes under one root, and ranks that differ on one axis of a mesh only."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import fully_shard
from tests.order.cases import DIM, backward_of_all, compare, grads_of, make, optimizer_of, rows, shard, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


class Layer(nn.Module):
    """A part that all ranks share and an expert, of which the ranks of one expert-parallel place have the same one."""

    def __init__(self, number: int, place: int) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        with torch.random.fork_rng():
            torch.manual_seed(10 * number + place)
            self.expert = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense(x))
        return x + torch.tanh(self.expert(x))


class Mixture(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, place) for number in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _two_meshes(rank, world, names):
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=names[:1])
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=names[1:])
    place = rank % 2
    model, references = make(Mixture, place), [make(Mixture, p) for p in range(2)]
    for layer in model.layers:
        fully_shard(layer.expert, mesh=sparse[names[1]])
        fully_shard(layer, mesh=dense)
    fully_shard(model, mesh=dense)
    optimizers = [optimizer_of(m.parameters()) for m in (model, *references)]
    for step in range(3):
        model(rows(rank, step)).square().mean().backward()
        for p, reference in enumerate(references):  # each expert sees the data of two ranks
            backward_of_all([reference(rows(r, step)).square().mean() for r in (p, p + 2)])
        for parameters in zip(*(reference.named_parameters() for reference in references)):
            if "expert" not in parameters[0][0]:
                mean = torch.stack([p.grad for _, p in parameters]).mean(0)
                for _, p in parameters:
                    p.grad = mean.clone()
        compare(grads_of(model), grads_of(references[place]), f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(weights_of(model), weights_of(references[place]), "weights")


@pytest.mark.parametrize("names", [("dp", "edp", "ep"), ("data", "replicate", "expert"), ("a", "b", "c")], ids="-".join)
def test_units_on_two_meshes_train_as_one_process(interpreters, names):
    interpreters(4, _two_meshes, names)


class Skipping(nn.Module):
    """Two blocks, of which this rank runs those that it is told to."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return self.head(x)


def two_steps(model, rank):
    for step in range(2):
        model(rows(rank, step)).sum().backward()


def _one_rank_differs(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make(Skipping, (1,) if rank == 3 else (0, 1)), mesh=mesh)
    with pytest.raises(RuntimeError, match=r"order|unit"):
        two_steps(model, rank)


def test_all_ranks_raise_where_one_differs_on_one_axis(interpreters):
    interpreters(4, _one_rank_differs)
