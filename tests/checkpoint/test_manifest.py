"""What a checkpoint's index costs: parts that are cut alike are named once, and what is of one rank is in its file."""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref

import pytest
import torch
from torch import nn

from flatshard import fully_shard
from flatshard.checkpoint import CheckpointError, load, reader, save, saving, verify
from flatshard.checkpoint.manifest import Manifest, _encoded, merge_boxes, pack_boxes
from flatshard.checkpoint.state import Snapshot
from tests.checkpoint.cases import PLACES, assert_same, full_state, make, shard
from tests.dist.models import Net


class Blocks(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(layers)
        for layer in range(layers):
            for name, shape in (("up", (96, 8)), ("down", (8, 96)), ("norm", (100,))):
                self.register_parameter(f"{name}{layer}", nn.Parameter(torch.randn(shape)))


def _simulated(folder, world, layers):
    """A checkpoint of so many ranks, each with its share of the rows: bytes of the longest message and of the index."""
    weights = dict(Blocks(layers).named_parameters())
    (folder / "saving").mkdir(parents=True)
    messages = []
    for rank in range(world):
        taken = Snapshot(rank, world)
        for name, weight in weights.items():
            share = -(-len(weight) // world)
            rows = weight.detach()[rank * share : (rank + 1) * share]
            taken.tensors[f"model/{name}"] = "F32", tuple(weight.shape)
            if len(rows):
                taken.writes.append((f"model/{name}", (rank * share, *[0] * (weight.dim() - 1)), rows))
        messages.append(json.dumps(saving._write_own(folder / "saving", taken, False)))
    taken.model = {"dict": [[name, {"tensor": f"model/{name}"}] for name in weights]}
    saving._publish(folder / "made", folder / "saving", taken, map(json.loads, messages), None)
    return max(map(len, messages)), (folder / "made" / "manifest.json").stat().st_size


def test_messages_and_index_do_not_grow_with_ranks_times_tensors(tmp_path):
    found = {(world, layers): _simulated(tmp_path / f"{world}-{layers}", world, layers) for world, layers in _SIZES}
    for world in (4, 64):
        assert found[world, 80][0] - found[world, 2][0] < 100  # bytes; a box in it takes 20
    grown = {layers: found[64, layers][1] - found[4, layers][1] for layers in (2, 80)}
    digits = 6 * 80 * 3  # numbers of tables and checksums have more or fewer of them
    assert 0 < grown[80] < grown[2] + digits  # a box of 78 more layers on 60 more ranks would be 14,000 boxes


_SIZES = [(world, layers) for world in (4, 64) for layers in (2, 80)]


def _load_blocks(rank, world, path, layers):
    model = fully_shard(Blocks(layers)) if world > 1 else Blocks(layers)
    wanted = full_state(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    load(path, model)
    assert_same(full_state(model), wanted)


def test_a_checkpoint_of_many_ranks_loads_on_few(ranks, tmp_path):
    _simulated(tmp_path, 64, 3)
    verify(tmp_path / "made")
    _load_blocks(0, 1, tmp_path / "made", 3)
    ranks(3, _load_blocks, str(tmp_path / "made"), 3)


def test_tensors_share_a_table_where_all_ranks_hold_the_same_of_them():
    shapes = {"a": (4,), "b": (4,), "c": (4,), "d": (3,), "e": (4,)}
    ranks = [
        {"a": ((0,), (2,)), "b": ((0,), (2,)), "c": ((0,), (2,)), "d": ((0,), (2,))},
        {"a": ((2,), (2,)), "b": ((2,), (2,)), "c": ((2,), (1,)), "d": ((2,), (1,)), "e": ((0,), (4,))},
        {"c": ((3,), (1,))},
    ]
    packed = json.loads(json.dumps([pack_boxes(shapes, boxes) for boxes in ranks]))
    numbers, tables = merge_boxes(list(shapes.values()), packed)
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == len(tables) == 4
    for key, number in zip(shapes, numbers):
        held = [(rank, *boxes[key]) for rank, boxes in enumerate(ranks) if key in boxes]
        assert [(rank, tuple(offsets), tuple(sizes)) for rank, offsets, sizes in tables[number]] == held


def _save_depths(rank, world, folder):
    for layout in ("tensor", "flat"):
        for depth in (2, 5):
            model = shard(Net(depth), world, ("optim_grads_params", None, layout))
            save(f"{folder}/{layout}-{depth}", model, extra="long " * 999 + str(rank))


def test_more_blocks_take_no_more_tables_and_extra_is_not_in_the_index(ranks, tmp_path):
    ranks(3, _save_depths, str(tmp_path))
    for layout in ("tensor", "flat"):
        few, many = (json.loads((tmp_path / f"{layout}-{depth}/manifest.json").read_text())["body"] for depth in (2, 5))
        assert len(many["tensors"]) > len(few["tensors"])
        assert many["tables"] == few["tables"]
        assert "long" not in json.dumps(many)
        verify(tmp_path / f"{layout}-5")


def _save_one(rank, world, folder):
    for name, seed in (("a", 1), ("b", 2)):
        save(f"{folder}/{name}", shard(make(seed), world, PLACES[1]), extra=torch.tensor(rank))


@pytest.fixture
def saved(ranks, tmp_path):
    """Two checkpoints of four ranks: equal models with other weights."""
    ranks(4, _save_one, str(tmp_path))
    return tmp_path


def test_a_file_of_a_rank_that_is_damaged_missing_or_anothers_is_named(saved):
    file, model = saved / "a" / "rank-00002.safetensors", make(3)
    good, before = file.read_bytes(), full_state(model)

    def refused(message):
        with pytest.raises(CheckpointError, match=message):
            load(saved / "a", model)
        with pytest.raises(CheckpointError, match=message):
            verify(saved / "a")
        assert_same(full_state(model), before)

    place = good.index(b'"flatshard.checksums":"') + 30
    file.write_bytes(good[:place] + (b"1" if good[place] != ord("1") else b"2") + good[place + 1 :])
    refused(r"rank-00002.safetensors, which holds '.*', is damaged: its header does not match")
    theirs = (saved / "b" / file.name).read_bytes()
    assert len(theirs) == len(good)
    file.write_bytes(theirs)  # with checksums that are right for what it holds
    refused(r"rank-00002.safetensors, which holds '.*', is damaged: its header does not match")
    file.unlink()
    refused(r"rank-00002.safetensors, which holds '.*', cannot be read: No such file")
    file.write_bytes(good)
    load(saved / "a", model)
    assert_same(full_state(model), full_state(make(1)))


def test_a_reader_keeps_few_files_open(saved, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_OPEN", 2)
    opened, open_file = [], reader.open_file

    def counted(path):
        opened.append(open_file(path))
        assert sum(not file.closed for file in opened) <= 2
        return opened[-1]

    monkeypatch.setattr(reader, "open_file", counted)
    model = make(3)
    assert load(saved / "a", model) == torch.tensor(0)
    assert_same(full_state(model), full_state(make(1)))
    assert len(opened) > 4
    assert all(file.closed for file in opened)


def test_another_format_is_refused_with_what_to_do(tmp_path):
    save(tmp_path / "a", nn.Linear(2, 2))
    file = tmp_path / "a" / "manifest.json"
    body = json.loads(file.read_bytes())["body"] | {"format": "flatshard checkpoint 2"}
    file.write_text(json.dumps({"sha256": hashlib.sha256(_encoded(body)).hexdigest(), "body": body}))
    with pytest.raises(CheckpointError, match=r"is of format 'flatshard checkpoint 2'.*flatshard convert --to dcp"):
        load(tmp_path / "a", nn.Linear(2, 2))


def test_a_reader_forgets_the_files_that_it_has_closed(saved, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_OPEN", 2)
    opened, open_file, count = weakref.WeakSet(), reader.open_file, itertools.count()

    def counted(path):
        next(count)
        opened.add(file := open_file(path))
        return file

    monkeypatch.setattr(reader, "open_file", counted)
    with reader.Reader(Manifest(saved / "a")) as files:
        for name in files.source.tensors:
            files.whole(name)
        assert next(count) > 4
        assert len(opened) <= 3  # two that are open, and one in a local variable
