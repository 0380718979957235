"""torch.distributed.checkpoint and its state-dict functions on sharded models: exact, from anywhere to anywhere."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from flatshard import fully_shard_optimizer
from tests.checkpoint.cases import PLACES, ROWS, assert_same, fits, full_state, groups_of, make, shard, trained
from tests.dist.models import train

# (world, place) of who saves and who loads
ENDS = [(world, place) for world in (1, 2, 3, 4) for place in PLACES if fits(place, world)]
PRODUCT = list(itertools.product(ENDS, ENDS))
# every end saves once and loads once, each time with a partner of another kind
SOME = [(ENDS[i], ENDS[(5 * i + 7) % len(ENDS)]) for i in range(len(ENDS))]


def _state(model, optimizer):
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _save(rank, world, place, folder):
    model, optimizer = trained(rank, world, place)
    wanted = full_state(model, optimizer)
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    assert_same(full_state(model, optimizer), wanted)
    return wanted if rank == 0 else None


def _load(rank, world, place, folder, wanted):
    model, optimizer = trained(rank, world, place, seed=2, steps=0)
    before = full_state(model)
    state = _state(model, optimizer)  # makes optimizer state, by a step that must not move weights
    assert_same(full_state(model), before)
    # torch makes state for parameters that never had a gradient; the checkpoint has none for them
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    found = full_state(model, optimizer)
    made_up = {name for name in found if name.startswith("optim.unused.")}
    assert_same({name: value for name, value in found.items() if name not in made_up}, wanted)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.8, 0.9)]


def _round_trip(ranks, tmp_path, ends):
    (world, place), (other_world, other_place) = ends
    folder = str(tmp_path / "dcp")
    wanted = ranks(world, _save, place, folder)[0]
    ranks(other_world, _load, other_place, folder, wanted)


@pytest.mark.parametrize("ends", SOME, ids=str)
def test_dcp_from_any_to_any(ranks, tmp_path, ends):
    _round_trip(ranks, tmp_path, ends)


@pytest.mark.full
@pytest.mark.parametrize("ends", [ends for ends in PRODUCT if ends not in SOME], ids=str)
def test_dcp_from_any_to_any_full(ranks, tmp_path, ends):
    _round_trip(ranks, tmp_path, ends)


def _options(rank, world, place, local_step):
    """Full state dicts out of one model and into another, in every way that torch offers."""
    model, optimizer = trained(rank, world, place)
    if local_step:
        fully_shard_optimizer(optimizer)
    wanted = full_state(model, optimizer)
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=whole)
    for name, value in weights.items():
        assert torch.equal(value, wanted[f"model.{name}"]), name
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert offloaded.keys() == (weights.keys() if rank == 0 else set())
    for broadcast in (True,) if local_step == "broadcast" else (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
        other, fresh = trained(rank, world, place, seed=3, steps=0)
        if local_step:
            fully_shard_optimizer(fresh)
        given = (weights, state) if rank == 0 or not broadcast else ({}, {})
        set_model_state_dict(other, dict(given[0]), options=options)
        set_optimizer_state_dict(other, fresh, dict(given[1]), options=options)
        found = full_state(other, fresh)
        assert_same({name: found[name] for name in wanted}, wanted)
        if local_step:  # which takes state in whatever form torch gives it back
            train(model, optimizer, 1, ROWS, rank, world)
            train(other, fresh, 1, ROWS, rank, world)
            found, ahead = full_state(other, fresh), full_state(model, optimizer)
            assert_same({name: found[name] for name in ahead}, ahead)
            break


@pytest.mark.parametrize("local_step", [None, "distribute", "broadcast"])
@pytest.mark.parametrize("place", [PLACES[0], PLACES[1], PLACES[6], PLACES[7]], ids=str)
def test_full_state_dicts(ranks, place, local_step):
    ranks(4, _options, place, local_step)


def _flattened(rank, world, place):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found = []
    for seed, steps in ((1, 2), (3, 0)):
        model = shard(make(seed), world, place)
        model.unused.requires_grad_(False)  # torch cannot flatten parameters that have no state
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        train(model, optimizer, steps, ROWS, rank, world)
        if found:
            set_optimizer_state_dict(model, optimizer, found[0][0], options=options)
        weights = full_state(model, optimizer)
        found.append((get_optimizer_state_dict(model, optimizer, options=options), weights))
    assert "state.blocks.0.up.weight.exp_avg" in found[0][0]
    kept, loaded = ({name: value for name, value in each.items() if "optim." in name} for _, each in found)
    assert_same(loaded, kept)


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_flattened_optimizer_state(ranks, place):
    ranks(2, _flattened, place)


def _asynchronously(rank, world, place, folder):
    model, optimizer = trained(rank, world, place)
    wanted = full_state(model, optimizer)
    pending = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    for parameter in model.parameters():
        parameter.data.fill_(0)
    pending.result()
    loaded = {"model": get_model_state_dict(model)}
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(model, loaded["model"])
    found = full_state(model, optimizer)
    assert_same(found, wanted)


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_async_save(ranks, tmp_path, place):
    ranks(2, _asynchronously, place, str(tmp_path / "dcp"))


def _torch_model(seed, steps, rank, world):
    model = make(seed)
    del model.coarse  # FSDP2 takes no two dtypes in a unit, and no parameters without dims
    model.coarse = torch.zeros(1)
    for block in model.blocks:
        del block.scale
        block.scale = 0.5
        torch_fully_shard(block)
    torch_fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    train(model, optimizer, steps, ROWS, rank, world)
    return model, optimizer


def _with_fsdp2(rank, world, place, folder):
    theirs, their_optimizer = _torch_model(1, 2, rank, world)
    wanted = full_state(theirs, their_optimizer)
    dcp.save(_state(theirs, their_optimizer), checkpoint_id=f"{folder}/theirs")
    ours, optimizer = trained(rank, world, place, seed=2, steps=0)
    state = _state(ours, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/theirs", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(ours, state["model"])
    set_optimizer_state_dict(ours, optimizer, state["optim"])
    found = full_state(ours, optimizer)
    assert_same({name: found[name] for name in wanted}, wanted)
    dcp.save(_state(ours, optimizer), checkpoint_id=f"{folder}/ours")
    back, back_optimizer = _torch_model(5, 2, rank, world)
    state = _state(back, back_optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/ours", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(back, state["model"])
    set_optimizer_state_dict(back, back_optimizer, state["optim"], options=StateDictOptions(strict=False))
    assert_same(full_state(back, back_optimizer), wanted)


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_fsdp2_loads_ours_and_we_load_theirs(ranks, tmp_path, place):
    ranks(2, _with_fsdp2, place, str(tmp_path))


def _from_torch_save(rank, world, place, file, prefix):
    loaded = torch.load(file, weights_only=True, mmap=True)
    weights = {name.removeprefix(prefix): value for name, value in loaded.items()}
    model, _ = trained(rank, world, place, seed=2, steps=0)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    assert_same(full_state(model), {f"model.{name}": value for name, value in make(9).state_dict().items()})


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_a_plain_torch_save_loads(ranks, tmp_path, place, prefix):
    torch.save({prefix + name: value for name, value in make(9).state_dict().items()}, tmp_path / "plain.pt")
    ranks(3, _from_torch_save, place, str(tmp_path / "plain.pt"), prefix)
