"""Every strategy equals one process with the whole batch; counts and bytes are those of the strategy."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatshard import MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer, microbatch
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.layout import Flat, Partial, Replicate
from tests.bench.pairs import pairwise
from tests.dist.models import assert_rows, batches, loss_of, make_net
from tests.dist.test_engine import ROWS, full, shard_net

pytestmark = pytest.mark.sampled(2)

INNER = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
# (axes, strategy, outer_strategy)
STRATEGIES = [
    *((1, name, None) for name in INNER),
    *((2, name, "no_shard") for name in INNER),
    (2, "optim_grads_params", "optim"),
]


def world_of(case):
    """Two ranks along each axis."""
    return 2 ** case[0]


def mesh_of(axes, world, device="cpu"):
    return init_device_mesh(
        device, (world,) if axes == 1 else (2, world // 2), mesh_dim_names=("outer", "inner")[-axes:]
    )


def train_in_microbatches(model, optimizer, steps, rank, world, micro, scoped):
    losses = []
    for tokens in batches(steps, ROWS):
        parts = tokens.chunk(world)[rank].chunk(micro)
        total = 0.0
        for number, part in enumerate(parts):
            first, last = (number == 0, number == micro - 1) if scoped else (True, True)
            with microbatch(model, is_first=first, is_last=last):
                loss = loss_of(model, part) / micro
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _equivalence(rank, world, case, recompute, micro, scoped, dtype, layout):
    axes, strategy, outer = case
    reference = make_net(depth=2)
    wanted = torch.tensor(plain_losses(reference, 2))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    mesh = mesh_of(axes, world)
    net = make_net(depth=2, recompute=recompute)
    model = shard_net(net, mesh=mesh, strategy=strategy, outer_strategy=outer, mp_policy=policy, layout=layout)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if layout != "tensor":
        fully_shard_optimizer(optimizer)
    losses = torch.tensor(train_in_microbatches(model, optimizer, 2, rank, world, micro, scoped))
    dist.all_reduce(losses)
    tight = dtype is None
    torch.testing.assert_close(losses / world, wanted, rtol=2e-5 if tight else 2e-2, atol=2e-5)
    for (name, sharded), value in zip(model.named_parameters(), reference.parameters()):
        tolerance = {"rtol": 1e-3, "atol": 2e-5} if tight else {"rtol": 1e-1, "atol": 2e-2}
        assert_rows(sharded.detach(), value.data, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def plain_losses(reference, steps):
    optimizer = fully_shard_optimizer(torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for tokens in batches(steps, ROWS):
        loss = loss_of(reference, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


RECOMPUTE = [None, "reentrant", "non-reentrant"]
MICRO = [(1, True), (3, True), (3, False)]  # how many, and whether `microbatch` says so
PRODUCT = list(itertools.product(STRATEGIES, RECOMPUTE, MICRO, [None, torch.bfloat16], ["tensor", "flat", "auto"]))


PAIRWISE = pairwise(PRODUCT)
COLUMNS = ("case", "recompute", "micro", "dtype", "layout")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(COLUMNS, PAIRWISE, ids=str)
def test_strategies_equal_one_process(ranks, case, recompute, micro, dtype, layout):
    ranks(world_of(case), _equivalence, case, recompute, *micro, dtype, layout)


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, [row for row in PRODUCT if row not in PAIRWISE], ids=str)
def test_strategies_equal_one_process_full(ranks, case, recompute, micro, dtype, layout):
    ranks(world_of(case), _equivalence, case, recompute, *micro, dtype, layout)


def _counts(rank, world, case, micro, scoped):
    axes, strategy, outer = case
    model = shard_net(make_net(), mesh=mesh_of(axes, world), strategy=strategy, outer_strategy=outer)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_in_microbatches(model, optimizer, 2, rank, world, micro, scoped)
    root = unit_of(model).root
    root.gather_lane.history.clear()
    root.reduce_lane.history.clear()
    train_in_microbatches(model, optimizer, 1, rank, world, micro, scoped)
    groups = sum(any(isinstance(p, Flat) for p in g.main.placements) for _, u in units_below(model) for g in u.groups)
    scalars = sum(len(u.groups) for _, u in units_below(model)) - groups
    kinds = [op.kind for lane in (root.gather_lane, root.reduce_lane) for op in lane.history]
    return groups, scalars, {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize(
    ("case", "scoped", "gathers", "scatters", "reduces"),
    [
        # per sharded group and step of three micro-batches; the root is kept, so it is gathered once a micro-batch
        ((1, "optim_grads_params", None), True, None, 3, 0),
        ((1, "optim_grads", None), True, 1, 3, 0),
        ((1, "optim_grads", None), False, 3, 3, 0),
        ((1, "optim", None), True, 1, 1, 0),
        ((2, "optim_grads_params", "no_shard"), True, None, 3, 1),
        ((2, "optim_grads_params", "optim"), True, None, 4, 0),
    ],
    ids=str,
)
def test_collectives_of_three_microbatches(ranks, case, scoped, gathers, scatters, reduces):
    for groups, scalars, kinds in ranks(world_of(case), _counts, case, 3, scoped):
        assert kinds.get("reduce_scatter", 0) == scatters * groups
        # groups of scalars are replicated: one all-reduce per axis, on the last micro-batch
        times = 1 if scoped else 3
        assert kinds.get("all_reduce", 0) == reduces * groups + times * case[0] * scalars
        if gathers is not None:
            assert kinds.get("all_gather", 0) == gathers * groups


def _bytes(rank, world, case):
    axes, strategy, outer = case
    mesh = mesh_of(axes, world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_net(make_net(), mesh=mesh, strategy=strategy, outer_strategy=outer, mp_policy=policy)
    loss_of(model, next(batches(1, ROWS)).chunk(world)[rank]).backward()
    for _, unit in units_below(model):
        for group in unit.groups:
            shards = group.layout.num_shards
            assert group.main.local.numel() == group.layout.buffer_numel(1)
            assert all(
                m.sharded.grad is None or m.sharded.grad.to_local().shape == m.sharded.to_local().shape
                for m in group.params
            )
            everything = 2 * group.layout.buffer_numel(shards)
            if group.source.compute is not None:
                share = everything if strategy != "optim_grads_params" else 2 * group.layout.buffer_numel(mesh.size(0))
                assert group.source.compute.buffer.local.nbytes == share
            assert not group.gradients.has_partial
            assert group.source.is_resident or group.source.buffer.local.untyped_storage().nbytes() == 0
    return [group.layout.num_shards for _, unit in units_below(model) for group in unit.groups]


@pytest.mark.parametrize("case", STRATEGIES, ids=str)
def test_bytes_at_rest(ranks, case):
    axes, strategy, outer = case
    shards = 1 if strategy == "no_shard" else 4 if axes == 1 or outer == "optim" else 2
    for found in ranks(4, _bytes, case):
        assert set(found) == {1, shards}


def _resharded_to(rank, world, size):
    torch.manual_seed(0)
    model = shard_net(make_net(depth=2), reshard_after_forward=size)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    reference = make_net(depth=2)
    wanted = torch.tensor(plain_losses(reference, 2))
    losses = torch.tensor(train_in_microbatches(model, optimizer, 2, rank, world, 1, True))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / world, wanted, rtol=2e-5, atol=2e-5)
    sizes = {op.numbytes for op in unit_of(model).root.gather_lane.history if op.name == "blocks.1"}
    return len(sizes)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reshard_after_forward_to_a_smaller_group(ranks, size):
    assert ranks(4, _resharded_to, size) == [1] * 4


def _placements(rank, world):
    mesh = mesh_of(2, world)
    given = Placements((Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat()))
    model = shard_net(make_net(), mesh=mesh, strategy=given)
    return (
        unit_of(model.blocks[0]).groups[0].placements == given or unit_of(model.blocks[0]).groups[1].placements == given
    )


def test_placements_given_directly(ranks):
    assert ranks(4, _placements) == [True] * 4


def _scale(rank, world, scale):
    model, reference = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
    reference.load_state_dict(model.state_dict())
    dist.broadcast(reference.weight.data, 0)
    model.weight.data.copy_(reference.weight.data)
    fully_shard(model, gradient_scale=scale)
    data = torch.randn(4 * world, 3, generator=torch.Generator().manual_seed(1))
    model(data.chunk(world)[rank]).sum().backward()
    reference(data).sum().backward()
    factor = {"mean": 1 / world, "sum": 1.0}.get(scale, scale)
    torch.testing.assert_close(full(model.weight.grad), reference.weight.grad * factor)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("scale", ["mean", "sum", 0.125])
def test_gradient_scale(ranks, world, scale):
    assert ranks(world, _scale, scale) == [None] * world
