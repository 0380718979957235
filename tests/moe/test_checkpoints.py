"""Checkpoints of mixtures of experts move between layouts of data, expert and tensor parallelism, and none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import flatshard
from flatshard import Experts, fully_shard_optimizer, shard_model
from flatshard.checkpoint import (
    MIXTRAL,
    QWEN_MOE,
    CheckpointError,
    StoredAs,
    export_safetensors,
    files,
    load_safetensors,
)
from flatshard.checkpoint.reader import Reader
from flatshard.checkpoint.stored_names import pieces_of
from tests.moe.cases import Model, Stacked, build, meshes, spread

pytestmark = [pytest.mark.sampled(2), pytest.mark.limit(120)]


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


def _move(rank, world, folder, layouts):
    model, optimizer = make(layouts[-1], 0)
    for number, layout in enumerate(layouts):
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


@pytest.mark.parametrize("count", [4, pytest.param(6, marks=pytest.mark.full)])
def test_weights_and_optimizer_state_move_between_layouts(ranks, tmp_path, count):
    ranks(4, _move, str(tmp_path), LAYOUTS[:count])


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


RULES = (
    StoredAs("blocks.*.mixture.experts.up", ("layers.*.experts.{expert}.w1.weight",), transposed=True),
    StoredAs(
        "blocks.*.mixture.experts.down",
        ("layers.*.experts.{expert}.first.weight", "layers.*.experts.{expert}.second.weight"),
        dim=2,
    ),
    StoredAs("blocks.*.norm.weight", ("layers.*.norm.weight",)),
)


def _exported(rank, world, folder):
    model, _ = make(LAYOUTS[1], 0)
    read = []
    readinto = Reader._read

    def counted(self, name, box, start, into):
        read.append(len(into))
        return readinto(self, name, box, start, into)

    files.SUMMED = 16
    export_safetensors(model, folder, "1KB", names=RULES, progress=False)
    files.SUMMED = 1 << 16
    for layout in (LAYOUTS[0], LAYOUTS[2], LAYOUTS[4], None):
        other, _ = make(layout, 3)
        Reader._read = counted
        load_safetensors(other, folder, names=RULES, progress=False)
        Reader._read = readinto
        for (name, mine), loaded in zip(model.named_parameters(), other.parameters()):
            assert torch.equal(whole(mine), whole(loaded)), (layout, name)
        if layout is not None and layout[2] == 1:
            held = sum(p.to_local().nbytes for p in other.parameters())
            assert held <= sum(read) <= held + 2 * 16 * len(read), "each rank reads its own rows, in whole blocks"
        read.clear()
    with pytest.raises(
        CheckpointError, match=r"'layers.0.experts.0.w1.weight' has shape \(8, 6\).*must have shape \(6, 8\)"
    ):
        load_safetensors(other, folder, names=(replace(RULES[0], transposed=False), *RULES[1:]))
    with pytest.raises(CheckpointError, match=r"'layer.0.experts.0.w1', a part of 'blocks.0.mixture.experts.up'"):
        load_safetensors(other, folder, names=(StoredAs(RULES[0].name, ("layer.*.experts.{expert}.w1",)),))
    whole_model, _ = make(None, 0)
    return dict(whole_model.named_parameters())


def test_experts_are_exported_one_by_one_and_come_back(ranks, tmp_path):
    model = ranks(4, _exported, str(tmp_path))[0]
    stored = {}
    for path in tmp_path.glob("*.safetensors"):
        stored.update(load_file(path))
    assert len(stored) == 3 * 8 * 2 + len(model) - 4
    for layer in range(2):
        experts = f"blocks.{layer}.mixture.experts"
        for number in range(8):
            here = f"layers.{layer}.experts.{number}"
            assert torch.equal(stored[f"{here}.w1.weight"], model[f"{experts}.up"][number].T)
            halves = model[f"{experts}.down"][number].chunk(2, 1)
            assert torch.equal(stored[f"{here}.first.weight"], halves[0])
            assert torch.equal(stored[f"{here}.second.weight"], halves[1])
        assert torch.equal(stored[f"layers.{layer}.norm.weight"], model[f"blocks.{layer}.norm.weight"])


def test_transposed_tensors_of_any_shape_come_back(tmp_path):
    rules = [StoredAs("whole.*", ("whole.*",), transposed=True), StoredAs("each.*", ("{expert}.*",), transposed=True)]
    shapes = [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4)]
    model, other = nn.Module(), nn.Module()
    for each in (model, other):
        each.whole = nn.ParameterList(torch.randn(shape) for shape in [*shapes, (3, 4), (1, 4), (3, 1)])
        each.each = nn.ParameterList(torch.randn(shape) for shape in shapes)
    export_safetensors(model, tmp_path, names=rules, progress=False)
    stored = load_file(tmp_path / "model.safetensors")
    load_safetensors(other, tmp_path, names=rules, progress=False)
    for number, weight in enumerate(model.whole):
        assert torch.equal(stored[f"whole.{number}"], weight.mT)
        assert torch.equal(other.whole[number], weight)
    assert all(map(torch.equal, other.each, model.each))


def test_a_transposed_tensor_of_one_row_comes_back(tmp_path):
    model, other, rules = nn.Linear(6, 1), nn.Linear(6, 1), [StoredAs("weight", ("kernel",), transposed=True)]
    export_safetensors(model, tmp_path, names=rules, progress=False)
    load_safetensors(other, tmp_path, names=rules, progress=False)
    assert torch.equal(other.weight, model.weight)


def test_names_that_mean_nothing_are_refused():
    for wrong in (
        {"name": "a.*", "files": ("b",)},
        {"name": "a", "files": ()},
        {"name": "a", "files": ("b.{expert}", "c")},
        {"name": "a", "files": ("b.{expert}", "c.{expert}"), "dim": 0},
    ):
        with pytest.raises(ValueError, match="StoredAs"):
            StoredAs(**wrong)
    with pytest.raises(ValueError, match="cannot be stored"):
        pieces_of("a", (3, 4), (StoredAs("a", ("b", "c"), dim=0),))


def _transformers(rank, world, kind, folder):
    """What transformers saves we load, and what we export it loads, to the bit."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
    names, count = {"mixtral": (MIXTRAL, "num_local_experts"), "qwen3_moe": (QWEN_MOE, "num_experts")}[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes, **{count: 6})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    if rank == 0:
        theirs.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_config(config)
    shard_model(model)
    load_safetensors(model, f"{folder}/theirs", names=names, progress=False)
    for (name, mine), wanted in zip(model.named_parameters(), theirs.parameters()):
        assert torch.equal(mine.full_tensor(), wanted), name
    tokens = torch.arange(8).view(2, 4)
    model(input_ids=tokens, labels=tokens).loss.backward()
    export_safetensors(model, f"{folder}/ours", names=names, progress=False)
    if rank == 0:
        config.save_pretrained(f"{folder}/ours")
    dist.barrier()
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/ours")
    for (name, mine), wanted in zip(again.named_parameters(), theirs.named_parameters()):
        assert name == wanted[0]
        assert torch.equal(mine, wanted[1]), name


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_transformers_reads_and_writes_the_same_experts(ranks, kind, tmp_path):
    ranks(2, _transformers, kind, str(tmp_path))


def _lost(rank, world, folder):
    """Plain experts that nobody has said are held apart look like copies; one of them would be saved, silently."""
    dense, sparse = meshes(4, 2)
    model = spread(build(), sparse["ep"], "plain")
    for block in model.blocks:
        flatshard.fully_shard(block.mixture.experts, mesh=sparse["edp"])
    flatshard.fully_shard(model, mesh=dense)
    with pytest.raises(CheckpointError, match=r"'model.*experts.up' differs between ranks (0 and 1|2 and 3).*apart="):
        flatshard.checkpoint.save(folder, model, progress=False)


def test_experts_that_would_be_lost_are_refused(ranks, tmp_path):
    ranks(4, _lost, str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
