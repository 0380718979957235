"""flatshard.checkpoint: exact from anywhere to anywhere, atomic, in the background, and with what else a run needs."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import sys
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from flatshard import fully_shard, fully_shard_optimizer
from flatshard.checkpoint import CheckpointError, export_safetensors, latest, load, save, saving, verify
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

SOME = partners(4)


def _save(rank, world, place, folder, local_step=False):
    model, optimizer = trained(rank, world, place, local_step=local_step)
    wanted = full_state(model, optimizer)
    rng = torch.get_rng_state()
    save(folder, model, optimizer, {"step": 2, "rank": rank, "rng": rng, "odd": (1, None, [float("inf"), b"\0x"])})
    assert_same(full_state(model, optimizer), wanted)
    train(model, optimizer, 1, rank, world, place)
    return (wanted, full_state(model, optimizer)) if rank == 0 else full_state(model, optimizer) and None


def _load(rank, world, place, folder, wanted, after, local_step=False):
    model, optimizer = trained(rank, world, place, seed=2, steps=1, local_step=local_step)
    optimizer.param_groups[0]["lr"] = 7.0
    extra = load(folder, model, optimizer)
    assert extra["step"] == 2
    assert extra["odd"] == (1, None, [float("inf"), b"\0x"])
    assert extra["rng"].dtype == torch.uint8
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.8, 0.9)]
    assert_same(full_state(model, optimizer), wanted)
    assert model.head.weight is model.embed.weight
    train(model, optimizer, 1, rank, world, place)
    for name, value in full_state(model, optimizer).items():
        torch.testing.assert_close(value, after[name], rtol=1e-3, atol=1e-3, msg=name)
    return extra["rank"]


def _checked_load(ranks, source, target, *args):
    found = ranks(target[0], _load, target[1], *args)
    assert found == (list(range(source[0])) if source[0] == target[0] else [0] * target[0])


@pytest.mark.parametrize(("source", "target"), SOME, ids=str)
def test_from_any_to_any(ranks, tmp_path, source, target):
    folder, local_step = str(tmp_path / "saved"), PLACES.index(source[1]) % 2 == 1
    wanted, after = ranks(source[0], _save, source[1], folder, local_step)[0]
    _checked_load(ranks, source, target, folder, wanted, after, local_step)


@pytest.mark.full
@pytest.mark.limit(900)
@pytest.mark.parametrize("source", ENDS, ids=str)
def test_from_any_to_all(ranks, tmp_path, source):
    folder = str(tmp_path / "saved")
    wanted, after = ranks(source[0], _save, source[1], folder)[0]
    for target in ENDS:
        _checked_load(ranks, source, target, folder, wanted, after)


def test_without_processes(tmp_path):
    """A plain model, and one that was sharded, without torch.distributed; and the files are safetensors."""
    model = make(1)
    optimizer = torch.optim.AdamW(groups_of(model), fused=True)
    train(model, optimizer, 2, 0, 1)
    wanted = full_state(model, optimizer)
    assert save(tmp_path / "plain", model, optimizer).result() == tmp_path / "plain"
    other = make(2)
    fresh = torch.optim.AdamW(groups_of(other), fused=True)
    assert load(tmp_path / "plain", other, fresh) is None
    assert_same(full_state(other, fresh), wanted)
    verify(tmp_path / "plain")
    stored = load_file(tmp_path / "plain" / "rank-00000.safetensors")
    assert torch.equal(stored["model/blocks.0.up.weight"], model.blocks[0].up.weight)


def test_the_prefix_of_a_wrapper_makes_no_difference(tmp_path):
    """`module.` before all names, on either side or both, of weights and optimizer state."""
    wrappers = [lambda net: net, lambda net: Wrapper(net), lambda net: Wrapper(Wrapper(net))]
    source = make(1)
    for number, (save_as, load_as) in enumerate(itertools.product(wrappers, wrappers)):
        saved = save_as(source)
        optimizer = torch.optim.AdamW(groups_of(saved), fused=True)
        train(source, optimizer, 1, 0, 1)
        save(tmp_path / str(number), saved, optimizer)
        other = make(2)
        loaded = load_as(other)
        fresh = torch.optim.AdamW(groups_of(loaded), fused=True)
        load(tmp_path / str(number), loaded, fresh)
        assert_same(full_state(other, fresh), full_state(source, optimizer))


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def _into_meta(rank, world, folder):
    with torch.device("meta"):
        model = make(1)
    shard(model, world, PLACES[1])
    load(folder, model)
    assert_same(full_state(model), {f"model.{name}": value for name, value in make(1).state_dict().items()})


def test_into_a_meta_model(ranks, tmp_path):
    save(tmp_path / "a", make(1))
    ranks(2, _into_meta, str(tmp_path / "a"))


def _each_byte_once(rank, world, place, folder):
    model, optimizer = trained(rank, world, place)
    save(folder, model, optimizer)
    return sum(value.numel() * value.element_size() for value in full_state(model, optimizer).values())


@pytest.mark.parametrize("place", [PLACES[3], PLACES[4], PLACES[7], PLACES[9]], ids=str)
def test_each_byte_is_written_once(ranks, tmp_path, place):
    """Replicas take turns; tied weights are written once."""
    total = ranks(4, _each_byte_once, place, str(tmp_path / "a"))[0]
    known = json.loads((tmp_path / "a" / "manifest.json").read_text())["body"]["files"]
    contents = [file["bytes"] - file["header"] for file in known]
    tied = 29 * 12 * 4
    assert sum(contents) == total - tied
    assert max(contents) < 0.6 * total


def _in_background(rank, world, folder):
    model, optimizer = trained(rank, world, PLACES[1])
    wanted = full_state(model, optimizer)
    gate, write = threading.Event(), saving.write_snapshot

    def held(*args):
        gate.wait(20)
        write(*args)

    saving.write_snapshot = held
    try:
        pending = save(f"{folder}/a", model, optimizer, asynchronous=True)
        assert not pending.done()
        assert latest(folder) is None
        train(model, optimizer, 2, rank, world)  # while the file is being written
        gate.set()
        assert pending.wait()
    finally:
        saving.write_snapshot = write
    load(pending.result(), model, optimizer)
    assert_same(full_state(model, optimizer), wanted)
    # an error surfaces in the handle, and the next save works
    broken = save(f"{folder}/no/b", model, asynchronous=True)
    broken.wait()
    blocked = save(f"{folder}/a/rank-00000.safetensors/c", model, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"NotADirectory|FileExists"):
        blocked.wait()
    save(f"{folder}/a/rank-00000.safetensors/c", model, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"NotADirectory|FileExists"):  # nobody asked, so the next save tells
        save(f"{folder}/d", model)
    save(f"{folder}/d", model)
    dist.barrier()
    assert latest(folder).name == "d"


def test_asynchronous(ranks, tmp_path):
    ranks(2, _in_background, str(tmp_path))


def _one_rank_waits(rank, world, folder):
    model = fully_shard(torch.nn.Linear(6, 6))
    failing = save(f"{folder}/file/a", model, asynchronous=True)
    if rank == 0:
        with pytest.raises(CheckpointError, match="NotADirectory"):
            failing.wait()
    with pytest.raises(CheckpointError, match="NotADirectory"):
        save(f"{folder}/b", model)
    save(f"{folder}/c", model)
    return sorted(os.listdir(folder))


def test_an_error_that_one_rank_has_asked_for_is_raised_on_all(ranks, tmp_path):
    (tmp_path / "file").touch()
    assert ranks(2, _one_rank_waits, str(tmp_path)) == [["c", "file"]] * 2


def _own_paths(rank, world, folder):
    model = fully_shard(torch.nn.Linear(6, 6))
    with pytest.raises(CheckpointError, match="rank 1 saves to 'at-1' and rank 0 to 'at-0'"):
        save(f"{folder}/at-{rank}", model)
    save(f"{folder}/both", model)
    return sorted(os.listdir(folder))


def test_ranks_that_save_to_other_paths_are_named(ranks, tmp_path):
    assert ranks(2, _own_paths, str(tmp_path)) == [["both"]] * 2


def _export_during_a_save(rank, world, folder):
    model = fully_shard(torch.nn.Linear(64, 64))
    gate, write = threading.Event(), saving.write_snapshot

    def held(*args):
        assert rank == 0 or gate.wait(20)  # the save of rank 0 is ahead of its export, that of the others behind
        write(*args)

    saving.write_snapshot = held
    try:
        pending = save(f"{folder}/saved", model, asynchronous=True)
        export_safetensors(model, f"{folder}/exported")
        gate.set()
        pending.wait()
    finally:
        saving.write_snapshot = write
    verify(f"{folder}/saved")


def test_an_export_during_a_save_does_not_mix_with_it(ranks, tmp_path):
    ranks(2, _export_during_a_save, str(tmp_path))


def test_the_newest_are_kept(tmp_path):
    model = torch.nn.Linear(2, 2)
    assert latest(tmp_path / "none") is None
    (tmp_path / ".saving-left").mkdir()
    for step in range(12):
        save(tmp_path / f"step-{step}", model, extra=step, keep_last=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11", "step-9"]
    assert load(latest(tmp_path), model) == 11
    with pytest.raises(CheckpointError, match="step-11 exists; a checkpoint is never overwritten"):
        save(tmp_path / "step-11", model)
    with pytest.raises(ValueError, match="keep_last=0: must be at least 1"):
        save(tmp_path / "x", model, keep_last=0)
    with pytest.raises(CheckpointError, match="extra/0/a is a set; a checkpoint takes tensors"):
        save(tmp_path / "x", model, extra={"a": set()})
    with pytest.raises(CheckpointError, match=r"extra/0/a has dtype torch.complex128, which a checkpoint cannot hold"):
        save(tmp_path / "x", model, extra={"a": torch.zeros(2, dtype=torch.complex128)})


def test_what_a_killed_deletion_left_is_in_nobodys_way(tmp_path):
    model = torch.nn.Linear(2, 2)
    save(tmp_path / "a", model)
    (tmp_path / ".deleting-a" / "left").mkdir(parents=True)
    save(tmp_path / "b", model, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_a_killed_save_left_makes_room(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_publish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "a-1", model)
    assert len(list(tmp_path.iterdir())) == 1
    save(tmp_path / "1", model)
    assert len(list(tmp_path.iterdir())) == 2
    save(tmp_path / "a-1", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "a-1"]


def test_two_jobs_that_save_to_one_path_do_not_mix(tmp_path, monkeypatch):
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    has_written, may_publish, publish = threading.Event(), threading.Event(), saving._publish
    other = threading.Thread(target=save, args=(tmp_path / "a", second))

    def interleaved(*args):
        if threading.current_thread() is other:
            has_written.set()
            may_publish.wait(20)
            publish(*args)
            return
        other.start()
        has_written.wait(20)
        publish(*args)

    monkeypatch.setattr(saving, "_publish", interleaved)
    with pytest.raises(CheckpointError, match="must be on storage that all ranks share, and no other job"):
        save(tmp_path / "a", first)
    may_publish.set()
    other.join()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    verify(tmp_path / "a")
    load(tmp_path / "a", first)
    assert_same(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("synced", [1, 2])
def test_a_full_disk_is_reported_with_the_file(tmp_path, monkeypatch, synced):
    fsync, calls = os.fsync, itertools.count(1)

    def full(handle):
        if next(calls) == synced:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    file = ["rank-00000.safetensors", "manifest.json"][synced - 1]
    with pytest.raises(CheckpointError, match=f"No space left on device: .*{file}"):
        save(tmp_path / "a", torch.nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_in_a_terminal(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    model = make(1)
    for screen, progress, shown in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", screen)
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        save(path, model, progress=progress)
        load(path, model, progress=progress)
        assert ("saving" in screen.getvalue(), "loading" in screen.getvalue()) == (shown, shown)
        assert shown or not screen.getvalue()


def _one_rank_fails(rank, world, folder):
    model = fully_shard(torch.nn.Linear(6, 6))
    with pytest.raises(
        CheckpointError, match="rank 1: TypeError: extra/1 is a set" if rank == 0 else "extra/1 is a set"
    ):
        save(f"{folder}/a", model, extra=set() if rank == 1 else None)
    assert latest(folder) is None


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    ranks(2, _one_rank_fails, str(tmp_path))


def test_state_of_any_optimizer(tmp_path):
    """bfloat16 weights with float32 state, and states that are not tensors, come back as they were."""
    model = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": torch.randn(3, 3), "note": "kept", "seen": 3}
    save(tmp_path / "a", model, optimizer)
    other = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    fresh = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.9)
    load(tmp_path / "a", other, fresh)
    found = fresh.state[other.weight]
    assert torch.equal(found.pop("momentum_buffer"), optimizer.state[model.weight]["momentum_buffer"])
    assert found == {"note": "kept", "seen": 3}
    assert fresh.param_groups[0]["lr"] == torch.tensor(0.1)


def test_large_tensors_are_read_in_part(tmp_path):
    """Blocks of a mebibyte: a part of a box is verified by reading the blocks that it touches."""
    from flatshard.checkpoint.files import BLOCK
    from flatshard.checkpoint.manifest import Manifest
    from flatshard.checkpoint.reader import Reader

    value = torch.arange(1_500_000, dtype=torch.float32).view(1500, 1000)
    model = torch.nn.Module()
    model.register_buffer("table", value)
    save(tmp_path / "a", model)
    manifest = Manifest(tmp_path / "a")
    read = []
    with Reader(manifest, read.append) as reader:
        entry = manifest.tensors["model/table"]
        assert torch.equal(reader.read("t", entry, (700, 0), (20, 1000)), value[700:720])
        assert sum(read) == BLOCK
        assert torch.equal(reader.read("t", entry, (3, 10), (1400, 7)), value[3:1403, 10:17])
        assert torch.equal(reader.read("t", entry, (0, 0), (1500, 1000)), value)


def test_paths_that_are_alike_are_kept_apart(tmp_path):
    """The path of a tensor in `extra`, or in the state of an optimizer, may be that of another tensor."""
    given = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, 0: torch.tensor(2.0), "0": torch.tensor(3.0)}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight] = {**given, "last": torch.full((2,), 4.0)}
    save(tmp_path / "a", model, optimizer, {**given, "last": torch.full((2,), 5.0)})
    fresh = torch.optim.SGD(model.parameters(), momentum=0.9)
    extra = load(tmp_path / "a", model, fresh)
    for found, last in ((dict(fresh.state[model.weight]), 4.0), (extra, 5.0)):
        torch.testing.assert_close(found, {**given, "last": torch.full((2,), last)}, rtol=0, atol=0)


def test_extra_may_have_tensors_without_elements(tmp_path):
    given = {"none": torch.empty(0), "rows": torch.empty(0, 3, dtype=torch.int64), "one": torch.ones(1)}
    save(tmp_path / "a", torch.nn.Linear(2, 2), None, given)
    verify(tmp_path / "a")
    torch.testing.assert_close(load(tmp_path / "a", torch.nn.Linear(2, 2)), given, rtol=0, atol=0)


class Nested(torch.optim.Optimizer):
    """A user's: several averages per parameter, in a list, and one more that the bias does without."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                averages = [torch.zeros_like(parameter) for _ in range(2)]
                last = torch.zeros_like(parameter) if parameter.dim() == 2 else None
                state.update(averages=averages, slow={"last": last}, seen=torch.zeros(2))
            for decay, average in zip((0.5, 0.9), state["averages"]):
                average.mul_(decay).add_(parameter.grad)
                parameter.sub_(average, alpha=self.param_groups[0]["lr"])
            if state["slow"]["last"] is not None:
                parameter.sub_(state["slow"]["last"], alpha=0.01)
                state["slow"]["last"].copy_(parameter.grad)
            state["seen"] += 1


def _continued(rank, world, folder, kind, local_step=True):
    results = []
    for number in range(2):
        torch.manual_seed(number)
        model = torch.nn.Linear(3, 3)
        model.gain = torch.nn.Parameter(torch.tensor(1.0 + number))
        fully_shard(model)
        model.register_forward_hook(lambda module, args, out: out * module.gain)
        optimizer = kind(model.parameters(), {"lr": 0.1}) if kind is Nested else kind(model.parameters(), lr=0.1)
        if local_step:
            fully_shard_optimizer(optimizer)
        if number:
            load(folder, model, optimizer)
        for step in range(2 * number, 4):
            if step == 2 and not number:
                save(folder, model, optimizer)
            model(torch.full((2, 3), 1.0 + step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("kind", "local_step"),
    [(torch.optim.NAdam, True), (torch.optim.ASGD, True), (Nested, True), (Nested, False)],
)
def test_training_continues_with_numbers_per_parameter_and_with_lists(ranks, tmp_path, kind, local_step):
    ranks(2, _continued, str(tmp_path / "a"), kind, local_step)
