"""`dp_mesh_dims`: parameters that are DTensors on the mesh of all parallelism, of which some axes are data-parallel."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import flatshard
from flatshard import DataParallelMeshDims, fully_shard, fully_shard_optimizer


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def split(name, module, mesh):
    """Cut the first layer by columns and the second by rows over the last axis."""
    if not isinstance(module, nn.Linear):
        return
    before = [Replicate()] * (mesh.ndim - 1)
    for key, parameter in list(module.named_parameters()):
        last = Replicate() if key == "bias" else Shard(0) if name == "0" else Shard(1)
        module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, [*before, last])))


def other_dim(parameter):
    return Shard(1) if any(p == Shard(0) for p in parameter.placements) else Shard(0)


def _train(rank, world, sizes, names, dims, parallel, choices):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    reference, model = build(), build()
    distribute_module(model, mesh, split if parallel else None)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **choices)
    flatshard.check_buffers(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    fully_shard_optimizer(optimizers[0])
    coordinate = mesh.get_coordinate()
    copies = world // (sizes[-1] if parallel else 1)
    mine = rank // (sizes[-1] if parallel else 1)
    assert coordinate is not None
    data = torch.randn(2, copies * 2, 6, generator=torch.Generator().manual_seed(1))
    for batch in data:
        part = DTensor.from_local(batch.chunk(copies)[mine], mesh, [Replicate()] * mesh.ndim, run_check=False)
        model(part).square().mean().backward()
        reference(batch).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.5), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, msg=lambda m, n=name: f"{n}: {m}")
    return [(tuple(p.placements), p.device_mesh.mesh_dim_names) for p in model.parameters()]


@pytest.mark.parametrize(
    ("sizes", "names", "dims", "parallel", "choices"),
    [
        pytest.param((2,), ("dp",), {"shard": "dp"}, False, {}, marks=pytest.mark.full),
        ((2,), ("dp",), {"replicate": "dp"}, False, {}),
        ((2, 2), ("rep", "dp"), {"shard": "dp", "replicate": "rep"}, False, {}),
        pytest.param((2, 2), ("a", "b"), {"shard": ("a", "b")}, False, {}, marks=pytest.mark.full),
        ((2, 2), ("dp", "tp"), {"shard": "dp"}, True, {"shard_placement_fn": other_dim}),
        pytest.param(
            (2, 2), ("dp", "tp"), {"shard": "dp"}, True, {"reshard_after_forward": False}, marks=pytest.mark.full
        ),
        pytest.param(  # DTensor takes seconds to think about three axes; the last case has them, too
            *((1, 2, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}, True),
            {"shard_placement_fn": other_dim},
            marks=pytest.mark.full,
        ),
        ((1, 2, 2), ("a", "b", "tp"), {"shard": ("a", "b")}, True, {}),
    ],
)
def test_axes_of_the_parameters_own_mesh(ranks, sizes, names, dims, parallel, choices):
    world = 2 if len(sizes) == 1 else 4
    placed = ranks(world, _train, sizes, names, DataParallelMeshDims(**dims), parallel, choices)[0]
    cut = [any(isinstance(p, Shard) or "Shard" in type(p).__name__ for p in placements) for placements, _ in placed]
    assert all(cut) == ("shard" in dims)
    if not isinstance(dims.get("shard"), tuple):
        assert all(found == names for _, found in placed)


def _refused(rank, world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = build()
    distribute_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("other",)))
    with pytest.raises(ValueError, match="distribute_module"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model = distribute_module(build(), mesh)
    with pytest.raises(ValueError, match="'other'"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="other"))
    with pytest.raises(ValueError, match="has no `shard` axis"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"), strategy=3)
    model[0].weight = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"Expected Replicate.*'0.weight'"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    dist.barrier()


def test_parameters_elsewhere_are_refused(ranks):
    ranks(2, _refused)
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        DataParallelMeshDims()
    assert copy.copy(DataParallelMeshDims(shard="a")).shard_names == ("a",)
