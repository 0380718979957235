"""Weights that stream from a model in training to one in other processes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flatshard import fully_shard, receive_weights, sync_weights
from flatshard.checkpoint import StoredAs, full

NAMES = [StoredAs("blocks.*.weight", ("layers.*.matrix",)), StoredAs("blocks.*.bias", ("layers.*.offset",))]


def _model(seed):
    torch.manual_seed(seed)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))  # 5 rows do not divide evenly
    model.register_buffer("count", torch.tensor(seed))
    return model


def _engine(mesh):
    """What an inference engine has: other names, another dtype, matrices cut on their columns."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    model.register_buffer("count", torch.tensor(0))
    for _ in range(3):
        layer = nn.Module()
        matrix = distribute_tensor(torch.zeros(5, 5, dtype=torch.bfloat16), mesh, [Shard(1)])
        layer.matrix, layer.offset = nn.Parameter(matrix), nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        model.layers.append(layer)
    return model


def _stream(rank, world, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "rank"))["rank"]
    group = dist.new_group([0, 2, 3])
    bucket = 120  # bytes: several, and a matrix in bfloat16 is half of one
    if rank < 2:
        model = _model(1)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sent = [sync_weights(model, target, names=NAMES, dtype=torch.bfloat16, bucket_bytes=bucket)
                for target in (group, folder)]  # fmt: skip
        with torch.no_grad():
            model.blocks[0].weight.zero_()
        dist.barrier()  # the first version has been read
        sync_weights(model, folder, names=NAMES)
        seen = []
        sync_weights(
            model, lambda tensors: seen.append({name: value.clone() for name, value in tensors}), bucket_bytes=bucket
        )
        return sent[0].bytes, [part.version for part in sent], seen
    engine = _engine(mesh)
    results = []
    for number, source in enumerate((group, folder, folder)):
        got = receive_weights(engine, source, after=number - 1, timeout=300)
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in engine.state_dict().items()
        }
        assert engine.layers[0].matrix.to_local().shape == (5, 3 if rank == 2 else 2)
        results.append((got, {name: value.clone() for name, value in whole.items()}))
        if number == 1:
            dist.barrier()
    return results


def test_an_engine_in_other_processes_gets_the_weights(ranks, tmp_path):
    trained = _model(1).state_dict()
    sender, second, *engines = ranks(4, _stream, str(tmp_path / "weights"))
    wanted = {}
    for name, value in trained.items():
        renamed = name.replace("blocks", "layers").replace("weight", "matrix").replace("bias", "offset")
        wanted[renamed] = value.bfloat16() if value.is_floating_point() else value
    for (first, whole), (_, through_files), (newer, changed) in engines:
        assert first.bytes == sender[0] == 3 * 30 * 2 + 8
        assert (first.version, newer.version) == (0, 2)
        for found in (whole, through_files):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert not changed["layers.0.matrix"].any()
        torch.testing.assert_close(changed["layers.1.matrix"], wanted["layers.1.matrix"], rtol=0, atol=0)
    for buckets in (sender[2], second[2]):
        assert len(buckets) > 1
        assert all(sum(value.nbytes for value in bucket.values()) <= 120 for bucket in buckets)
        torch.testing.assert_close(
            {name: value for bucket in buckets for name, value in bucket.items()},
            {**trained, "blocks.0.weight": torch.zeros(5, 5)}, rtol=0, atol=0,
        )  # fmt: skip


def _alone(rank, world, folder):
    sync_weights(_model(1), folder)
    other = nn.Module()
    other.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(4, 5)])
    other.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"'blocks.1.weight' was received with shape \(5, 5\); the model has \(5, 4\).*and 2 more"
    ):
        receive_weights(other, folder)
    with pytest.raises(TimeoutError, match="no weights newer than version 1"):
        receive_weights(other, folder, after=1, timeout=0.02)


def test_weights_that_do_not_fit_are_named(ranks, tmp_path):
    ranks(1, _alone, str(tmp_path))


def _refused(rank, world, folder):
    model = _model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if rank:
        return sync_weights(model, folder).version
    with pytest.raises(FileExistsError):
        sync_weights(model, folder)
    return 0


def test_a_folder_that_cannot_be_written_leaves_no_rank_waiting(ranks, tmp_path):
    (tmp_path / "1").write_text("in the place of the first version")
    assert ranks(2, _refused, str(tmp_path)) == [0, 1]


def _target_fails(rank, world):
    model = _model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    received = {}

    def take(bucket):
        if rank == 0 and not received:
            received["failed"] = True
            raise KeyError("an engine")
        received.update({name: value.clone() for name, value in bucket})

    with pytest.raises(KeyError, match="an engine") if rank == 0 else nullcontext():
        sync_weights(model, take, bucket_bytes=120)
    sync_weights(model, take, bucket_bytes=120)
    received.pop("failed", None)
    return received


def test_a_target_that_fails_on_one_rank_does_not_spoil_the_next_sync(ranks):
    for received in ranks(2, _target_fails):
        torch.testing.assert_close(received, dict(_model(1).state_dict()), rtol=0, atol=0)


def _versions(rank, world, folder, strategy):
    model = _model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), strategy=strategy)
    write = full.write_files

    def write_late(*args):
        time.sleep(0.1)
        write(*args)

    with patch.object(full, "write_files", write_late):
        return [sync_weights(model, folder).version for _ in range(3)]


@pytest.mark.parametrize("strategy", [0, 3])
def test_all_ranks_name_the_version_that_the_first_writes(ranks, tmp_path, strategy):
    assert ranks(2, _versions, str(tmp_path), strategy) == [[1, 2, 3], [1, 2, 3]]
