"""Random models under random choices: strategy, mesh, layout, resharding, marks, micro-batches, scale, optimizer.

One seed alone: ``pytest tests/dist/test_random_strategies.py -k seed1017``. Its choices: ``print(choose(1017, 4))``.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import fully_shard, fully_shard_optimizer, microbatch, no_shard
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import Phase
from tests.dist.random_models import DIM, Case, Leaf, build, rows_of
from tests.dist.test_random_models import compare, loss_of, optimizer_of
from tests.dist.test_strategies import mesh_of

FIRST, SEEDS, STEPS, ROWS = 1000, 32, 2, 24  # most of the seeds are left to the full product
BATCH = 4  # seeds in one call of `ranks`


@dataclass
class Choice:
    """How one seed is sharded and trained. Units may differ in all but the mesh."""

    axes: int
    units: list[dict[str, Any]]
    marked: list[str] = field(default_factory=list)
    saying: str = "nothing"
    micro: int = 1
    scale: Any = "mean"
    local_step: bool = False


def choose(seed: int, world: int) -> tuple[Case, Choice]:
    """The same on every rank; the case is built anew."""
    case, rng = build(seed), random.Random(7000 + seed)
    axes = 2 if world == 4 and rng.random() < 0.6 else 1
    shared, units = _arguments(rng, axes, world), []
    for _, known in case.units:
        own = _arguments(rng, axes, world) if rng.random() < 0.3 else shared
        units.append({**known, **own})
    leaves = [name for name, module in case.model.named_modules() if isinstance(module, Leaf)]
    marked = [name for name in leaves if rng.random() < 0.2]
    choice = Choice(axes, units, marked, rng.choice(("nothing", "root", "sync", "both")), rng.choice((1, 2, 3)))
    choice.scale, choice.local_step = rng.choice(("mean", "sum", 0.25, 8)), rng.random() < 0.5
    case.micro = choice.micro
    return case, choice


def _arguments(rng: random.Random, axes: int, world: int) -> dict[str, Any]:
    strategy = rng.choice((0, "optim", "optim_grads", "optim_grads_params", 3, None))
    chosen: dict[str, Any] = {"strategy": strategy, "layout": rng.choice(("tensor", "flat", "auto"))}
    if axes == 2:
        whole = strategy in (3, "optim_grads_params", None)
        chosen["outer_strategy"] = rng.choice(("no_shard", "optim", 1) if whole else ("no_shard", None, 0))
    if rng.random() < 0.5:
        sizes = [True, False, 1, *((2,) if world == 4 else ())]
        chosen["reshard_after_forward"] = rng.choice(sizes)
    return chosen


def shard(case: Case, choice: Choice, world: int) -> None:
    for name in choice.marked:
        no_shard(case.model.get_submodule(name))
    mesh = mesh_of(choice.axes, world)
    for (names, _), kwargs in zip(case.units, choice.units):
        modules = [case.model.get_submodule(name) for name in names]
        target = modules if len(modules) > 1 else modules[0]
        fully_shard(target, mesh=mesh, gradient_scale=choice.scale, **kwargs)


def said(model: nn.Module, choice: Choice, number: int) -> AbstractContextManager[None]:
    """Tell the model which micro-batch it is, in the way that was chosen."""
    first, last = number == 0, number == choice.micro - 1
    if choice.saying == "sync":
        model.set_requires_gradient_sync(last)
    elif choice.saying == "both":
        model.set_requires_gradient_sync(last or number == 1)
    return microbatch(model, is_first=first, is_last=last) if choice.saying in ("root", "both") else microbatch(model)


def at_rest(model: nn.Module, evaluated: bool) -> None:
    """Between steps all units rest, and nothing is gathered, but what a pass without a backward keeps for the next."""
    for _, unit in units_below(model):
        assert unit.phase is Phase.RESTING
        for group in unit.groups:
            assert not group.gradients.has_partial
            assert not group.gradients.waiting
            assert evaluated or not group.is_full
            assert evaluated or group.source.is_resident or group.ticket is None
    flatshard.check_buffers(model)


def train(rank: int, world: int, seed: int) -> None:
    (case, choice), reference = choose(seed, world), build(seed)
    reference.micro = choice.micro
    shard(case, choice, world)
    names = [name for name, _ in reference.model.named_parameters()]
    assert [name for name, _ in case.model.named_parameters()] == names
    optimizers = [optimizer_of(case), optimizer_of(reference)]
    if choice.local_step:
        fully_shard_optimizer(optimizers[0])
    # What the scale makes of the sum over ranks, the loss takes back.
    factor = 1.0 if choice.scale == "mean" else 1 / world if choice.scale == "sum" else 1 / (world * choice.scale)
    rng = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        data = torch.randn(choice.micro, 2, ROWS, DIM, generator=rng)
        for number, (rows, target) in enumerate(data):
            case.clock["now"] = reference.clock["now"] = step + number
            wanted = loss_of(reference, rows, target)
            with said(case.model, choice, number):
                loss = loss_of(case, rows.chunk(world)[rank], target.chunk(world)[rank])
                if wanted.requires_grad:
                    wanted.backward()
                    (loss * factor).backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            compare(f"loss of step {step}, micro-batch {number}", mean / world, wanted.detach())
        at_rest(case.model, evaluated=not wanted.requires_grad)
        pairs = list(zip(names, case.model.parameters(), reference.model.parameters()))
        for name, ours, theirs in pairs:
            compare(f"gradient of {name} in step {step}", ours.grad, theirs.grad)
        for optimizer, each in zip(optimizers, (case, reference)):
            optimizer.step()
            each.model.zero_grad(set_to_none=case.set_to_none)
        if case.evaluate:
            with torch.no_grad():
                compare("evaluation", rows_of(case.model(rows)), rows_of(reference.model(rows)))
    for name, ours, theirs in pairs:
        compare(f"weight {name}", ours.detach(), theirs.detach())


def _seeds(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        try:
            train(rank, world, seed)
        except Exception as error:
            case, choice = choose(seed, world)
            raise AssertionError(f"{type(error).__name__}: {error}\n{case}\n{choice}") from error


def world_of(seed: int) -> int:
    return (4, 4, 4, 2, 4, 4, 4, 3)[(seed - FIRST) // BATCH % 8]


BATCHES = [list(range(first, first + BATCH)) for first in range(FIRST, FIRST + SEEDS, BATCH)]


@pytest.mark.parametrize(
    "seeds",
    [seeds if i in (3, 5, 7) else pytest.param(seeds, marks=pytest.mark.full) for i, seeds in enumerate(BATCHES)],
    ids=lambda seeds: "-".join(f"seed{seed}" for seed in seeds),
)
def test_random_choices_equal_one_process(ranks, request, seeds):
    chosen = [seed for seed in seeds if f"seed{seed}" in (request.config.option.keyword or "")]
    ranks(world_of(seeds[0]), _seeds, chosen or seeds)


# In parts: each choice makes a mesh, and the threads of its groups are there until a test ends.
MORE = [(world, part) for world, parts in ((2, 3), (3, 3), (4, 10)) for part in range(parts)]


@pytest.mark.full
@pytest.mark.limit(120)
@pytest.mark.parametrize(("world", "part"), MORE)
def test_many_more_random_choices_equal_one_process(ranks, world, part):
    first = 10_000 * world + 20 * part
    ranks(world, _seeds, list(range(first, first + 20)))
