"""A step that fails at any of its points, on all ranks: after `reset` nothing is left of it, and the next is clean."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import sys
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.engine.watch.calls import Call
from tests.bench.script import free_port
from tests.dist.faults import KINDS, Fault, Faults
from tests.dist.models import Net, batches, loss_of, make_net
from tests.dist.test_engine import shard_net
from tests.dist.test_recovery import at_rest
from tests.dist.test_strategies import mesh_of


class Skipping(Net):
    """May leave a block out."""

    left_out = -1

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = x if number == self.left_out else block(x)
        return self.head(self.norm(x))


class Case:
    """A way to shard and to train."""

    def __init__(self, world=2, recompute=None, micro=1, shape="blocks", skips=None, **choices):
        self.world, self.recompute, self.micro = world, recompute, micro
        self.shape, self.skips, self.choices = shape, skips, choices

    def mesh(self):
        return mesh_of(1 if self.world == 2 else 2, self.world)

    def build(self, mesh=None):
        net = make_net(recompute=self.recompute)
        if self.skips:
            net.__class__ = Skipping
        mesh = mesh or self.mesh()
        if self.shape == "blocks":
            return shard_net(net, mesh=mesh, **self.choices)
        for block in net.blocks:
            fully_shard(block, mesh=mesh, optional=self.shape == "optional", **self.choices)
        if self.shape == "list":
            fully_shard([net.norm, net.head], mesh=mesh, **self.choices)
        return fully_shard(net, mesh=mesh, **self.choices)

    def step(self, model, rank):
        """Forward and backward of all micro-batches."""
        (tokens,) = batches(1, 4 * self.world)
        for number, part in enumerate(tokens.chunk(self.world)[rank].chunk(self.micro)):
            model.left_out = 1 if self.skips and number == (rank if self.skips == "apart" else 0) else -1
            with microbatch(model, is_first=number == 0, is_last=number == self.micro - 1):
                loss_of(model, part).backward()


ENCODED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, gather_format="int8", reduce_format="int8", block=16, encodes=lambda _, p: p.dim() == 2
)
CASES = {
    "zero3": Case(),
    "zero1": Case(micro=2, strategy="optim", layout="flat"),
    "zero2": Case(micro=2, strategy="optim_grads"),
    "bfloat16": Case(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "hsdp": Case(world=4, micro=2, strategy="optim_grads_params", outer_strategy="no_shard"),
    "hfsdp": Case(world=4, micro=2, strategy="optim_grads_params", outer_strategy="optim", layout="flat"),
    "reentrant": Case(recompute="reentrant"),
    "non-reentrant": Case(recompute="non-reentrant"),
    "optional": Case(shape="optional", micro=2, skips="alike"),
    "optional-apart": Case(shape="optional", micro=2, skips="apart"),
    "list": Case(shape="list", reshard_after_forward=False),
    "parked": Case(world=4, reshard_after_forward=2),
    "int8": Case(micro=2, mp_policy=ENCODED),
    "int8-parked": Case(world=4, mp_policy=ENCODED, reshard_after_forward=2),
}


def grads_of(model):
    return [None if p.grad is None else p.grad.to_local().detach().clone() for p in model.parameters()]


def same(found, wanted):
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, wanted))


def held(model):
    """What is alive: bytes of storages, calls, buffers and slots of pools, gradients."""
    torch.ones(1, requires_grad=True).sum().backward()  # drops what autograd had queued when it was broken off
    root = unit_of(model).root
    with torch.no_grad():
        root.free_cleared_gradients()  # whose memory may stay from step to step
    gc.collect()
    storages, kinds = {}, Counter()
    for each in gc.get_objects():
        kinds[type(each).__name__] += isinstance(each, (Call, torch.autograd.graph.Node))
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, nn.Parameter):
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    pools = [
        (pool.live_bytes, pool.live_buffers, len(pool._taken), pool.num_slots - len(pool._free))
        for pool in (root.gather_pool, root.reduce_pool)
    ]
    gradients = [group.gradients.main_grads.in_flight for _, unit in units_below(model) for group in unit.groups]
    return {
        "bytes": sum(storages.values()),
        **{k: n for k, n in kinds.items() if n},
        "pools": pools,
        "in flight": gradients,
    }


def settled(model):
    """What is alive once Gloo's threads have let go of what they have sent: ten counts in a row are equal."""
    counts = [held(model)]
    while len(counts) < 10:
        time.sleep(0.02)
        now = held(model)
        counts = [*counts, now] if now == counts[-1] else [now]
    return counts[-1]


def fail(model, case, rank, faults, at):
    """Begin a step that raises at a point; the name of that."""
    with pytest.raises((Fault, torch.OutOfMemoryError), match=r"^at ") as caught, faults.counting(at):
        case.step(model, rank)
    return str(caught.value)


def check_recovery(model, case, rank, wanted, before, where):
    model.reset()
    model.zero_grad()
    at_rest(model)
    for _ in range(100):
        after = held(model)
        if after == before:
            break
        time.sleep(0.02)  # Gloo's threads let go of what they have sent a moment after it has been waited for
    assert after == before, f"{where}: {after}, and before it {before}"
    case.step(model, rank)
    assert same(grads_of(model), wanted), f"{where}: other gradients afterwards"
    model.zero_grad()
    at_rest(model)


