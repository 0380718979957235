"""How far gradients are reduced, and by what they are divided: the setters of PyTorch's FSDPModule."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.buffer import lanes
from flatshard.engine.units.unit import unit_of
from tests.fsdp2.cases import DEPTH, Launched, check_grads, mine, reference_grads, sharded_chain

UNITS = DEPTH + 1


def _sync(rank, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    model = sharded_chain(mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(mine(rank, world)).sum().backward()
    model.zero_grad()
    counts = []
    for number, (sync, reduce_all) in enumerate(((False, None), (True, False), (True, None))):
        model.set_requires_gradient_sync(sync)
        if reduce_all is not None:
            model.set_requires_all_reduce(reduce_all)
        with Launched(model) as launched:
            model(mine(rank, world, number)).sum().backward()
        counts.append(launched.reduces)
        if number < 2:
            optimizer.zero_grad()  # reaches what optimizers know: gradients that wait here stay
    assert counts == [0, UNITS, 2 * UNITS]  # the inner axis, then both; syncing again all-reduces again
    check_grads(model, reference_grads(world, (0, 1, 2)))
    model.set_requires_gradient_sync(False, recurse=False)
    with Launched(model) as launched:
        model(mine(rank, world)).sum().backward()
    assert launched.reduces == 2 * DEPTH


def test_set_requires_gradient_sync_and_all_reduce(ranks):
    ranks(4, _sync)


def _last(rank, world):
    model = sharded_chain()
    root = None
    for number in range(3):
        model.set_is_last_backward(number == 2)
        model(mine(rank, world, number)).sum().backward()
        root = unit_of(model).root
        in_flight = len(root.reduces.in_flight)
        assert in_flight == (0 if number == 2 else 2)
    check_grads(model, reference_grads(world, (0, 1, 2)))


def test_set_is_last_backward_lets_reduces_overlap_the_next_forward(ranks):
    ranks(2, _last)


def _factor(rank, world, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model = sharded_chain(mesh=mesh)
    model.set_gradient_divide_factor(world * 2)
    for block in model.blocks:
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            block.set_reduce_scatter_divide_factor(float(world * 2))
    model(mine(rank, world)).sum().backward()
    check_grads(model, reference_grads(world), 0.5)
    for wrong in (0, float("nan"), True, "2"):
        with pytest.raises(ValueError, match="finite number"):
            model.set_gradient_divide_factor(wrong)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_gradient_divide_factor(ranks, shape):
    ranks(2, _factor, shape)


def _factor_between(rank, world):
    """Gradients that rest between micro-batches, reduced over the inner axis, follow settings that change there."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    changes = {
        1.0: lambda unit: unit.set_force_sum_reduction_for_comms(True),
        0.5: lambda unit: unit.set_gradient_divide_factor(world * 2),
    }
    for share, change in changes.items():
        model = sharded_chain(mesh=mesh)
        for number in range(2):
            model.set_requires_all_reduce(number == 1)
            for unit in (model, *model.blocks) if number else ():
                change(unit)
            model(mine(rank, world, number)).sum().backward()
        check_grads(model, reference_grads(world, (0, 1)), share)


def test_settings_of_reduces_change_between_micro_batches(ranks):
    ranks(4, _factor_between)


def _half(rank, world, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model = nn.Linear(4, 8, bias=False)
    nn.init.zeros_(model.weight)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))

    def grads(*values):
        model.zero_grad()
        for number, value in enumerate(values, 1):
            model.set_requires_gradient_sync(number == len(values))
            model(torch.full((1, 4), value)).sum().backward()
        return set(model.weight.grad.full_tensor().flatten().tolist())

    large = 40000.0 if world == 2 else 30000.0  # float16 ends at 65504: the sum over ranks is beyond that
    small = 2.0**-23  # twice the least number: divided by four ranks at once, it would be nothing
    assert grads(large) == {large}
    assert grads(small) == {small}
    assert grads(large / 2, large / 2) == {large}
    model.set_force_sum_reduction_for_comms(True)
    assert grads(large) == {large}
    model.set_gradient_divide_factor(world * 2)
    assert grads(large) == {large / 2}


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_sums_of_float16_stay_finite(ranks, shape):
    ranks(math.prod(shape), _half, shape)


class Recorder:
    """A ReduceScatter that remembers what it was asked to do, and does it."""

    def __init__(self):
        self.ops = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.ops.append(op)
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _sums(rank, world):
    model, recorder = sharded_chain(), Recorder()
    model.set_custom_reduce_scatter(recorder)
    known, lanes._WITHOUT_AVG = lanes._WITHOUT_AVG, type(lanes._WITHOUT_AVG)()  # as NCCL, which can average
    try:
        for enable in (False, True, False):
            for module in (model, *model.blocks):
                module.set_force_sum_reduction_for_comms(enable)
            model.zero_grad()
            model(mine(rank, world)).sum().backward()
            check_grads(model, reference_grads(world))
    finally:
        lanes._WITHOUT_AVG = known
    assert recorder.ops == [dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.AVG]


