"""torch.compile before and after sharding: the losses and collectives of eager training, nothing compiled twice."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.engine.units.unit import unit_of
from tests.dist.models import DIM, batches, loss_of, make_net, train

pytestmark = [
    pytest.mark.limit(240),  # the compiler itself has to be imported first, and is slow on a busy machine
    pytest.mark.xdist_group("compile"),  # by the ranks of one pool
]

ROWS = 8
BLOCK_WAYS = ["block.compile() before", "torch.compile(block) before", "block.compile() after"]
MODEL_WAYS = ["torch.compile(model)", "model.compile()"]
GRAPH = 6  # operations of a block


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """A clean compiler; afterwards nothing of it is left on this rank."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def compiled_net(way: str | None, recompute: str | None, backend: str = "aot_eager", **kwargs: Any) -> nn.Module:
    net = make_net(recompute=recompute)
    for index, block in enumerate(net.blocks):
        if way == "block.compile() before":
            block.compile(backend=backend, fullgraph=True)
        elif way == "torch.compile(block) before":
            net.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
    for block in net.blocks:
        fully_shard(block, **kwargs)
    fully_shard(net, **kwargs)
    if way == "block.compile() after":
        for block in net.blocks:
            block.compile(backend=backend, fullgraph=True)
    elif way == "model.compile()":
        net.compile(backend=backend)
    elif way == "torch.compile(model)":
        return torch.compile(net, backend=backend)
    return net


def launched(model: nn.Module) -> list[tuple[int, list[str]]]:
    """How many collectives each lane has launched, and the names of the last ones."""
    root = unit_of(getattr(model, "_orig_mod", model)).root
    lanes = (root.gather_lane, root.reduce_lane)
    return [(lane.launched, [op.name.replace("._orig_mod", "") for op in lane.history]) for lane in lanes]


def rounds(model: nn.Module, rank: int, world: int) -> Iterator[list[float]]:
    """Losses of a few micro-batched steps and an evaluation, again and again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    while True:
        losses = train(model, optimizer, 2, ROWS, rank, world, micro=2)
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model, next(batches(1, ROWS)).chunk(world)[rank].chunk(2)[0]).item())
        model.train()
        yield losses


def _as_eager(rank, world, way, recompute, policy=None, backend="aot_eager", tolerance=1e-6):
    """Warm up for one round; from then on nothing may be compiled."""
    kwargs = {"mp_policy": policy or MixedPrecisionPolicy()}
    eager = compiled_net(None, recompute, **kwargs)
    wanted = rounds(eager, rank, world)
    with compiler():
        model = compiled_net(way, recompute, backend, **kwargs)
        found = rounds(model, rank, world)
        assert next(found) == pytest.approx(next(wanted), rel=tolerance)
        graphs = dict(counters["stats"])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                assert next(found) == pytest.approx(next(wanted), rel=tolerance)
        assert dict(counters["stats"]) == graphs
    assert launched(model) == launched(eager)
    return graphs.get("calls_captured", 0)


RECOMPUTE = [None, "reentrant", "non-reentrant"]


CASES = [(way, recompute, 1) for way, recompute in zip(BLOCK_WAYS, RECOMPUTE)]  # the other tests here have two ranks
FULL = [(*case, 2) for case in itertools.product(BLOCK_WAYS, RECOMPUTE)]


@pytest.mark.parametrize(
    ("way", "recompute", "world"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
)
def test_compiled_blocks_train_as_eager_ones(ranks, way, recompute, world):
    """All blocks share one graph per kind of pass: with gradients, without."""
    for captured in ranks(world, _as_eager, way, recompute):
        assert captured == (3 if recompute == "reentrant" else 2) * GRAPH


@pytest.mark.parametrize("way", [MODEL_WAYS[0], pytest.param(MODEL_WAYS[1], marks=pytest.mark.full)])
def test_a_compiled_model_compiles_what_lies_between_the_hooks(ranks, way):
    for captured in ranks(2, _as_eager, way, None):
        assert captured >= 2 * GRAPH


def test_compiled_in_bf16(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for captured in ranks(2, _as_eager, BLOCK_WAYS[0], None, policy, tolerance=1e-2):
        assert captured == 2 * GRAPH


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_compiled_by_inductor(ranks):
    for captured in ranks(2, _as_eager, BLOCK_WAYS[2], "non-reentrant", backend="inductor", tolerance=1e-5):
        assert captured == 2 * GRAPH


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(self.inner(self.linear(x)))


class Straight(nn.Module):
    """Units inside units, and no loop, in which the compiler would give up: it resumes after each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.outer, self.last = nn.Linear(DIM, DIM), Outer(), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.sin(self.first(x)) + x
        x = self.outer(x) * x
        return {"out": self.last(x)}


