"""What collectives write, how long they take, and in which order, when the other ranks are twins (CPU)."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatshard.rehearsal import Link, Network, clock_cpu, rehearse

W = 4
SLOW = Network(Link(1e9, 5e-3), Link(1e9, 20e-3), ranks_per_node=2)
NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")


@pytest.fixture
def group():
    with rehearse(W, "free", rank=2):
        yield dist.group.WORLD


def options(op):
    result = dist.ReduceScatterOptions()
    result.reduceOp = op
    return result


def test_gather_fills_every_slot_with_the_own_shard(group):
    out, shard = torch.full((W * 3,), -1.0), torch.arange(3.0)
    dist.all_gather_into_tensor(out, shard)
    assert torch.equal(out, shard.repeat(W))
    rows = [torch.empty(3) for _ in range(W)]
    dist.all_gather(rows, shard)
    assert all(torch.equal(row, shard) for row in rows)


@pytest.mark.parametrize("name", ["allgather_into_tensor_coalesced", "all_gather_single_coalesced"])
def test_coalesced_gather_in_place(group, name):
    if not NEW_NAMES and name.startswith("all_gather"):
        pytest.skip("this torch has the old name only")
    full = [torch.randn(W * 5), torch.randn(W * 2, 3)]
    shards = [tensor.chunk(W)[2] for tensor in full]
    expected = [torch.cat([shard.clone()] * W) for shard in shards]
    getattr(group, name)(full, shards).wait()
    assert all(torch.equal(tensor, value) for tensor, value in zip(full, expected))


@pytest.mark.parametrize(
    ("op", "factor"),
    [(dist.ReduceOp.SUM, W), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1), (dist._make_nccl_premul_sum(0.5), W / 2)],
)
def test_reductions_are_those_of_equal_ranks(group, op, factor):
    full = torch.randn(W * 6)
    out = torch.empty(6)
    group._reduce_scatter_base(out, full, options(op)).wait()
    assert torch.allclose(out, factor * full[12:18])
    expected = factor * full[12:18]
    group.reduce_scatter_tensor_coalesced([full[12:18]], [full], options(op)).wait()
    assert torch.allclose(full[12:18], expected)
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor, op)
    assert torch.allclose(tensor, factor * torch.arange(4.0))


def test_product_is_refused(group):
    with pytest.raises(ValueError, match="cannot be rehearsed"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT)


def test_other_collectives(group):
    own = torch.arange(4)
    out = torch.empty(6, dtype=torch.int64)
    dist.all_to_all_single(out, own, [2, 1, 1, 2], [1, 1, 1, 1])
    assert out.tolist() == [0, 1, 2, 3, 0, 1]
    dist.broadcast(own, src=2)
    assert own.tolist() == [0, 1, 2, 3]
    dist.all_reduce(own)
    assert own.tolist() == [0, 4, 8, 12]
    dist.recv(own, src=0)
    assert own.tolist() == [0, 0, 0, 0]
    objects = [None] * W
    dist.all_gather_object(objects, {"x": 1})
    assert objects == [{"x": 1}] * W
    dist.barrier()
    with dist._coalescing_manager(group, async_ops=True) as manager:
        a, b = torch.ones(2), torch.ones(3)
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    assert a.tolist() == [W] * 2


def test_functional_collectives_reach_the_backend(group):
    import torch.distributed._functional_collectives as funcol

    value = torch.arange(2.0)
    assert funcol.all_reduce(value, "sum", group).tolist() == [0, W]
    assert funcol.all_gather_tensor(value, 0, group).tolist() == [0, 1] * W
    assert funcol.reduce_scatter_tensor(torch.arange(8.0), "avg", 0, group).tolist() == [4, 5]


def test_autograd_versions_are_left_alone(group):
    full = torch.zeros(W * 2)
    version = full._version
    dist.all_gather_into_tensor(full, full[4:6])
    dist.all_reduce(full)
    assert full._version == version


def test_shapes_that_do_not_fit_are_named(group):
    with pytest.raises(ValueError, match=r"all_gather: the output has 7 elements of torch.float32 and the input 2"):
        group._allgather_base(torch.empty(7), torch.empty(2))
    with pytest.raises(ValueError, match="contiguous"):
        group.allreduce([torch.empty(4, 4).t()])


@pytest.fixture
def ends(monkeypatch):
    """When the links are done with each transfer, by a clock that stands still: the network alone takes time."""
    found = []
    monkeypatch.setattr(clock_cpu, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(clock_cpu, "_sleep_until", found.append)
    return found


def test_time_and_level(ends):
    with rehearse(W, SLOW) as rehearsal:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for name in ("inner", "outer", "inner"):
            dist.all_reduce(torch.ones(250_000), dist.ReduceOp.AVG, mesh.get_group(name))
        entry = rehearsal.medium.traffic.entries["all_reduce"]
    assert ends == pytest.approx([6e-3, 21e-3, 12e-3])  # 1 MB: 1 ms on the wire of 2 ranks, and the latency
    assert (entry.launches, entry.bytes, entry.wire_bytes) == (3, 3_000_000, 3_000_000)
    assert entry.wire_seconds == pytest.approx(33e-3)


def test_groups_share_the_link_and_levels_do_not(ends):
    with rehearse(W, SLOW):
        inner, twin, world = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.group.WORLD
        for work in [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in (inner, twin, world)]:
            work.wait()
    assert sorted(ends) == pytest.approx([5e-3, 10e-3, 20e-3], rel=1e-3)


def test_who_waits_waits_for_the_wire():
    with rehearse(W, SLOW):
        begin = time.perf_counter()
        dist.all_reduce(torch.ones(4))
        assert time.perf_counter() - begin >= 20e-3


def test_launches_return_before_the_wire_is_done_and_keep_their_order():
    with rehearse(W, Network(Link(1e9, 50e-3), Link(1e9, 50e-3))):
        tensor = torch.ones(1)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        assert not works[2].is_completed()
        works[2].wait()
        assert all(work.is_completed() for work in works)
        assert tensor.item() == W**3
        assert works[0].get_future().wait() == [tensor]


def test_a_failed_transfer_raises_at_wait(group):
    work = dist.all_gather_into_tensor(
        torch.empty(8), torch.empty(2, dtype=torch.complex64).real.clone(), async_op=True
    )
    work.wait()
    work = group.allgather([[torch.empty(2), torch.empty(3)]], [torch.empty(2)])
    with pytest.raises(RuntimeError, match="size"):
        work.wait()
