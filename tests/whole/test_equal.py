"""Optimizers of whole matrices on sharded models equal the unsharded ones, bit for bit, given equal gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard.optim
from flatshard import Sharding, fully_shard, fully_shard_optimizer, whole_optimizer
from tests.whole.cases import DIM, MAKERS, Net, assert_equal_bits, give, gradients, inside, muon, shard


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2


def train(model: Net, reference: Net, optimizer: Any, wanted: Any, steps: int = 10) -> None:
    for step in range(steps):
        whole = gradients(reference, step)
        for each in (model, reference):
            give(each, whole)
        optimizer.step()
        wanted.step()
        for each in (optimizer, wanted):
            each.zero_grad()
    assert_equal_bits(model, reference)
    assert getattr(optimizer, "calls", steps) == steps
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in wanted.param_groups
    ]


def compare(name: str, how: dict[str, Any], choice: dict[str, Any] | None = None, steps: int = 10) -> Any:
    """Train a sharded model and an unsharded one with the same optimizer of matrices."""
    make = MAKERS[name]
    reference = Net()
    model = shard(copy.deepcopy(reference), **how)
    chosen = is_matrix if name == "muon" else lambda name, parameter: True
    params, others = ([p for n, p in each.named_parameters() if chosen(n, p)] for each in (model, reference))
    optimizer = fully_shard_optimizer(make(params), whole=True, bucket_bytes=600, **(choice or {}))
    train(model, reference, optimizer, make(others), steps)
    return optimizer


def _equal(rank: int, world: int, names: list[str], kinds: list[dict[str, Any]], steps: int) -> None:
    for how in kinds:
        for name in names:
            compare(name, how, steps=steps)


LAYOUTS = [{"layout": layout, "strategy": strategy} for layout in ("tensor", "flat") for strategy in range(4)]


def test_equal_to_unsharded(ranks):
    """Two optimizers, two layouts, over two and three ranks; `test_equal_everywhere` has the others."""
    some = [{"layout": "tensor", "strategy": 3}, {"layout": "flat", "strategy": 1}]
    ranks(2, _equal, ["muon", "spectral"], some, 4)
    ranks(3, _equal, ["muon"], some[1:], 4)


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_everywhere(ranks, world, name):
    if name in ("soap", "shampoo"):
        pytest.importorskip("pytorch_optimizer")
    ranks(world, _equal, [name], LAYOUTS, 10)


# Meshes


def _hybrid(rank: int, world: int, kinds: list[dict[str, Any]], steps: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for how in kinds:
        owners = []
        for choice in ("shards", "all"):
            optimizer = compare("muon", {**how, "mesh": mesh}, {"owners": choice}, steps)
            side = optimizer.__dict__["_flatshard_stepper"]
            owners.append(sum(each.is_owned for each in side.matrices) / len(list(side.matrices)))
        if "outer_strategy" not in how:  # two replicas share the work, or do it twice
            assert owners[1] < 0.6 * owners[0], owners


def test_hybrid_meshes(ranks):
    ranks(4, _hybrid, [{}], 2)


@pytest.mark.full
def test_hybrid_meshes_everywhere(ranks):
    kinds = [{"layout": layout, "strategy": strategy} for layout in ("tensor", "flat") for strategy in range(4)]
    ranks(4, _hybrid, [*kinds, {"outer_strategy": "optim"}], 5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _tensor_parallel(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(Layer(), Layer())
    model = copy.deepcopy(reference)
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = []
    for each in (model, reference):
        matrices, others = ([p for p in each.parameters() if (p.dim() == 2) == two] for two in (True, False))
        optimizers.append([muon(matrices), torch.optim.AdamW(others, foreach=False)])
    fully_shard_optimizer(optimizers[0][0], whole=True)
    for step in range(4):
        whole = gradients(reference, step) if step != 2 else {}
        for each, pair in zip((model, reference), optimizers):
            give(each, whole)
            flatshard.optim.CombinedOptimizer(pair).step()
    assert_equal_bits(model, reference)


def test_tensor_parallel_parameters_are_gathered_over_both_axes(ranks):
    ranks(4, _tensor_parallel)


def _by_fsdp2(rank: int, world: int) -> None:
    """Nothing of it is the engine's: parameters that PyTorch's own FSDP2 has sharded have owners, too."""
    reference = Net()
    for block in reference.blocks:
        block.scale = nn.Parameter(torch.ones(1))  # it takes no parameters without dims
    model = copy.deepcopy(reference)
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    torch_fsdp.fully_shard(model)
    optimizers = [whole_optimizer(muon, each, inside, bucket_bytes=500) for each in (model, reference)]
    train(model, reference, *optimizers, steps=4)  # the reference's are plain tensors, of which everybody owns all


@pytest.mark.full
def test_parameters_of_fsdp2(ranks):
    ranks(2, _by_fsdp2)


class Expert(nn.Module):
    """Experts of one rank of expert parallelism, or of all of them; never called."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 8, bias=False), nn.Parameter(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x)