def _straight(rank, world, frozen):
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Straight()
        if frozen:
            model.outer.linear.requires_grad_(False)
        for unit in (model.outer.inner, model.outer, model):
            fully_shard(unit)
        return model

    def losses(call: nn.Module, model: nn.Module) -> Iterator[list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        generator = torch.Generator().manual_seed(rank)
        while True:
            found = []
            for _ in range(2):
                loss = call(torch.randn(4, DIM, generator=generator))["out"].square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            yield found

    eager, model = made(), made()
    wanted = losses(eager, eager)
    with compiler():
        found = losses(torch.compile(model, backend="aot_eager"), model)
        assert next(found) == pytest.approx(next(wanted), rel=1e-6)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert next(found) == pytest.approx(next(wanted), rel=1e-6)
        captured = counters["stats"]["calls_captured"]
    assert launched(model) == launched(eager)
    return captured


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_compiler_resumes_after_units(ranks, frozen):
    for captured in ranks(2, _straight, frozen):
        assert captured == 9  # all operations of the model


def _whole_step(rank, world):
    """A compiled function that contains the backward: its hooks run on the thread where the compiler is active."""
    eager, model = (compiled_net(None, None) for _ in range(2))

    def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        return loss.detach()

    with compiler():
        compiled = torch.compile(step, backend="aot_eager")
        for index, tokens in enumerate(batches(4, ROWS)):
            mine = tokens.chunk(world)[rank]
            with torch._dynamo.config.patch(error_on_recompile=index > 1):
                found, wanted = compiled(model, mine), step(eager, mine)
            torch.testing.assert_close(found, wanted)
            for ours, theirs in zip(model.parameters(), eager.parameters()):
                torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local())
    assert launched(model) == launched(eager)


def test_a_compiled_function_with_the_backward_inside(ranks):
    ranks(2, _whole_step)


def _by_compiled_autograd(rank, world):
    """The next step, without it, is as if there had been none before."""
    eager, model = (compiled_net(None, None) for _ in range(2))
    mine = next(batches(1, ROWS)).chunk(world)[rank]
    with compiler(), torch._dynamo.config.patch(compiled_autograd=True):
        loss = loss_of(model, mine)
        with pytest.raises(RuntimeError, match="compiled autograd is not supported"):
            torch.compile(loss.backward, backend="eager")()
    for each in (eager, model):
        loss_of(each, mine).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local())


def test_compiled_autograd_is_refused(ranks):
    ranks(2, _by_compiled_autograd)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _with_tensor_parallel(rank, world):
    torch.manual_seed(0)
    plain = nn.Sequential(Mlp(), Mlp())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, fused=True) for each in (plain, model)]
    with compiler():
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(4):
            x = torch.randn(4, DIM)
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                losses = [each(x).square().mean() for each in (plain, compiled)]
                torch.testing.assert_close(*losses)
                for loss, optimizer in zip(losses, optimizers):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return counters["stats"]["calls_captured"]


@pytest.mark.full
def test_compiled_with_tensor_parallelism(ranks):
    for captured in ranks(2, _with_tensor_parallel):
        assert captured > 0
