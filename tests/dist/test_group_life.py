"""Process groups of our own: as few as can be, shared by models, and gone when nobody uses them."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard import SchedulePolicy, fully_shard
from flatshard.buffer import Exchange, Lane
from flatshard.buffer.groups import joint_group
from flatshard.engine.units.unit import unit_of

SEPARATE, SHARED = (SchedulePolicy(separate_groups=choice) for choice in (True, False))


def ours():
    """How many groups of each kind this process is in that the library has made."""
    return Counter(group.group_desc for group in c10d._world.pg_map if group.group_desc.startswith("flatshard"))


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def trained(mesh, schedule, **choices):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, schedule=schedule, **choices)
    model(torch.ones(2, 8)).sum().backward()
    return model


def _counts(rank, world):
    found = {}
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases = {"shared": (square, SHARED, {}), "1-D": (flat, SEPARATE, {}), "2-D": (square, SEPARATE, {})}
    cases["outer optimizer"] = square, SEPARATE, {"outer_strategy": "optim"}
    for name, (mesh, schedule, choices) in cases.items():
        model = trained(mesh, schedule, **choices)
        found[name] = ours()["flatshard_reduce"]
        if mesh is square:
            found[name, "outer"] = unit_of(model).root.reduce_lane.group(mesh, 0) is mesh.get_group(0)
        del model
        flatshard.destroy_groups()
        assert not ours()
    return found


def test_reduces_have_groups_of_their_own_only_along_axes_that_are_gathered_over(ranks):
    expected = {"shared": 0, "1-D": 1, "2-D": 1, ("shared", "outer"): True, ("2-D", "outer"): True}
    expected |= {"outer optimizer": 2, ("outer optimizer", "outer"): False}  # weights are gathered along both
    assert ranks(4, _counts) == [expected] * 4


def _ten(rank, world):
    counts, tasks = [], []
    for _ in range(10):
        mesh = init_device_mesh("cpu", (2, 2))
        model = trained(mesh, SEPARATE)
        counts.append(ours())
        groups = mesh.get_all_groups()
        del model, mesh
        gc.collect()
        for group in groups:  # the mesh's, which torch keeps
            dist.destroy_process_group(group)
        tasks.append(threads())
    assert counts == [Counter(flatshard_reduce=1)] * 10
    assert tasks[-1] <= tasks[1], tasks
    flatshard.destroy_groups()
    assert not ours()
    assert threads() < tasks[-1]


@pytest.mark.full
def test_models_that_come_and_go_leave_no_groups_and_threads(ranks):
    ranks(4, _ten)


def _shared(rank, world):
    mesh = init_device_mesh("cpu", (2, 2))
    first, second = trained(mesh, SEPARATE), trained(mesh, SEPARATE)
    lanes = [unit_of(model).root.reduce_lane for model in (first, second)]
    assert lanes[0] is not lanes[1]
    assert lanes[0].group(mesh, 1) is lanes[1].group(mesh, 1)
    del first, lanes
    flatshard.destroy_groups()  # the second model is left
    assert ours() == Counter(flatshard_reduce=1)
    second(torch.ones(2, 8)).sum().backward()
    group = unit_of(second).root.reduce_lane.group(mesh, 1)
    del second
    third = trained(again := init_device_mesh("cpu", (2, 2)), SEPARATE)
    assert unit_of(third).root.reduce_lane.group(again, 1) is group  # it was left for whoever can use it
    del third, group
    flatshard.destroy_groups()
    assert not ours()
    assert trained(mesh, SEPARATE) is not None  # under the same name ranks meet again
    assert ours() == Counter(flatshard_reduce=1)


def test_models_on_one_mesh_share_groups_and_the_last_one_lets_go(ranks):
    ranks(4, _shared)


def _next(rank, world):
    model = trained(init_device_mesh("cpu", (2, 2)), SEPARATE)
    Exchange("test").gather(b"")
    joint_group(init_device_mesh("cpu", (2, 2, 1)), (1, 2))
    assert ours() == Counter(flatshard_reduce=1, flatshard_test=1, flatshard_joint=1)
    kept = [model] if rank == 0 else []  # as one that is not collected yet
    del model
    trained(init_device_mesh("cpu", (4,)), SHARED)
    left = ours()
    kept.clear()
    trained(init_device_mesh("cpu", (4,)), SHARED)
    assert ours() == Counter(flatshard_test=1)
    return left["flatshard_reduce"], left["flatshard_test"], left["flatshard_joint"]


def test_the_next_model_destroys_what_no_rank_uses(ranks):
    """A group stays as long as one of its ranks has a use for it: rank 0 is in one with rank 1.

    One that has the ranks of the next model's mesh is left for that.
    """
    assert ranks(4, _next) == [(1, 1, 0), (1, 1, 0), (0, 1, 0), (0, 1, 0)]


def _all(rank, world):
    trained(init_device_mesh("cpu", (2, 2)), SEPARATE)
    Exchange("test").gather(b"")
    assert ours()
    before = threads()
    dist.destroy_process_group()
    gc.collect()
    assert not c10d._world.pg_map
    assert threads() < before
    flatshard.destroy_groups()  # there are none


@pytest.mark.full
@pytest.mark.xdist_group("interpreters")
def test_torch_destroys_them_with_the_default_group(interpreters):
    interpreters(4, _all)


def test_without_ranks_there_is_nothing_to_destroy():
    flatshard.destroy_groups()


def _given(rank, world):
    lane, mesh = Lane("test", torch.device("cpu"), own_groups=True), init_device_mesh("cpu", (2,))
    own = lane.group(mesh, 0)
    flatshard.destroy_groups()
    lane.all_reduce(own, [value := torch.ones(1)], name="test").wait()  # somebody has the lane
    assert value.item() == 2
    del own, lane
    flatshard.destroy_groups()
    assert not ours()


@pytest.mark.limit(30)
def test_a_group_lives_as_long_as_a_lane_that_uses_it(ranks):
    ranks(2, _given)