def test_force_sum_reduction_for_comms(ranks):
    ranks(2, _sums)


class Switch(nn.Module):
    """Every rank uses one of the two, and always the last."""

    def __init__(self):
        super().__init__()
        self.either = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x, which):
        return self.last(self.either[which](x))


def _unused(rank, world):
    torch.manual_seed(2)
    reference = Switch()
    torch.manual_seed(2)
    model = Switch()
    fully_shard(model)
    x = torch.ones(1, 4)
    model(x, rank).sum().backward()
    for which in range(world):
        reference(x, which).sum().backward()
    check_grads(model, {name: p.grad / world for name, p in reference.named_parameters()})  # as any rank has used it
    model.zero_grad()
    reference.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    model(x, rank).sum().backward()
    for which in range(world):
        reference(x, which).sum().backward()
    check_grads(model, {name: p.grad / world for name, p in reference.named_parameters()})
    # A unit that a backward does not touch at all takes part too.
    alone = Switch()
    for module in (*alone.either, alone):
        fully_shard(module)
    alone.set_reduce_scatter_unused_params(True)
    alone(x, 0).sum().backward()
    assert alone.either[1].weight.grad.full_tensor().eq(0).all()
    alone.set_reduce_scatter_unused_params(False, recurse=False)
    alone.zero_grad()
    alone(x, 0).sum().backward()
    assert alone.either[1].weight.grad.full_tensor().eq(0).all()
    alone.set_reduce_scatter_unused_params(False)
    alone.zero_grad()
    alone(x, 0).sum().backward()
    assert alone.either[1].weight.grad is None


def test_set_reduce_scatter_unused_params(ranks):
    ranks(2, _unused)


def _hook(rank, world, shape, reduce_dtype):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model = sharded_chain(mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    calls = []

    def hook(reduced):
        assert reduced.dim() == 1
        assert reduced.dtype == reduce_dtype
        assert not torch.is_grad_enabled()
        calls.append(reduced.numel())
        dist.all_reduce(reduced)  # ranks that share nothing with the mesh, for example: here all of it, once more
        reduced.mul_(2)

    model.blocks[0].set_all_reduce_hook(hook)
    model.set_requires_gradient_sync(False)
    model(mine(rank, world)).sum().backward()
    assert not calls
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    for _ in range(2):  # gradients are added to after the hook
        model(mine(rank, world)).sum().backward()
    assert len(calls) == 2
    wanted = reference_grads(world)
    local = model.blocks[1][0].weight.grad.to_local() / 2
    torch.testing.assert_close(
        local, _local(model.blocks[1][0].weight, wanted["blocks.1.0.weight"]), rtol=2e-2, atol=2e-2
    )
    hooked = model.blocks[0][0].weight
    same = _local(hooked, wanted["blocks.0.0.weight"])
    summed = same.clone()
    dist.all_reduce(summed)
    torch.testing.assert_close(hooked.grad.to_local(), 2 * 2 * summed, rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match="callable"):
        model.set_all_reduce_hook(None)
    if len(shape) == 2:
        with pytest.raises(ValueError, match="stream"):
            model.set_all_reduce_hook(hook, stream=torch.cpu.Stream())


def _streams_of_hooks(rank, world, shard):
    """On which stream a hook was called that was given one."""
    stream, found = torch.cpu.Stream(), []
    model = shard(nn.Linear(4, 4))
    model.set_all_reduce_hook(lambda reduced: found.append(torch.cpu.current_stream()), stream=stream)
    model(torch.ones(2, 4)).sum().backward()
    assert torch.cpu.current_stream() != stream
    return [each == stream for each in found]


@pytest.mark.parametrize("shard", [torch_fully_shard, fully_shard])
def test_all_reduce_hook_runs_on_its_stream(ranks, shard):
    assert ranks(2, _streams_of_hooks, shard) == [[True]] * 2


def _local(like, whole):
    return distribute_tensor(whole, like.device_mesh, like.placements).to_local()


@pytest.mark.parametrize(
    ("shape", "reduce_dtype"), [((2,), torch.float32), ((2,), torch.bfloat16), ((2, 1), torch.float32)]
)
def test_set_all_reduce_hook(ranks, shape, reduce_dtype):
    ranks(2, _hook, shape, reduce_dtype)