def _every_point(rank, world, name, kind, part, parts):
    """One model, broken again and again. ``part`` of ``parts``: every so many points."""
    case, faults = CASES[name], Faults(kind)
    with faults.watch():
        model = case.build()
        for _ in range(2):
            case.step(model, rank)
            wanted = grads_of(model)
            model.zero_grad()
        with faults.counting():
            case.step(model, rank)
        assert same(grads_of(model), wanted)
        model.zero_grad()
        model.reset()
        before, names = settled(model), faults.names
        points = range(part, len(names), parts)
        for at in points:
            where = f"{name}, {kind} {at} of {len(names)}, {fail(model, case, rank, faults, at)}"
            check_recovery(model, case, rank, wanted, before, where)
    return list(names)


def _first_step(rank, world, name, kind, part, parts):
    """The same in the first step of a model, in which ranks compare what they do: every time another model.

    They share a mesh: threads of Gloo look for work 100 times a second, and hundreds of groups leave time for no other.
    """
    case, faults = CASES[name], Faults(kind)
    with faults.watch():
        mesh = case.mesh()
        model = case.build(mesh)
        with faults.counting():
            case.step(model, rank)
        wanted, names = grads_of(model), faults.names
        for at in range(part, len(names), parts):
            model = case.build(mesh)
            where = f"{name}, first step, {kind} {at} of {len(names)}, {fail(model, case, rank, faults, at)}"
            model.reset()
            model.zero_grad()
            for _ in range(2):
                case.step(model, rank)
                assert same(grads_of(model), wanted), where
                model.zero_grad()
                at_rest(model)


def run(ranks, body, name, kind, part=0, parts=1):
    """All ranks fail at the same points."""
    results = ranks(CASES[name].world, body, name, kind, part, parts)
    assert body is _first_step or (results[0] and all(names == results[0] for names in results))


# Every 16th to 5th point of each case, others for each kind; the full product has all of them.
FEW = [
    ("zero3", "hook", 5),
    ("zero1", "launch", 5),
    ("bfloat16", "memory", 9),
    ("int8", "memory", 9),
    ("non-reentrant", "operator", 60),
    ("optional-apart", "launch", 6),
    ("list", "hook", 7),
    ("hsdp", "launch", 9),
]


@pytest.mark.parametrize(("name", "kind", "parts"), FEW)
def test_a_step_that_fails_here_or_there(ranks, name, kind, parts):
    run(ranks, _every_point, name, kind, parts // 2, parts)


@pytest.mark.full
@pytest.mark.limit(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_fails_anywhere(ranks, name, kind):
    if name == "optional-apart" and kind != "launch":
        pytest.skip("what ranks have in common there is what they launch")
    if name == "optional" and kind == "operator":
        pytest.skip("reduces land there when they are over, sooner on one rank and later on another")
    run(ranks, _every_point, name, kind, 0, 7 if kind == "operator" else 1)


def test_a_first_step_that_fails_here_or_there(ranks):
    run(ranks, _first_step, "zero3", "launch", 3, 9)


@pytest.mark.full
@pytest.mark.limit(900)
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("name", ["zero3", "zero1", "hsdp", "reentrant", "optional", "list"])
def test_a_first_step_that_fails_anywhere(ranks, name, kind):
    run(ranks, _first_step, name, kind)


def _in_the_optimizer(rank, world, parts):
    """Out of memory at an operator of the optimizer's step. What it has written by then, the user puts back."""
    case, faults = CASES["zero3"], Faults("operator")
    model = case.build()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))

    def state():
        weights = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        return weights, copy.deepcopy(optimizer.state_dict())

    def restore(weights, saved):
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights):
                parameter.to_local().copy_(weight)
        optimizer.load_state_dict(saved)

    for _ in range(2):
        case.step(model, rank)
        start = state()
        with faults.counting():
            optimizer.step()
        optimizer.zero_grad()
    wanted, names = state()[0], faults.names
    parameters = list(model.parameters())
    for at in range(0, len(names), parts):
        restore(*copy.deepcopy(start))
        case.step(model, rank)
        with pytest.raises(torch.OutOfMemoryError, match=r"^at "), faults.counting(at):
            optimizer.step()
        model.reset()
        model.zero_grad()
        assert all(a is b for a, b in zip(model.parameters(), parameters)), at
        restore(*copy.deepcopy(start))
        case.step(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        at_rest(model)
        assert same(state()[0], wanted), f"operator {at} of {len(names)}: {names[at]}"
    return len(names)


@pytest.mark.parametrize("parts", [13, pytest.param(1, marks=pytest.mark.full)])
def test_an_optimizer_that_runs_out_of_memory(ranks, parts):
    assert ranks(2, _in_the_optimizer, parts)[0] > 20


def _one_raises(rank, port, kind, at, said):
    """Rank 0 raises at a point, catches nothing, and its process does not even end."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    case, faults = CASES["zero3"], Faults(kind)
    with faults.watch():
        model = case.build()
        for _ in range(2):
            case.step(model, rank)
            model.zero_grad()
        try:
            with faults.counting(at if rank == 0 else None):
                case.step(model, rank)
                case.step(model, rank)
        except Exception as error:
            said.put((rank, type(error).__name__, str(error)))
            sys.excepthook(type(error), error, error.__traceback__)
        time.sleep(600)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("launch", 2),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("launch", 9), ("hook", 7), ("hook", 33))),
    ],
)
def test_a_rank_that_raises_alone_does_not_keep_the_others(ranks, kind, at):
    ranks(1, _nothing)  # the server that processes are forked from has imported torch
    context, port = multiprocessing.get_context("forkserver"), free_port()
    said = context.Queue()
    processes = [context.Process(target=_one_raises, args=(rank, port, kind, at, said)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        (first, what, why), (second, name, told) = said.get(timeout=300), said.get(timeout=300)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert (first, what, second, name) == (0, "Fault", 1, "PeerError")
    assert f"rank 0 raised Fault: {why}" in told


def _nothing(rank, world):
    pass
