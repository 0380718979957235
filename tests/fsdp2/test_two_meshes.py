"""Data-parallel sharding of parameters that tensor parallelism has distributed, on meshes of two and three axes."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import flatshard
from flatshard import fully_shard, fully_shard_optimizer

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Layer(nn.Module):
    """With 10 in the middle, the rows that tensor parallelism gives to each of two ranks are an odd number."""

    def __init__(self, middle=12, norm=True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()
        self.up = nn.Linear(6, middle)
        self.down = nn.Linear(middle, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(*choices):
    torch.manual_seed(0)
    return nn.Sequential(Layer(*choices), Layer(*choices))


def mesh_of(sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp")[-len(sizes) :])


def shard(model, mesh, **choices):
    names = mesh.mesh_dim_names[:-1]
    data = mesh[names] if len(names) > 1 else mesh[names[0]]
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=data, **choices)
    return fully_shard(model, mesh=data, **choices)


def step(model, optimizer, batch, clip):
    loss = model(batch).square().mean()
    loss.backward()
    norm = clip(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def part(mesh, batch):
    """The rows of this rank; ranks of one tensor-parallel group share theirs."""
    groups = mesh.size() // mesh["tp"].size()
    return batch.chunk(groups)[mesh.get_rank() // mesh["tp"].size()]


OPTIMIZERS = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True, "weight_decay": 0.1}),
]


def _optimizers(rank, world, sizes, numbers):
    """Every implementation of a step takes strided shards, and both ways of clipping give one norm."""
    mesh = mesh_of(sizes)
    data = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    for number in numbers:
        cls, options = OPTIMIZERS[number]
        reference, model = build(10, False), shard(build(10, False), mesh)
        before = len(sizes) - 2
        assert model[0].up.weight.placements == (
            *[Replicate()] * before,
            _StridedShard(0, split_factor=2) if sizes[-1] > 1 else Shard(0),
            Shard(0),
        )
        assert model[0].down.weight.placements == (*[Replicate()] * before, Shard(0), Shard(1))
        ours, theirs = cls(model.parameters(), lr=0.05, **options), cls(reference.parameters(), lr=0.05, **options)
        if number % 2:
            fully_shard_optimizer(ours)
        clip = flatshard.clip_grad_norm_ if number % 2 else torch.nn.utils.clip_grad_norm_
        for batch in data:
            norm = step(model, ours, part(mesh, batch), clip)
            torch.testing.assert_close(norm, step(reference, theirs, batch, torch.nn.utils.clip_grad_norm_))
        for sharded, plain in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(sharded.full_tensor(), plain.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ((2, 2), range(5)),
        pytest.param((1, 2, 2), range(2, 4), marks=pytest.mark.full),  # DTensors and their flat stand-ins
        *(pytest.param(sizes, range(5), marks=pytest.mark.full) for sizes in ((2, 2, 1), (1, 2, 2))),
    ],
)
def test_optimizers_and_clipping_of_strided_shards(ranks, sizes, numbers):
    ranks(4, _optimizers, sizes, numbers)


def _state(rank, world, folder):
    """State dicts, whole and sharded, come back as they went, also on another mesh."""
    mesh = mesh_of((2, 2))
    reference = build()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
    data = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))

    def make(sizes, wrap, **choices):
        model = shard(nn.Sequential(Layer(), Layer()), mesh_of(sizes), **choices)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
        return model, fully_shard_optimizer(optimizer) if wrap else optimizer

    torch.manual_seed(0)
    model, ours = make((2, 2), True)
    for batch in data[:2]:
        step(model, ours, part(mesh, batch), flatshard.clip_grad_norm_)
        step(reference, theirs, batch, torch.nn.utils.clip_grad_norm_)
    weights = get_model_state_dict(model, options=FULL)
    moments = get_optimizer_state_dict(model, ours, options=FULL)
    if rank == 0:
        torch.testing.assert_close(weights, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)
        wanted = get_optimizer_state_dict(reference, theirs)["state"]
        torch.testing.assert_close(moments["state"], wanted, rtol=1e-5, atol=1e-6)
    other, its = make((2, 2), True)
    names = [name for name, _ in other.named_parameters()]
    plain = theirs.state_dict()  # whole tensors, on every rank
    its.load_state_dict(plain)
    step(other, its, part(mesh, data[2]), flatshard.clip_grad_norm_)
    for number, (name, parameter) in enumerate(zip(names, other.parameters())):
        whole = its.state[parameter]["exp_avg"].full_tensor()
        assert whole.shape == plain["state"][number]["exp_avg"].shape, name
        decayed = (whole - 0.9 * plain["state"][number]["exp_avg"]).norm()  # what one clipped gradient adds
        assert decayed <= 0.1 * 0.05 + 1e-6, name
    sharded = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, ours)}
    dcp.save(sharded, checkpoint_id=f"{folder}/dcp")
    flatshard.checkpoint.save(f"{folder}/own", model, ours, progress=False)
    expected = model(data[2]).detach()
    for how, sizes, wrap in [
        ("full", (2, 2), True),
        ("full", (4, 1), False),
        ("dcp", (1, 4), True),
        ("own", (1, 4), True),
    ]:
        other, its = make(sizes, wrap)
        if how == "full":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(other, copy.deepcopy(weights), options=options)
            set_optimizer_state_dict(other, its, copy.deepcopy(moments), options=options)
        elif how == "dcp":
            state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its)}
            dcp.load(state, checkpoint_id=f"{folder}/dcp")
            set_model_state_dict(other, state["model"])
            set_optimizer_state_dict(other, its, state["optimizer"])
        else:
            flatshard.checkpoint.load(f"{folder}/own", other, its, progress=False)
        torch.testing.assert_close(other(data[2]).detach(), expected)
        for mine, loaded in zip(model.parameters(), other.parameters()):
            assert torch.equal(mine.full_tensor(), loaded.full_tensor()), how
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(ours.state[mine][key].full_tensor(), its.state[loaded][key].full_tensor()), how
            assert float(its.state[loaded]["step"]) == 2


def _uneven(rank, world, folder):
    """Strided shards of unequal size are described to checkpoints as what they are."""
    model, reference = shard(build(10), mesh_of((2, 2))), build(10)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/dcp")
    flatshard.checkpoint.save(f"{folder}/own", model, progress=False)
    for sizes in ((2, 2), (4, 1)):
        for own in (True, False):
            torch.manual_seed(1)
            other = shard(nn.Sequential(Layer(10), Layer(10)), mesh_of(sizes))
            if own:
                flatshard.checkpoint.load(f"{folder}/own", other, progress=False)
            else:
                dcp.load(get_model_state_dict(other), checkpoint_id=f"{folder}/dcp")
            for sharded, plain in zip(other.parameters(), reference.parameters()):
                assert torch.equal(sharded.full_tensor(), plain), (sizes, own)


def test_checkpoints_of_uneven_strided_shards(ranks, tmp_path):
    ranks(4, _uneven, str(tmp_path))


def _materialised(rank, world, sizes):
    with torch.device("meta"):
        model = nn.Sequential(Layer(), Layer())
    shard(model, mesh_of(sizes), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    flatshard.materialize(model)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def test_meta_models_get_the_same_values_on_every_mesh(ranks):
    (one,) = ranks(1, _materialised, (1, 1))
    for other in ranks(4, _materialised, (2, 2)):
        assert all(torch.equal(other[name], value) for name, value in one.items())


@pytest.mark.limit(120)
def test_state_dicts_and_checkpoints_of_two_meshes(ranks, tmp_path):
    ranks(4, _state, str(tmp_path))
