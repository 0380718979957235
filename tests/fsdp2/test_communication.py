"""Who communicates, in which memory, how much at a time: custom collectives and the setters around them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import MixedPrecisionPolicy, SchedulePolicy, fully_shard, share_comm_ctx
from flatshard.engine.units.unit import unit_of
from tests.fsdp2.cases import DEPTH, Launched, chain, check_grads, mine, reference_grads, sharded_chain


class Gather:
    """Counts, and gathers with lists, as only somebody else would."""

    def __init__(self):
        self.sizes, self.calls, self.waits = [], 0, 0

    def allocate(self, size, *, dtype, device):
        self.sizes.append(tuple(size))
        return torch.full(size, float("nan"), dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        parts = list(output_tensor.chunk(group.size()))
        assert input_tensor.data_ptr() == parts[group.rank()].data_ptr()
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


class Reduce(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        assert op == dist.ReduceOp.SUM  # Gloo has no mean
        work = dist.all_reduce(input_tensor, group=group, op=op, async_op=False)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return work


def _custom(rank, world, dtype):
    # A block's tensors have 8, 8, 6 and 6 rows: two of them are padded at four ranks.
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model, plain = sharded_chain(mp_policy=policy), sharded_chain(mp_policy=policy)
    gather, reduce = Gather(), Reduce()
    block = model.blocks[1]
    block.set_custom_all_gather(gather)
    block.set_custom_reduce_scatter(reduce)
    for net in (model, plain):
        for _ in range(2):
            net(mine(rank, world)).sum().backward()
    assert (gather.calls, reduce.calls) == (4, 2)  # in forward and in backward; one call for the whole unit
    numel = sum(parameter.to_local().numel() for parameter in block.parameters())
    assert gather.sizes[0][0] >= world * numel
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters()):
        same = torch.equal(found.grad.to_local(), wanted.grad.to_local())
        assert same or torch.allclose(found.grad.to_local(), wanted.grad.to_local(), rtol=1e-2, atol=1e-2), name
    if dtype is None:
        check_grads(model, reference_grads(world, (0, 0)))
    block.set_custom_all_gather(None)
    block.set_custom_reduce_scatter(None)
    model(mine(rank, world)).sum().backward()
    assert (gather.calls, reduce.calls) == (4, 2)
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(TypeError, match="allocate"):
            getattr(model, method)(print)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_custom_all_gather_and_reduce_scatter(ranks, dtype):
    ranks(4, _custom, dtype)


def _shipped(rank, world):
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    model = sharded_chain()
    model.blocks[0].set_custom_all_gather(DefaultAllGather())
    model.blocks[0].set_custom_reduce_scatter(DefaultReduceScatter())
    for block in model.blocks[1:]:
        block.set_allocate_memory_from_process_group_for_comm(True)  # Gloo has no allocator: ordinary memory
    model(mine(rank, world)).sum().backward()
    check_grads(model, reference_grads(world))
    assert unit_of(model.blocks[1]).groups[0].all_gather_comm is not None
    model.blocks[1].set_allocate_memory_from_process_group_for_comm(False)
    assert unit_of(model.blocks[1]).groups[0].all_gather_comm is None
    model.blocks[1].set_custom_all_gather(Gather())
    with pytest.raises(RuntimeError, match="custom"):
        model.blocks[1].set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match="CUDA"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="NCCL"):
        model.set_symm_mem_for_comm("nope")


def test_implementations_that_torch_ships(ranks):
    ranks(2, _shipped)


def _in_flight(rank, world):
    model = sharded_chain(schedule=SchedulePolicy(max_reducing=3))
    for wrong, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error):
            model.set_reduce_scatter_max_input_buffers(wrong)
    model.blocks[0].set_reduce_scatter_max_input_buffers(1, recurse=False)
    model(mine(rank, world)).sum().backward()
    root = unit_of(model).root
    assert root.reduces._most == 1  # said before there was a root
    model.set_reduce_scatter_max_input_buffers(2)
    model.blocks[0].set_reduce_scatter_max_input_buffers(1)
    assert root.reduces._most == 2
    most, reduce = [], root.reduces.launch

    def counted(*args):
        reduce(*args)
        most.append(len(root.reduces.in_flight))

    root.reduces.launch = counted
    model(mine(rank, world)).sum().backward()
    assert max(most) == 2
    check_grads(model, reference_grads(world, (0, 0)))


def test_set_reduce_scatter_max_input_buffers(ranks):
    ranks(2, _in_flight)


def _groups(rank, world):
    model = sharded_chain()
    model.set_separate_reduce_scatter_group(False)
    for enable in (False, True, False):
        model.set_separate_reduce_scatter_group(enable)
        model.zero_grad()
        model(mine(rank, world)).sum().backward()
        root, mesh = unit_of(model).root, unit_of(model).mesh
        assert (root.reduce_lane.group(mesh, 0) is root.gather_lane.group(mesh, 0)) is not enable
        check_grads(model, reference_grads(world))
    other = sharded_chain()
    other.set_separate_reduce_scatter_group()
    other(mine(rank, world)).sum().backward()
    model.set_separate_reduce_scatter_group()
    model(mine(rank, world)).sum().backward()
    lanes = [unit_of(net).root.reduce_lane for net in (model, other)]
    assert lanes[0] is not lanes[1]
    assert lanes[0].group(mesh, 0) is lanes[1].group(unit_of(other).mesh, 0)  # of the same ranks, for the same


def test_set_separate_reduce_scatter_group(ranks):
    ranks(2, _groups)


def _shared(rank, world):
    """Stages that no root holds together."""
    reference, model = chain(), chain()
    stages = [*model.blocks, model.head]
    for stage in stages:
        fully_shard(stage)
    share_comm_ctx(stages)
    roots = [unit_of(stage).root for stage in stages]
    assert len({id(root) for root in roots}) == len(stages)
    assert len({id(root.gather_lane) for root in roots}) == len({id(root.reduce_lane) for root in roots}) == 1
    assert len({id(root.gather_pool) for root in roots}) == 1
    x = mine(rank, world)
    for _ in range(2):
        for net in (model, reference):
            net(x).sum().backward()
    for (name, found), wanted in zip(model.named_parameters(), reference.parameters()):
        mean = wanted.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(found.grad.full_tensor(), mean / world, msg=lambda m, n=name: f"{n}: {m}")
    share_comm_ctx([])
    with pytest.raises(ValueError, match="Linear"):
        share_comm_ctx([stages[0], nn.Linear(2, 2)])


def test_share_comm_ctx(ranks):
    ranks(2, _shared)


def _event(rank, world):
    model = sharded_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    reference = chain()
    other = torch.optim.SGD(reference.parameters(), lr=0.1, fused=True)
    for number in range(2):
        model(mine(rank, world, number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_post_optim_event(torch.cpu.current_stream().record_event())
        other.zero_grad()
        for rank_ in range(world):
            (reference(mine(rank_, world, number)).sum() / world).backward()
        other.step()
    assert unit_of(model).root.gathers.main_event is None
    model._set_unshard_async_op(True)  # it always is
    for found, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(found.full_tensor(), wanted.data)


def test_set_post_optim_event(ranks):
    ranks(2, _event)


def _launches(rank, world):
    model = sharded_chain()
    model(mine(rank, world)).sum().backward()
    with Launched(model) as launched:
        model(mine(rank, world)).sum().backward()
    assert (launched.gathers, launched.reduces) == (2 * DEPTH + 1, DEPTH + 1)


def test_collectives_of_a_step(ranks):
    ranks(2, _launches)
