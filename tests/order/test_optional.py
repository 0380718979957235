"""Optional units: ranks whose batches do not use one take part in what the others launch for it.

One seed alone: ``pytest tests/order/test_optional.py -k seed017``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from flatshard import SchedulePolicy, fully_shard, fully_shard_optimizer, microbatch
from tests.dist.models import assert_rows
from tests.order.cases import DIM, Block
from tests.order.test_random_use import Log, same_launches

pytestmark = [pytest.mark.xdist_group("interpreters")]
BATCH, ROWS, STEPS = 25, 3, 3
RECOMPUTE = (None, None, "each", "reentrant")


class Item(nn.Module):
    """A block, or several; each call says how often it is run, which is not at all or once, or twice for a leaf."""

    def __init__(self, inner: Sequence[Item] = ()) -> None:
        super().__init__()
        self.inner, self.own = nn.ModuleList(inner), Block()
        self.times = [1]  # per item inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        for item, times in zip(self.inner, self.times):
            for _ in range(times):
                x = item(x)
        return x


class Net(nn.Module):
    def __init__(self, items: Sequence[Item], recompute: str | None) -> None:
        super().__init__()
        self.items, self.head = nn.ModuleList(items), nn.Linear(DIM, 2)
        self.recompute, self.times = recompute, [1] * len(items)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = [nn.Sequential(*[item] * times) for item, times in zip(self.items, self.times)]
        for step in steps:
            x = step(x) if self.recompute is None else checkpoint(step, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


class Case:
    """A random model with optional items, and how it is trained."""

    def __init__(self, seed: int, world: int) -> None:
        self.dice = random.Random(seed)
        draw = self.dice
        count = draw.randint(2, 5)
        self.nested = [draw.random() < 0.3 for _ in range(count)]
        self.optional = [draw.random() < 0.5 for _ in range(count)]
        self.optional_inner = [draw.random() < 0.4 for _ in range(count)]
        self.recompute = draw.choice(RECOMPUTE)
        self.micro = draw.choice((1, 1, 2, 3))
        self.sync = draw.choice((True, False))  # in all micro-batches
        self.choices: dict[str, Any] = {"reshard_after_forward": draw.choice((None, True, False))}
        self.hybrid = world == 4 and draw.random() < 0.4
        if draw.random() < 0.3:
            self.choices["strategy"] = draw.choice((1, 2))
        self.schedule = SchedulePolicy(max_gathered=draw.choice((1, 2, 2, 3)))
        self.mode = draw.choice(("random", "random", "all", "none", "alternating", "one rank"))

    def __str__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name != "dice"})

    def build(self) -> Net:
        torch.manual_seed(0)
        return Net([Item([Item(), Item()] if nested else []) for nested in self.nested], self.recompute)

    def shard(self, mesh: DeviceMesh | None) -> Net:
        model = self.build()
        choices = {**self.choices, "mesh": mesh}
        for item, optional, inner in zip(model.items, self.optional, self.optional_inner):
            for each in item.inner:
                fully_shard(each, optional=inner, **choices)
            fully_shard(item, optional=optional, **choices)
        return fully_shard(model, schedule=self.schedule, mesh=mesh)

    def choose(self, models: Sequence[Net], rank: int, turn: int) -> None:
        """What this rank's batch uses in one turn."""
        dice = random.Random(f"{self.dice.random()} {rank} {turn}")

        def use(optional: bool, leaf: bool) -> int:
            if not optional:
                return 1
            used = {
                "random": dice.random() < 0.5,
                "all": True,
                "none": False,
                "alternating": (rank + turn) % 2 == 0,
                "one rank": rank == turn % 2,
            }[self.mode]
            return 0 if not used else 2 if leaf and dice.random() < 0.2 else 1

        for model in models:
            state = dice.getstate()
            model.times = [use(o, not nested) for o, nested in zip(self.optional, self.nested)]
            for item, inner in zip(model.items, self.optional_inner):
                item.times = [use(inner, True) for _ in item.inner]
            if model is not models[-1]:
                dice.setstate(state)


def _train(rank: int, world: int, case: Case, mesh: DeviceMesh | None) -> None:
    model, alone, log = case.shard(mesh), case.build(), Log()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
    fully_shard_optimizer(optimizers[0])
    for step in range(STEPS):
        for number in range(case.micro):
            last, turn = number == case.micro - 1, case.micro * step + number
            case.choose((model, alone), rank, turn)
            x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1000 * turn + rank)).requires_grad_()
            if not case.sync:
                model.set_requires_gradient_sync(last)
            with microbatch(model, is_first=number == 0, is_last=last):
                (model(x).square().mean() / case.micro).backward()
            (alone(x).square().mean() / case.micro).backward()
            log.look(model, f"in micro-batch {number}")
        same_launches(log.take(), f"step {step}")
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
            users = torch.tensor(float(theirs.grad is not None))
            dist.all_reduce(users)
            assert (ours.grad is not None) == bool(users), f"step {step}: {name} has a gradient, or has none"
            if not users:
                continue
            theirs.grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            dist.all_reduce(theirs.grad)
            theirs.grad /= world
            told = f"step {step}, gradient of {name}: "
            assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, told=told: told + text)
        for optimizer, each in zip(optimizers, (model, alone)):
            optimizer.step()
            each.zero_grad()


