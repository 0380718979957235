"""torch.distributed.checkpoint and its state-dict functions on sharded models: exact, from anywhere to anywhere."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from flatshard.checkpoint import renamed
from tests.checkpoint.cases import (
    ENDS,
    PLACES,
    assert_same,
    full_state,
    groups_of,
    make,
    partners,
    shard,
    train,
    trained,
)

pytestmark = pytest.mark.sampled(2)

SOME = partners(3)


def _state(model, optimizer):
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _save(rank, world, place, folder):
    model, optimizer = trained(rank, world, place, local_step=PLACES.index(place) % 2 == 1)
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


@pytest.mark.parametrize(("source", "target"), SOME, ids=str)
def test_dcp_from_any_to_any(ranks, tmp_path, source, target):
    wanted = ranks(source[0], _save, source[1], str(tmp_path))[0]
    ranks(target[0], _load, target[1], str(tmp_path), wanted)


@pytest.mark.full
@pytest.mark.limit(900)
@pytest.mark.parametrize("source", ENDS, ids=str)
def test_dcp_from_any_to_all(ranks, tmp_path, source):
    wanted = ranks(source[0], _save, source[1], str(tmp_path))[0]
    for world, place in ENDS:
        ranks(world, _load, place, str(tmp_path), wanted)


def _options(rank, world, place, local_step):
    """Full state dicts out of one model and into another, in every way that torch offers."""
    model, optimizer = trained(rank, world, place, local_step=bool(local_step))
    wanted = full_state(model, optimizer)
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=whole)
    for name, value in weights.items():
        assert torch.equal(value, wanted[f"model.{name}"]), name
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert offloaded.keys() == (weights.keys() if rank == 0 else set())
    for broadcast in (True,) if local_step == "broadcast" else (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
        other, fresh = trained(rank, world, place, seed=3, steps=0, local_step=bool(local_step))
        given = (weights, state) if rank == 0 or not broadcast else ({}, {})
        set_model_state_dict(other, dict(given[0]), options=options)
        # torch takes the tensors themselves, which are those of the model that goes on training
        set_optimizer_state_dict(other, fresh, copy.deepcopy(given[1]), options=options)
        found = full_state(other, fresh)
        assert_same({name: found[name] for name in wanted}, wanted)
        if local_step:  # which takes state in whatever form torch gives it back
            train(model, optimizer, 1, rank, world, place)
            train(other, fresh, 1, rank, world, place)
            found, ahead = full_state(other, fresh), full_state(model, optimizer)
            assert_same({name: found[name] for name in ahead}, ahead)
            break


FULL = list(itertools.product([PLACES[0], PLACES[1], PLACES[6], PLACES[7]], [None, "distribute", "broadcast"]))


@pytest.mark.parametrize(
    ("place", "local_step"),
    [*FULL[::2], *(pytest.param(*each, marks=pytest.mark.full) for each in FULL[1::2])],
    ids=str,
)
def test_full_state_dicts(ranks, place, local_step):
    ranks(2 if place[1] is None else 4, _options, place, local_step)


def _flattened(rank, world, place):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found = []
    for seed, steps in ((1, 2), (3, 0)):
        model = shard(make(seed), world, place)
        model.unused.requires_grad_(False)  # torch cannot flatten parameters that have no state
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        train(model, optimizer, steps, rank, world)
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
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True)
    train(model, optimizer, steps, rank, world)
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


def _uneven(value, world, rank):
    """A DTensor as megatron_fsdp makes them: whatever rows a rank has, which its local tensor tells DCP."""
    cuts = [0, value.shape[0] // 4, value.shape[0]] if world == 2 else [0, value.shape[0]]
    local = value[cuts[rank] : cuts[rank + 1]].clone()
    mesh = init_device_mesh("cpu", (world,))
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
    rows = ChunkStorageMetadata(torch.Size((cuts[rank], *[0] * (value.dim() - 1))), local.shape)

    def items(fqn, tensor):
        data = TensorWriteData(rows, TensorProperties.create_from_tensor(local), value.shape)
        return [WriteItem(MetadataIndex(fqn, rows.offsets), WriteItemType.SHARD, tensor_data=data)]

    held = made.to_local()
    held.__create_chunk_list__ = lambda: [rows]
    held.__create_write_items__ = items
    held.__get_tensor_shard__ = lambda index: local
    made._local_tensor = held
    return made


def _with_megatron(rank, world, place, folder):
    """Names with `module.`, uneven shards; optimizer state by number, as `optimizer.state_dict()` has it."""
    source = make(1)
    optimizer = torch.optim.AdamW([p for p in source.parameters() if p.requires_grad], lr=1e-2, fused=True)
    train(source, optimizer, 2, 0, 1)

    def theirs(model_values, state):
        sharded = {k: _uneven(v, world, rank) if v.dim() else v for k, v in model_values.items()}
        entries = {
            number: {k: _uneven(v, world, rank) if v.dim() else v for k, v in entry.items()}
            for number, entry in state["state"].items()
        }
        return {"model": sharded, "optimizer": {"state": entries, "param_groups": state["param_groups"]}}

    weights = {f"module.{name}": value.detach() for name, value in source.state_dict().items()}
    dcp.save(theirs(weights, optimizer.state_dict()), checkpoint_id=f"{folder}/theirs")

    model = shard(make(2), world, place)
    fresh = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    get_optimizer_state_dict(model, fresh)  # makes state to load into
    for index, entry in list(optimizer.state_dict()["state"].items()):
        assert entry.keys() == fresh.state_dict()["state"][index].keys()
    ours = {"model": renamed(get_model_state_dict(model), add="module."), "optimizer": fresh.state_dict()}
    dcp.load(ours, checkpoint_id=f"{folder}/theirs", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(model, renamed(ours["model"], remove="module."))
    fresh.load_state_dict(ours["optimizer"])
    wanted = full_state(source, optimizer)
    found = full_state(model, fresh)
    assert_same({name: found[name] for name in wanted}, wanted)

    by_name = renamed(get_optimizer_state_dict(model, fresh), add="module.")
    assert "module.blocks.0.up.weight" in by_name["state"]
    assert all(name.startswith("module.") for group in by_name["param_groups"] for name in group["params"])
    with pytest.raises(ValueError, match="'coarse' does not begin with remove='module"):
        renamed(get_model_state_dict(model), remove="module.")

    dcp.save(ours, checkpoint_id=f"{folder}/ours")
    back = theirs({name: torch.zeros_like(value) for name, value in weights.items()}, optimizer.state_dict())
    dcp.load(back, checkpoint_id=f"{folder}/ours")
    for name, value in weights.items():
        mine = back["model"][name]
        if isinstance(mine, DTensor):
            first = 0 if rank == 0 else value.shape[0] // 4
            mine, value = mine.to_local(), value[first : first + mine.to_local().shape[0]]
        assert torch.equal(mine, value), name


@pytest.mark.parametrize("place", [PLACES[0], PLACES[1]], ids=str)
def test_megatron_fsdp_loads_ours_and_we_load_theirs(ranks, tmp_path, place):
    ranks(2, _with_megatron, place, str(tmp_path))


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
