"""Parameters that tensor parallelism has distributed are sharded over the data-parallel axis too."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import fully_shard
from flatshard.engine.units.unit import unit_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), nn.Linear(8, 4))


def step(model, optimizer, data):
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _train(rank, world, strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = build(), build()
    for layer in model[:2]:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"], strategy=strategy)
    fully_shard(model, mesh=mesh["dp"], strategy=strategy)
    groups = unit_of(model[0]).groups
    kinds = [all(member.inner is not None for member in group.params) for group in groups]
    assert sorted(kinds) == [False, True]  # the norm, and what tensor parallelism has distributed
    names = [name for name, _ in build().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    flatshard.check_buffers(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, reference)]
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    half = data.chunk(2)[mesh.get_local_rank("dp")]
    for _ in range(3):
        loss = torch.tensor(step(model, optimizers[0], half))
        dist.all_reduce(loss)
        wanted = step(reference, optimizers[1], data)
        assert abs(loss.item() / world - wanted) < 1e-5
    for (name, sharded), plain in zip(model.named_parameters(), reference.parameters()):
        assert isinstance(sharded, DTensor)
        assert sharded.shape == plain.shape
        whole = sharded.full_tensor()
        torch.testing.assert_close(whole, plain.data, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", [2, 3])
def test_tensor_parallel_parameters_train_as_on_one_process(ranks, strategy):
    assert ranks(4, _train, strategy) == [None] * 4


def _flat(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = parallelize_module(Layer(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(ValueError, match="layout='tensor'"):
        fully_shard(layer, mesh=mesh["dp"], layout="flat")


def test_tensor_parallel_parameters_refuse_layout_flat(ranks):
    assert ranks(4, _flat) == [None] * 4