def _experts(rank: int, world: int) -> None:
    """Ranks that hold experts apart, as plain tensors: they are so many matrices, over both meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(0)
    reference = Expert(torch.randn(6, 5, 4))
    model = copy.deepcopy(reference)
    mine = model.experts = nn.Parameter(model.experts.data.chunk(2)[mesh.get_local_rank("ep")].clone())
    sharding = Sharding(mesh=mesh["edp"], apart=mesh["ep"])
    fully_shard(model, shard_placement_fn=lambda p: sharding if p is mine else None)
    assert model.experts.shape == reference.experts.shape
    optimizers = [whole_optimizer(muon, each, bucket_bytes=100) for each in (model, reference)]
    for step in (0, 1, 3):
        whole = gradients(reference, step)
        for each, optimizer in zip((model, reference), optimizers):
            give(each, whole)
            optimizer.step()
    assert_equal_bits(model, reference)
    sides = [optimizer.__dict__["_flatshard_stepper"] for optimizer in optimizers]
    assert [each.name for each in sides[0].matrices] == [each.name for each in sides[1].matrices]
    assert sum(each.is_owned for each in sides[0].matrices) <= 3  # of seven


@pytest.mark.full
def test_experts_apart(ranks):
    ranks(4, _experts)


# Matrices that are parts of parameters


def parts(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What the optimizer is to see of a parameter, written down once more."""
    if tensor.dim() == 3:
        return list(tensor.unbind())
    return list(tensor.split(DIM)) if "qkv" in name else [tensor]


def _parts(rank: int, world: int, how: dict[str, Any]) -> None:
    reference = Net()
    model = shard(copy.deepcopy(reference), **how)
    split = {"*qkv.weight": (DIM, DIM, DIM)}
    optimizer = whole_optimizer(muon, model, inside, split=split, bucket_bytes=500)
    assert all(
        p is q
        for p, q in zip(optimizer.param_groups[0]["params"], [p for n, p in model.named_parameters() if inside(n, p)])
    )
    chosen = {n: p for n, p in reference.named_parameters() if inside(n, p)}
    copies = {n: [nn.Parameter(part.detach().clone()) for part in parts(n, p)] for n, p in chosen.items()}
    wanted = muon([part for listed in copies.values() for part in listed])
    for step in range(4):
        whole = gradients(reference, step)
        give(model, whole)
        for name, listed in copies.items():
            for part, grad in zip(listed, parts(name, whole[name]) if name in whole else [None] * 9):
                part.grad = grad
        optimizer.step()
        wanted.step()
        optimizer.zero_grad()
        assert all(p.grad is None for n, p in model.named_parameters() if inside(n, p))
    for name, parameter in chosen.items():
        for target, part in zip(parts(name, parameter.data), copies[name]):
            target.copy_(part.detach())
    assert_equal_bits(model, reference)


def test_parts_of_parameters_are_matrices(ranks):
    """Experts are a matrix each, and a fused matrix is split; the constructor refuses all that is not a matrix."""
    ranks(3, _parts, {"layout": "flat"})


# Some whole, the rest on shards


def _mixed(rank: int, world: int) -> None:
    """One optimizer, for which it makes no difference: its counters count once, and so do its updates."""
    reference = Net()
    model = shard(copy.deepcopy(reference))
    optimizers = []
    for each in (model, reference):
        named = list(each.named_parameters())
        groups = [{"params": [x for x in named if is_matrix(*x)]}, {"params": [x for x in named if not is_matrix(*x)]}]
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2, foreach=False))
    fully_shard_optimizer(optimizers[0], whole=lambda name, p: p.dim() == 2 and name != "head.weight")
    train(model, reference, *optimizers, steps=3)
    side = optimizers[0].__dict__["_flatshard_stepper"]
    assert {each.name for each in side.matrices} == {n for n, p in reference.named_parameters() if p.dim() == 2} - {
        "head.weight"
    }


def test_some_parameters_whole_and_the_rest_on_shards(ranks):
    ranks(2, _mixed)
