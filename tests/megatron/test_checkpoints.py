"""Checkpoints of the Megatron-FSDP surface: from any number of ranks to any other, and to flatshard's own."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import flatshard
from flatshard.megatron import fully_shard_model, fully_shard_optimizer
from flatshard.megatron.uneven_dtensor import (
    get_state_dict,
    make_uneven_dtensor,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    validate_uneven_dtensor,
)
from tests.dist.models import Block, batches, loss_of, make_net

ROWS = 8
CASES = {
    "tensor": {"zero_dp_strategy": 3},
    "flat": {"zero_dp_strategy": 3, "layout": "flat", "preproc_state_dict_for_dcp_ckpt": False},
    "optim": {"zero_dp_strategy": 1},
    "hfsdp": {"zero_dp_strategy": 3, "outer_dp_sharding_strategy": 1, "dp_outer_dim": "outer"},
}


def built(case, world, seed=0):
    given = dict(CASES[case])
    if case == "hfsdp":
        given["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "dp"))
        given["dp_shard_dim"] = "dp"
    model = fully_shard_model(make_net(seed, depth=1), fsdp_unit_modules=[Block], **given)
    preproc = given.get("preproc_state_dict_for_dcp_ckpt", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=preproc)


def values(model):
    return {name: uneven_dtensor_to_full_tensor(p.detach()) for name, p in model.named_parameters()}


def moments(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: uneven_dtensor_to_full_tensor(entry["exp_avg"]) for p, entry in optimizer.state.items()}


def _save(rank, world, case, folder):
    model, optimizer = built(case, world)
    loss_of(model, next(batches(1, ROWS)).chunk(world)[rank]).backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "dcp")
    flatshard.checkpoint.save(folder / "own", model, optimizer)
    return values(model), moments(model, optimizer)


def _load(rank, world, case, folder):
    found = []
    model, optimizer = built(case, world, seed=1)
    if not CASES[case].get("preproc_state_dict_for_dcp_ckpt", True):  # then the caller sees to it that there is state
        loss_of(model, next(batches(1, ROWS)).chunk(world)[rank]).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    found.append((values(model), moments(model, optimizer)))
    model, optimizer = built(case, world, seed=2)
    flatshard.checkpoint.load(folder / "own", model, optimizer)
    found.append((values(model), moments(model, optimizer)))
    # and without this surface, under the model's own names
    plain = flatshard.fully_shard(make_net(3, depth=1))
    flatshard.checkpoint.load(folder / "own", plain)
    theirs = flatshard.checkpoint.renamed(get_model_state_dict(plain), add="module.")
    dcp.load({"model": theirs}, checkpoint_id=folder / "dcp")
    set_model_state_dict(plain, flatshard.checkpoint.renamed(theirs, remove="module."))
    found.append(({f"module.{name}": p.full_tensor() for name, p in plain.named_parameters()}, found[0][1]))
    return found


@pytest.mark.parametrize(
    ("saved", "worlds", "loaded"), [("flat", (4, 2), "tensor"), ("tensor", (2, 4), "hfsdp"), ("hfsdp", (4, 2), "optim")]
)
def test_from_some_ranks_to_others(ranks, tmp_path, saved, worlds, loaded):
    weights, state = ranks(worlds[0], _save, saved, tmp_path)[0]
    for got in ranks(worlds[1], _load, loaded, tmp_path)[0]:
        for wanted, found in zip((weights, state), got):
            assert wanted.keys() == found.keys()
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def _uneven(rank, world):
    """The helpers on shards that are not torch.chunk's."""
    model, _ = built("flat", world)
    reference = make_net(depth=1)
    state = preprocess_state_dict_for_uneven_dtensor({"model": {"deep": model.state_dict()}})["model"]["deep"]
    ragged = 0
    for (name, tensor), plain in zip(state.items(), reference.state_dict().values()):
        validate_uneven_dtensor(tensor)
        assert torch.equal(uneven_dtensor_to_full_tensor(tensor), plain), name
        assert torch.equal(redistribute_uneven_dtensor_to_replicated(tensor).to_local(), plain)
        ragged += type(tensor).__name__ == "RaggedDTensor"
        if tensor.dim():
            parts = list(split_dtensor(tensor, 3, dim=0, update_uneven_dtensor_chunk_meta=True))
            for part, rows in zip(parts, plain.split(3), strict=True):
                assert torch.equal(uneven_dtensor_to_full_tensor(part), rows), name
    assert ragged


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_dtensor_helpers_on_ragged_shards(ranks, world):
    ranks(world, _uneven)


def _made(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(20.0).view(10, 2)
    parts = whole.split([1, 9])
    first = make_uneven_dtensor(parts[rank].flatten(), (10, 2), mesh, [Shard(0)], post_process_uneven=True)
    box = ((rank, 0), tuple(parts[rank].shape))
    for made in (
        make_uneven_dtensor(parts[rank], whole.shape, mesh, [Shard(0)], copy_chunk_meta_from=first),
        make_uneven_dtensor(parts[rank], whole.shape, mesh, [Shard(0)], chunk_metadata=box),
        first,
    ):
        (found,) = made.__create_chunk_list__()
        assert (tuple(found.offsets), tuple(found.sizes)) == box
        assert torch.equal(uneven_dtensor_to_full_tensor(made), whole)
    with pytest.raises(ValueError, match="2 placements were given"):
        make_uneven_dtensor(whole, whole.shape, mesh, [Shard(0), Shard(1)])
    # of a module that somebody else has cut unevenly, and of flatshard's own
    holder = nn.Module()
    local = make_uneven_dtensor(parts[rank], whole.shape, mesh, [Shard(0)])
    holder.weight = nn.Parameter(local)
    ours, optimizer = built("flat", world)
    for model, stepped in ((holder, torch.optim.SGD(holder.parameters(), lr=0.1)), (ours.module, optimizer)):
        state, optim = get_state_dict(model, stepped)
        assert set(optim) == {"state", "param_groups"}
        dcp.save({"model": state}, checkpoint_id=folder / type(model).__name__)
        for name, value in state.items():
            wanted = value.clone() if model is holder else value
            assert torch.equal(
                uneven_dtensor_to_full_tensor(wanted),
                uneven_dtensor_to_full_tensor(dict(model.named_parameters())[name]),
            )
    return uneven_dtensor_to_full_tensor(dict(ours.module.named_parameters())["head.weight"].detach())


def test_uneven_tensors_are_made_and_saved(ranks, tmp_path):
    head = ranks(2, _made, tmp_path)[0]
    for folder, wanted in (("Module", {"weight": torch.arange(20.0).view(10, 2)}), ("FSDPNet", {"head.weight": head})):
        found = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
        dcp.load(found, checkpoint_id=tmp_path / folder)
        assert all(torch.equal(found["model"][name], value) for name, value in wanted.items())


class Extra(nn.Linear):
    """Keeps a state beside its parameters, as modules of TransformerEngine do."""

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        raise AssertionError("left out")


def _extra(rank, world):
    for on in (True, False):
        model = fully_shard_model(
            Extra(2, 2), fsdp_unit_modules=[], zero_dp_strategy=2, preproc_state_dict_for_dcp_ckpt=on
        )
        state = model.state_dict()
        assert ("module._extra_state" in state) != on
        if on:
            assert model.load_state_dict(state, strict=False).missing_keys == ["module._extra_state"]


def test_extra_state_is_left_out(ranks):
    ranks(2, _extra)
