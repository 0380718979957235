"""How experts are cut and over which mesh: by waste, by parameter, by model; and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flatshard
from flatshard import Experts, Sharding, fully_shard, shard_model
from flatshard.engine.units.unit import unit_of
from flatshard.rehearsal import rehearse
from tests.moe.cases import DIM, Mixture, Model, Stacked, build, meshes, spread


class Wide(nn.Module):
    """8 stacked experts, a matrix, and one of few rows that is too small to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(8, 512, 1024))
        self.router = nn.Linear(512, 8, bias=False)
        self.out = nn.Linear(1024, 512, bias=False)


def on_meta() -> Wide:
    with torch.device("meta"):
        return Wide()


def test_fewer_experts_than_ranks_are_cut_across():
    with rehearse(64, "free"):
        chosen, auto, plain, given, flat = (on_meta() for _ in range(5))
        table = shard_model(chosen)
        fully_shard(auto, layout="auto")
        fully_shard(plain)
        shard_model(given, shard_placement_fn=lambda p: Shard(2) if p.dim() == 3 else None)
        shard_model(flat, layout="flat")
        assert flat.experts.placements == (Shard(0),)
    payload = sum(p.numel() for p in on_meta().parameters())
    with rehearse(64, "free"):
        square = init_device_mesh("cpu", (8, 8), mesh_dim_names=("outer", "inner"))
        for layout in ("tensor", "auto"):  # of two axes that both cut, HFSDP
            both = on_meta()
            table = shard_model(both, mesh=square, outer_strategy="optim", layout=layout)
            assert [placement.dim for placement in both.experts.placements] == [1, 1]
            assert table.bytes_per_rank == pytest.approx(4 * payload / 64, rel=0.01)
    for model in (chosen, auto):
        assert model.experts.placements == (Shard(1),)
        assert model.router.weight.placements == model.out.weight.placements == (Shard(0),)
    assert table.bytes_per_rank == pytest.approx(4 * payload / 64, rel=0.01)
    assert "padding" in str(table)
    assert plain.experts.placements == (Shard(0),)  # as PyTorch does
    assert given.experts.placements == (Shard(2),)
    assert given.out.weight.placements == (Shard(0),)


def test_experts_of_one_rank_are_cut_by_the_largest_part_of_any():
    """All ranks must cut on the same dim, also where expert parallelism leaves some of them fewer experts."""
    with rehearse(32, "free", rank=31):
        mesh = init_device_mesh("cpu", (8, 4), mesh_dim_names=("edp", "ep"))
        model = on_meta()
        stacked = torch.empty(9, 512, 1024, device="meta")
        model.experts = nn.Parameter(distribute_tensor(stacked, mesh["ep"], [Shard(0)]))
        assert model.experts.to_local().shape[0] == 0  # the others have three each
        fully_shard(model, mesh=mesh["edp"], layout="auto")
        assert model.experts.placements == (Shard(1), Shard(0))


def _placed(rank, world):
    dense, sparse = meshes(4, 2)
    edp, ep = sparse["edp"], sparse["ep"]
    model = spread(build(), ep, "plain")
    table = shard_model(model, mesh=dense, experts=Experts(["tests.moe.cases.Stacked"], edp, ep))
    assert {(row.unit, row.mesh) for row in table.rows} == {
        ("(root)", "dp 4"), *((f"blocks.{number}", mesh) for number in range(2) for mesh in ("dp 4", "edp 2"))
    }  # fmt: skip
    experts, router = model.blocks[0].mixture.experts, model.blocks[0].mixture.router
    assert experts.up.shape == (8, DIM, 8)
    assert experts.up.device_mesh.mesh_dim_names == ("edp", "ep")
    assert experts.up.to_local().shape[0] == 2
    assert router.gate.weight.device_mesh == dense
    unit = unit_of(model.blocks[0])
    assert [group.mesh for group in unit.groups] == [dense, edp]
    assert [group.gradients.scale for group in unit.groups] == ["mean", 1 / 4]
    assert unit_of(model).intent.reduces_unused is False
    assert unit.intent.reduces_unused is True
    model.blocks[0].unshard()
    assert type(experts.up) is nn.Parameter
    assert experts.up.shape == (4, DIM, 8)  # in forward, this rank's
    model.blocks[0].reshard()
    # A mesh of two axes beside experts on one: each has its placements of the strategy.
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = spread(build(), ep, "dtensor")
    shard_model(model, mesh=hybrid, experts=Experts([Stacked], edp), outer_strategy="no_shard")
    assert model.output.weight.placements == (Replicate(), Shard(0))
    assert len(model.blocks[0].mixture.experts.up.placements) == 2


def test_experts_and_the_rest_have_meshes_of_their_own(ranks):
    ranks(4, _placed)


def _refused(rank, world):
    dense, sparse = meshes(2, 2)
    edp, ep = sparse["edp"], sparse["ep"]
    model = build()
    before = dict(model.named_parameters())
    for experts, error, text in [
        (Stacked, TypeError, "flatshard.Experts"),
        (Experts([nn.LSTM], edp), ValueError, "experts: Model contains no module of LSTM"),
        (Experts(["no.such.Module"], edp), ValueError, "experts: cannot import"),
        (Experts([3], edp), TypeError, "experts: 3 is not a subclass of nn.Module"),
    ]:
        with pytest.raises(error, match=text):
            shard_model(model, mesh=dense, experts=experts)
    for wrong, error, text in [
        (lambda: Experts("Stacked", edp), ValueError, "list of classes"),
        (lambda: Experts([], edp), ValueError, "list of classes"),
        (lambda: Experts([Stacked], None), TypeError, "DeviceMesh"),
        (lambda: Experts([Stacked], edp, sparse), ValueError, "apart has 2 axes"),
        (lambda: Sharding("0"), TypeError, "an int"),
        (lambda: Sharding(mesh=3), TypeError, "DeviceMesh"),
        (lambda: fully_shard(model, mesh=dense, data_mesh=2), TypeError, "data_mesh=2"),
        (lambda: fully_shard(model, shard_placement_fn=lambda p: Sharding(7)), ValueError, "whose shape is"),
        (lambda: shard_model(model, shard_placement_fn=3), TypeError, "function"),
    ]:
        with pytest.raises(error, match=text):
            wrong()
    assert all(p is before[name] for name, p in model.named_parameters())
    parallel = spread(build(), ep, "dtensor").blocks[0].mixture
    with pytest.raises(ValueError, match=r"not supported for parameter 'experts.up'"):
        fully_shard(parallel, mesh=dense, shard_placement_fn=lambda p: Sharding(apart=ep) if p.dim() > 2 else None)


def test_mistakes_are_refused_and_change_nothing(ranks):
    ranks(2, _refused)


def _meta(rank, world, ep):
    """A model on the meta device gets the same experts under any expert parallelism."""
    dense, sparse = meshes(world, ep)
    with torch.device("meta"):
        model = Model(1)
    held = torch.empty(8 // ep, DIM, 8, device="meta")
    experts = model.blocks[0].mixture.experts
    experts.up, experts.down = nn.Parameter(held), nn.Parameter(held.transpose(1, 2).contiguous())
    shard_model(model, mesh=dense, experts=Experts([Stacked], sparse["edp"], sparse["ep"]))
    flatshard.materialize(model)
    assert isinstance(model.blocks[0].mixture, Mixture)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def test_meta_models_get_the_same_experts_on_every_mesh(ranks):
    (one,) = ranks(1, _meta, 1)
    for other in ranks(4, _meta, 2):
        assert all(torch.equal(other[name], value) for name, value in one.items())