def _seeds(rank: int, world: int, seeds: Sequence[int]) -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if world == 4 else None
    for seed in seeds:
        if rank == 0:
            print(f"seed {seed}", flush=True)  # the last one is that which hangs
        case = Case(seed, world)
        try:
            _train(rank, world, case, hybrid if case.hybrid else None)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error


def _batches(first: int, end: int) -> list[Any]:
    return [pytest.param(range(s, s + BATCH), id=f"seeds {s} to {s + BATCH - 1}") for s in range(first, end, BATCH)]


@pytest.mark.limit(120)
@pytest.mark.parametrize("seeds", [range(15)], ids=["seeds 0 to 14"])
def test_ranks_that_skip_optional_units_launch_what_the_others_do(interpreters, seeds):
    interpreters((2, 4, 3, 2)[seeds[0] // BATCH % 4], _seeds, seeds)


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("seeds", _batches(0, 1000))
def test_many_more_ranks_that_skip_optional_units(interpreters, seeds):
    interpreters((2, 4, 3, 2)[seeds[0] // BATCH % 4], _seeds, seeds)


def _twice_then_once(rank, world):
    """What a rank runs twice in its first step, the others and itself may run once later: it is one place."""
    model = Net([Item(), Item()], "reentrant")
    for item in model.items:
        fully_shard(item, optional=True)
    fully_shard(model)
    log = Log()
    for times in ([2, 1], [2, 1] if rank else [1, 1], [1, 1] if rank else [0, 2]):
        model.times = times
        model(torch.ones(ROWS, DIM).requires_grad_()).sum().backward()
        log.look(model, "once")
        same_launches(log.take(), f"{times}")


@pytest.mark.limit(60)
def test_a_unit_that_was_run_twice_at_first_is_launched_once(interpreters):
    interpreters(2, _twice_then_once)


def _frozen_and_trained(rank, world):
    """What is frozen, or trained again, while a rank does not use the unit is reduced, or not, on that rank too."""
    model = Net([Item(), Item()], None)
    for item in model.items:
        item.own.down.requires_grad_(False)
        fully_shard(item, optional=True)
    fully_shard(model)
    log, own = Log(), model.items[0].own
    for step, (up, down) in enumerate([(True, False), (True, True), (False, True), (False, False), (True, True)]):
        own.up.requires_grad_(up)
        own.down.requires_grad_(down)
        model.zero_grad()
        model.times = [int(rank == 0 or step == 0), 1]
        model(torch.ones(ROWS, DIM)).sum().backward()
        log.look(model, "frozen")
        same_launches(log.take(), f"step {step}")
        assert [layer.weight.grad is not None for layer in (own.up, own.down)] == [up, down]


@pytest.mark.limit(60)
def test_parameters_that_are_frozen_while_a_rank_skips_them(interpreters):
    interpreters(2, _frozen_and_trained)


def _refused(rank, world):
    """What ranks that skip a unit could not follow is refused on all of them, whatever they use."""
    told = []

    def build(tied=False):
        model = Net([Item(), Item()], None)
        if tied:
            model.items[1].own.up.weight = model.items[0].own.up.weight
        fully_shard(model.items[0], optional=True)
        fully_shard(model.items[1])
        return fully_shard(model)

    def attempt(run):
        try:
            run()
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
        else:
            told.append("nothing")
        one.reset()
        other.reset()

    x, one, other = torch.ones(ROWS, DIM), build(), build()
    for model in (one, other):
        model(x).sum().backward()
    attempt(lambda: build(tied=True)(x))
    attempt(lambda: (one(x).sum() + other(x).sum()).backward())
    attempt(lambda: torch.autograd.grad(one(x).sum(), list(one.head.parameters()), create_graph=True))
    handle = one.items[1].register_forward_hook(lambda *_: other(x) and None)
    attempt(lambda: one(x))
    handle.remove()
    one.times = [rank, 1]
    attempt(lambda: (one(x).sum() + one(x).sum()).backward())
    return told


@pytest.mark.limit(60)
def test_what_ranks_that_skip_a_unit_could_not_follow_is_refused(interpreters):
    wanted = "share parameter|two sharded models|create_graph=True|within the forward of another|two forwards"
    for told in interpreters(2, _refused):
        for text, words in zip(told, wanted.split("|"), strict=True):
            assert words in text


def _called_alone(rank, world):
    """A unit that was called by itself, as to look at the shape of its output, is optional in its model."""
    model = Net([Item([Item()]), Item()], None)
    fully_shard(model.items[0].inner[0])
    for item in model.items:
        fully_shard(item, optional=True)
        with torch.no_grad():
            item(torch.ones(1, DIM))
    fully_shard(model)
    log = Log()
    for step in range(3):
        model.times = [int(rank == step % 2), 1]
        model(torch.ones(ROWS, DIM).requires_grad_()).sum().backward()
        log.look(model, "once")
        same_launches(log.take(), f"step {step}")


@pytest.mark.limit(60)
def test_a_unit_that_was_called_alone_is_optional(interpreters):
    interpreters(2, _called_alone)
