"""Process groups that the library makes: as patient as the user's, and only with the ranks that they are for."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard import _torch, fully_shard
from flatshard.buffer import Exchange, Lane
from flatshard.buffer.groups import joint_group, own_group
from flatshard.engine.units.unit import unit_of

CPU = torch.device("cpu")


def seconds_of(group):
    return group._get_backend(CPU).options._timeout.total_seconds()


def _timeouts(rank, world):
    patient, hasty = (dist.new_group(timeout=timedelta(seconds=s)) for s in (77, 33))
    assert seconds_of(own_group(patient, "test")) == 77
    assert seconds_of(own_group(hasty, "test")) == 33
    lane = Lane("test", CPU, own_groups=True)
    assert seconds_of(lane.group(DeviceMesh.from_group(hasty, "cpu"), 0)) == 33
    plain = dist.new_group()
    assert _torch.timeout_of(plain) is None  # torch's default
    assert seconds_of(own_group(plain, "test")) == seconds_of(plain)
    c10d._set_pg_timeout(timedelta(seconds=44), dist.group.WORLD)
    assert seconds_of(Exchange("test")._group) == 44


def test_a_group_waits_as_long_as_the_one_that_it_is_made_beside(ranks):
    ranks(2, _timeouts)


def _joint(rank, world):
    mesh = init_device_mesh("cpu", (2, 1, 2))
    for axis, seconds in ((1, 33), (2, 77)):
        c10d._set_pg_timeout(timedelta(seconds=seconds), mesh.get_group(axis))
    assert seconds_of(joint_group(mesh, (1, 2))) == 77  # the more patient axis may need it
    mesh = init_device_mesh("cpu", (4,))
    c10d._set_pg_timeout(timedelta(seconds=44), mesh.get_group())
    module = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
    parked = unit_of(module).groups[0].post_forward_mesh
    assert parked.mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert parked.get_group() is joint_group(init_device_mesh("cpu", (2, 1, 2)), (1, 2))  # by its ranks, once
    mesh = init_device_mesh("cpu", (1, 2, 2))
    assert joint_group(mesh, (0, 2)) is parked.get_group()


def test_so_do_groups_over_several_axes_and_parts_of_one(ranks):
    ranks(4, _joint)


class _Refusing:
    """A communicator that is split off the default group's would wait for ranks which are not there."""

    def __enter__(self):
        self.theirs, self.device = c10d._get_split_source, dist.group.WORLD.bound_device_id
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # what init_process_group(device_id=...) leaves

        def refuse(group):
            raise AssertionError("a communicator is to be split off the default group's")

        c10d._get_split_source = refuse

    def __exit__(self, *error):
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)  # as it was found
        c10d._get_split_source, dist.group.WORLD.bound_device_id = self.theirs, self.device


def _unsplit(rank, world):
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]  # as of two stages of a pipeline
    mesh, stage = meshes[rank // 2], rank // 2
    line = init_device_mesh("cpu", (2, 2, 1))
    with _Refusing():
        if stage == 0:  # the other stage is never here
            module = fully_shard(nn.Linear(4, 4), mesh=mesh)
            module(torch.ones(2, 4)).sum().backward()
            assert unit_of(module).root.reduce_lane.group(mesh, 0).bound_device_id is None
            lane, value = Lane("test", CPU), torch.ones(1)
            lane.all_reduce(joint_group(line, (1, 2)), [value], name="test").wait()
            assert value.item() == 2
        Exchange("test").gather(b"all")


@pytest.mark.limit(30)
def test_a_group_of_some_ranks_needs_no_others_with_eager_communicators(ranks):
    ranks(4, _unsplit)


def _unequal(rank, world):
    """Rank 0 is in one group more than the others; what torch makes up for names of groups then differs."""
    dist.new_group([0])
    module = fully_shard(nn.Linear(4, 4))
    module(torch.ones(2, 4)).sum().backward()
    lane, value = Lane("test", CPU), torch.ones(1)
    lane.all_reduce(joint_group(init_device_mesh("cpu", (2, 2, 1)), (1, 2)), [value], name="test").wait()
    return value.item()


@pytest.mark.limit(30)
def test_ranks_that_are_in_different_numbers_of_groups_meet(ranks):
    assert ranks(4, _unequal) == [2.0] * 4


class _Plain(dist.ProcessGroup):
    """A process group written in Python, which has no backends of torch's and knows no time-out."""


def test_groups_without_a_known_timeout_get_the_default():
    assert _torch.timeout_of(_Plain(0, 1)) is None
