"""Damage that is named and changes nothing, and killed saves that lose nothing. Random damage is in test_mutations."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import fully_shard
from flatshard.checkpoint import CheckpointError, latest, load, save
from tests.checkpoint.cases import PLACES, assert_same, full_state, train, trained


def test_damage_to_the_manifest_names_the_tensor(tmp_path):
    save(tmp_path / "a", nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), extra=torch.ones(2))
    file = tmp_path / "a" / "manifest.json"
    good = file.read_bytes()
    entry = good.index(b'"model/1.bias":{"dtype"')
    shape = good.index(b'"shape":[4]', entry)

    def refused(bad, message):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "a", nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)))

    named = "manifest.json is damaged in the entry of 'model/1.bias'"
    refused(good[:shape] + b'"shape":[5]' + good[shape + 11 :], named)  # still JSON
    refused(good[:shape] + b'"shape"x[4]' + good[shape + 11 :], named)  # no longer
    refused(good[:shape] + b'"sh\xffpe":[4]' + good[shape + 11 :], named)  # no longer text
    refused(good[:shape], named)
    refused(good.replace(b'"model/1.bias":{', b'"model/1.bia5":{'), "in the entry of 'model/1.bia5'")
    refused(good[:40], "manifest.json is damaged, or is not a manifest of flatshard")
    refused(
        good.replace(b'"optimizer":null', b'"optimizer":true'),
        "manifest.json is damaged: its content does not match its checksum",
    )
    refused(good[:shape].replace(b"\n", b"\0") + good[shape:], "manifest.json is damaged, or is not a manifest")


def test_checksums_see_what_files_suffer():
    from flatshard.checkpoint.files import BLOCK, block_checksum

    draw = random.Random(3)
    content = bytearray(draw.randbytes(BLOCK))
    seen = {block_checksum(memoryview(content))}
    for length in (*range(20), 100, BLOCK - 8, BLOCK - 1):  # of noise and of zeros, to every length of the rest
        assert block_checksum(memoryview(content[:length])) not in seen or length == 0
        assert block_checksum(memoryview(bytes(length))) == 0
    for _ in range(200):
        bad = bytearray(content)
        start = draw.randrange(BLOCK - 600)
        kind = draw.choice(["flip", "zeros", "swap", "shift"])
        if kind == "flip":
            bad[start] ^= 1 << draw.randrange(8)
        elif kind == "zeros":
            bad[start : start + 512] = bytes(512)
        elif kind == "swap":
            bad[start : start + 8], bad[start + 16 : start + 24] = bad[start + 16 : start + 24], bad[start : start + 8]
        else:
            bad[start:] = bad[start + 1 :] + b"\0"
        found = block_checksum(memoryview(bad))
        assert found not in seen, kind
        seen.add(found)


def _damage_seen_by_one_rank(rank, world, folder):
    model, optimizer = trained(rank, world, PLACES[0])
    save(f"{folder}/a", model, optimizer)
    train(model, optimizer, 1, rank, world)
    before = full_state(model, optimizer)
    file = Path(folder, "a", "rank-00001.safetensors")
    if rank == 0:
        content = bytearray(file.read_bytes())
        content[-3] ^= 16
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged: '.*' cannot be read from it"):
        load(f"{folder}/a", model, optimizer)
    assert_same(full_state(model, optimizer), before)


def test_damage_that_one_rank_sees_stops_all(ranks, tmp_path):
    ranks(2, _damage_seen_by_one_rank, str(tmp_path))


def test_what_does_not_fit_is_named(tmp_path):
    save(tmp_path / "a", nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), None)

    def refused(model, message, optimizer=None, **kwargs):
        before = full_state(model)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "a", model, optimizer, **kwargs)
        assert_same(full_state(model), before)

    shapes = r"'1.weight' has shape \(4, 3\) in the checkpoint and \(5, 3\) in the model"
    refused(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5)), shapes)
    refused(nn.Sequential(nn.Linear(2, 3)), "'1.weight' is not in the model")
    wider = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))
    refused(wider, "'2.weight' is not in the checkpoint")
    load(tmp_path / "a", wider, strict=False)
    same = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    refused(same, "was saved without an optimizer", torch.optim.SGD(same.parameters()))
    square = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    save(tmp_path / "square", square, torch.optim.SGD([square[0].weight]))
    with pytest.raises(
        CheckpointError, match=r"'1.weight' is in param_groups\[0\] of the optimizer, not of the checkpoint"
    ):
        load(tmp_path / "square", square, torch.optim.SGD(square.parameters()))
    square[1].weight = square[0].weight
    with pytest.raises(CheckpointError, match=r"'1.weight' is tied to '0.weight' in the model, but differs from it"):
        load(tmp_path / "square", square)
    with pytest.raises(CheckpointError, match="none does not exist"):
        load(tmp_path / "none", same)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no manifest.json: it is not a complete checkpoint"):
        load(tmp_path / "empty", same)


# Killing


def _weights(step):
    return torch.full((64, 33), float(step))


def _save_forever(rank, world, folder, asynchronous):
    """Save step after step until killed. What belongs to a step can be told from the number alone."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(33, 64, bias=False), nn.Linear(33, 64, bias=False))
    if world > 1:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for step in range(10_000):
        for parameter in model.parameters():
            local = parameter.to_local() if world > 1 else parameter
            local.data.fill_(step)
            parameter.grad = torch.full_like(parameter, step)
        optimizer.state.clear()
        optimizer.step()
        save(f"{folder}/run/{step}", model, optimizer, step, keep_last=2, asynchronous=asynchronous)


@pytest.mark.parametrize(
    ("world", "kills"), [(1, 6), (2, 4), *(pytest.param(world, 20, marks=pytest.mark.full) for world in (1, 2))]
)
def test_a_killed_save_loses_nothing(tmp_path, world, kills):
    context = multiprocessing.get_context("forkserver")
    draw = random.Random(world)
    for number in range(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = [(rank, world, str(folder), number % 2 == 1) for rank in range(world)]
        processes = [context.Process(target=_save_forever, args=each) for each in arguments]
        for process in processes:
            process.start()
        until = time.monotonic() + 300
        while latest(folder / "run") is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        seen = max((int(path.name) for path in (folder / "run").iterdir() if path.name.isdigit()), default=-1)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        found = latest(folder / "run")
        assert found is not None
        assert int(found.name) >= seen
        model = nn.Sequential(nn.Linear(33, 64, bias=False), nn.Linear(33, 64, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        step = load(found, model, optimizer)
        assert step == int(found.name)
        for parameter in model.parameters():
            assert torch.equal(parameter.data, _weights(step))
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], _weights(step))
        save(folder / "run" / "after", model, optimizer, keep_last=1)  # and what was left behind is in nobody's way
        assert [path.name for path in (folder / "run").iterdir()] == ["after"]
