"""Ranks that use different parts of random models: they launch the same, in one order, and get the mean of all.

One seed alone: ``pytest tests/order/test_random_use.py --full -k seed017``. A failure shows what it built and, for one
seed alone, every launch of every rank.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import fully_shard_optimizer, microbatch
from flatshard.engine.units.unit import unit_of
from tests.dist.models import assert_rows
from tests.order.random_use import DIM, TWICE, Case, Meshes, build, shard

pytestmark = [pytest.mark.xdist_group("interpreters")]
SEEDS, BATCH, FEW, ROWS = 30, 10, 7, 3


def world_of(seed: int) -> int:
    """Blocks of equal worlds: a set of interpreters serves all of them."""
    return (2, 4, 3, 4, 2)[seed // BATCH % 5]


class Log:
    """What the lanes of a model have launched."""

    def __init__(self) -> None:
        self.known = {"gather": 0, "reduce": 0}
        self.found: dict[str, list[tuple[Any, ...]]] = {"gather": [], "reduce": []}

    def look(self, model: nn.Module, when: str) -> None:
        """Take over what came since the last look; lanes do not remember for long."""
        root = unit_of(model).root
        for title, lane in (("gather", root.gather_lane), ("reduce", root.reduce_lane)):
            count, self.known[title] = lane.launched - self.known[title], lane.launched
            assert count <= len(lane.history), "the history is too short to tell"
            recent = list(lane.history)[len(lane.history) - count :]
            self.found[title] += [(op.kind, op.name, op.numbytes, when) for op in recent]

    def take(self) -> dict[str, list[tuple[Any, ...]]]:
        found, self.found = self.found, {"gather": [], "reduce": []}
        return found


class Spoken(deque[Any]):
    """A history that is told as it happens: ranks that launch different things may not live to be asked."""

    def append(self, operation: Any) -> None:
        print(f"rank {dist.get_rank()}: {operation.kind} {operation.name} {operation.numbytes} bytes", flush=True)
        super().append(operation)


def same_launches(found: dict[str, list[tuple[Any, ...]]], when: str) -> None:
    """Every rank is in one group of each kind, so all ranks launch alike."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    for lane in found:
        for rank, theirs in enumerate(everyones):
            if theirs[lane] != everyones[0][lane]:
                lines = [f"{when}: rank {rank} and rank 0 differ on the {lane} lane"]
                both = zip(_padded(theirs[lane], everyones[0][lane]), _padded(everyones[0][lane], theirs[lane]))
                lines += [f"  {'' if ours == zero else '* '}{ours}  {zero}" for ours, zero in both]
                raise AssertionError("\n".join(lines))


def _padded(launches: list[Any], other: list[Any]) -> list[Any]:
    return launches + [None] * (len(other) - len(launches))


def backward(case: Case, model: Any, rank: int, number: int) -> None:
    rng = torch.Generator().manual_seed(1000 * number + rank)
    outputs = model(torch.randn(ROWS, DIM, generator=rng))
    (sum(output.square().mean() for output in outputs) / case.micro).backward()


def mean_gradients(model: nn.Module, meshes: Meshes) -> dict[str, tuple[torch.Tensor, bool]]:
    """Of a model that is whole on every rank and has had this rank's data: over ranks, and whether any has one."""
    found = {}
    for own in (False, True):
        named = {n: p for n, p in model.named_parameters() if (p.dim() == 3) == own and p.requires_grad}
        if not named:
            continue
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
        have = torch.tensor([float(p.grad is not None) for p in named.values()], dtype=torch.float64)
        flat = torch.cat([have, *(grad.flatten().double() for grad in grads)])
        group = meshes.own.get_group() if own and meshes.own is not None else dist.group.WORLD
        dist.all_reduce(flat, group=group)
        parts = (flat[len(have) :] / dist.get_world_size(group)).split([grad.numel() for grad in grads])
        for name, grad, part, count in zip(named, grads, parts, flat.tolist()):
            found[name] = part.view(grad.shape).to(grad.dtype), count > 0
    return found


def run(rank: int, case: Case, alone: Case, meshes: Meshes, spoken: bool) -> None:
    """``alone`` is the same model, whole."""
    model, log = shard(case, meshes), Log()
    if spoken:
        model.set_is_last_backward(True)  # from now on there are lanes
        for lane in (unit_of(model).root.gather_lane, unit_of(model).root.reduce_lane):
            lane.history = Spoken(lane.history, lane.history.maxlen)
    case.clock.delays = random.Random(f"{case.seed} {rank}")
    trained = [[p for p in each.parameters() if p.dim() < 3 and p.requires_grad] for each in (model, alone.model)]
    optimizers = [torch.optim.SGD(parameters, lr=0.05) for parameters in trained]
    fully_shard_optimizer(optimizers[0])
    for step in range(case.steps):
        for number in range(case.micro):
            last, turn = number == case.micro - 1, case.micro * step + number
            for each in (case, alone):
                each.choose(rank, turn)
            if case.sync == "last":
                model.set_requires_gradient_sync(last)
            marked = microbatch(model, is_first=number == 0, is_last=last) if case.sync == "microbatch" else None
            with marked or nullcontext():
                backward(case, model, rank, turn)
            backward(case, alone.model, rank, turn)
            log.look(model, f"in micro-batch {number}")
        same_launches(log.take(), f"step {step}")
        ours, theirs = dict(model.named_parameters()), dict(alone.model.named_parameters())
        for name, (wanted, used) in mean_gradients(alone.model, meshes).items():
            grad = ours[name].grad
            assert grad is not None or not used, f"step {step}: {name} has no gradient"
            if grad is not None:
                told = f"step {step}, gradient of {name}: "
                assert_rows(grad, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, told=told: told + text)
            theirs[name].grad = wanted
        for optimizer, each in zip(optimizers, (model, alone.model)):
            optimizer.step()
            each.zero_grad()


def _seeds(rank: int, world: int, seeds: Sequence[int], spoken: bool) -> None:
    meshes = Meshes(world)
    for seed in seeds:
        if rank == 0:
            print(f"seed {seed}", flush=True)  # the last one is that which hangs
        case, alone = build(seed, world), build(seed, world)
        try:
            run(rank, case, alone, meshes, spoken)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error


def _batches(first: int, end: int, count: int = BATCH) -> list[Any]:
    batches = [range(start, start + count) for start in range(first, end, BATCH)]
    return [pytest.param(seeds, id="-".join(f"seed{seed:03}" for seed in seeds)) for seeds in batches]


def _run(interpreters: Any, request: pytest.FixtureRequest, seeds: Sequence[int]) -> None:
    # `-k seed017` selects the batch; then only that seed runs.
    chosen = [seed for seed in seeds if f"seed{seed:03}" in (request.config.option.keyword or "")]
    interpreters(world_of(seeds[0]), _seeds, chosen or seeds, bool(chosen))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seeds", [*_batches(0, SEEDS, FEW), *_batches(TWICE, TWICE + 1, FEW)])
def test_ranks_that_use_different_parts_launch_alike(interpreters, request, seeds):
    _run(interpreters, request, seeds)


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("seeds", [*_batches(0, 1000), *_batches(TWICE, TWICE + 500)])
def test_many_more_ranks_that_use_different_parts_launch_alike(interpreters, request, seeds):
    _run(interpreters, request, seeds)
