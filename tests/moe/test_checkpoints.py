"""Checkpoints of mixtures of experts move between layouts of data, expert and tensor parallelism, and none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import flatshard
from flatshard import Experts, fully_shard_optimizer, shard_model
from tests.moe.cases import Model, Stacked, build, meshes, spread

pytestmark = pytest.mark.limit(120)


def make(layout, seed):
    """A model that is sharded over (dp, ep, tp), experts held as DTensors or plain, and its optimizer."""
    torch.manual_seed(seed)
    model = Model()
    if layout is None:
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    dp, ep, tp, held = layout
    if tp == 1:
        dense, sparse = meshes(dp, ep)
        edp, apart = sparse["edp"], sparse["ep"] if held == "plain" else None
        spread(model, sparse["ep"], held)
    else:
        dense = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        sparse = init_device_mesh("cpu", (dp // ep, ep, tp), mesh_dim_names=("edp", "ep", "tp"))
        edp, apart = sparse["edp"], None
        parallelize_module(model, dense["tp"], {"inside": ColwiseParallel()})
        for block in model.blocks:
            experts = block.mixture.experts
            for name, dim in (("up", 2), ("down", 1)):
                cut = distribute_tensor(getattr(experts, name).data, sparse["ep", "tp"], [Shard(0), Shard(dim)])
                setattr(experts, name, nn.Parameter(cut))
        dense = dense["dp"]
    shard_model(model, mesh=dense, experts=Experts([Stacked], edp, apart))
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(model, optimizer):
    found = {name: whole(p.detach()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found.update({f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()})
    return found


def step(model, optimizer):
    """Values of a step that do not depend on how anything is cut."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = (parameter * (number + 1)).detach()
    optimizer.step()
    optimizer.zero_grad()


LAYOUTS = [
    (4, 2, 1, "dtensor"),
    (4, 4, 1, "plain"),
    (2, 2, 2, "dtensor"),
    None,
    (4, 1, 1, "plain"),
    (2, 1, 2, "dtensor"),
]


def _move(rank, world, folder):
    model, optimizer = make(LAYOUTS[-1], 0)
    for number, layout in enumerate(LAYOUTS):
        step(model, optimizer)
        flatshard.checkpoint.save(f"{folder}/{number}", model, optimizer, progress=False)
        expected = state(model, optimizer)
        model, optimizer = make(layout, number + 1)
        flatshard.checkpoint.load(f"{folder}/{number}", model, optimizer, progress=False)
        found = state(model, optimizer)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (layout, name)
    flatshard.checkpoint.verify(f"{folder}/0")


def test_weights_and_optimizer_state_move_between_layouts(ranks, tmp_path):
    ranks(4, _move, str(tmp_path))


def _alone(rank, world, folder):
    """One process without any sharding loads what four have saved."""
    model, optimizer = make(None, 5)
    flatshard.checkpoint.load(f"{folder}/1", model, optimizer, progress=False)
    return state(model, optimizer)


def _saved(rank, world, folder):
    model, optimizer = make(LAYOUTS[1], 0)
    step(model, optimizer)
    flatshard.checkpoint.save(f"{folder}/1", model, optimizer, progress=False)
    dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=f"{folder}/dcp")  # fmt: skip
    other, its = make(LAYOUTS[0], 3)
    step(other, its)
    loaded = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its)}
    dcp.load(loaded, checkpoint_id=f"{folder}/dcp")
    expected = state(model, optimizer)
    for name, value in loaded["model"].items():
        assert torch.equal(whole(value), expected[name]), name
    return expected


def test_one_process_loads_what_four_saved_and_dcp_moves_between_layouts_too(ranks, tmp_path):
    saved = ranks(4, _saved, str(tmp_path))[0]
    (loaded,) = ranks(1, _alone, str(tmp_path))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert list(dict(build().named_parameters())) == [name for name in saved if "/" not in name]
