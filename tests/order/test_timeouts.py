"""Process groups that the library makes wait as long as the user's own, and no longer."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard.buffer.groups import joint_group
from tests.order.cases import make, rows, shard

# tests/dist/test_process_groups.py holds the same promise within one default group.
pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30), pytest.mark.full]
PATIENCE = timedelta(seconds=20)


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def begin(rank, world, meeting):
    """As a user's script does, in the place of the bench's group."""
    dist.barrier()  # who leaves at once closes connections that others are still making
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{meeting}", timeout=PATIENCE, rank=rank, world_size=world)
    assert timeout_of(dist.group.WORLD) == PATIENCE


def made_by_the_library():
    """Whatever groups there are beside the default one, by their description."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return {group.group_desc: timeout_of(group) for group in groups if "flatshard" in group.group_desc}


def _training(rank, world, meeting, folder):
    begin(rank, world, meeting)
    model = shard(make())
    optimizer = torch.optim.AdamW(model.parameters())
    model(rows(rank)).sum().backward()
    flatshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    reduces = made_by_the_library()
    flatshard.checkpoint.save(folder, model, optimizer, progress=False)
    return reduces, made_by_the_library()


def test_groups_of_reduces_and_checkpoints(interpreters, tmp_path):
    for reduces, all_groups in interpreters(2, _training, str(tmp_path / "meeting"), str(tmp_path / "saved")):
        assert reduces  # reduces have groups of their own
        assert len(all_groups) > len(reduces)  # and so has a checkpoint
        assert all_groups == dict.fromkeys(all_groups, PATIENCE)


def _joint(rank, world, meeting):
    begin(rank, world, meeting)
    mesh = init_device_mesh("cpu", (2, 1, 2))
    pair = joint_group(mesh, (0, 1))
    assert pair.size() == 2
    return timeout_of(pair)


def test_groups_over_several_axes(interpreters, tmp_path):
    assert interpreters(4, _joint, str(tmp_path / "meeting")) == [PATIENCE] * 4


def _hybrid(rank, world, meeting):
    """A mesh of two axes has groups of its own, which the user may have given another time."""
    begin(rank, world, meeting)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make(), mesh=mesh)
    model(rows(rank)).sum().backward()
    allowed = {PATIENCE, *(timeout_of(mesh.get_group(axis)) for axis in range(2))}
    return made_by_the_library(), allowed


def test_groups_of_a_hybrid_mesh(interpreters, tmp_path):
    for groups, allowed in interpreters(4, _hybrid, str(tmp_path / "meeting")):
        assert groups
        assert set(groups.values()) <= allowed
