"""Exact numbers: collectives per step, their order, and how much is gathered and reduced at a time."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatshard import SchedulePolicy, fully_shard
from flatshard.buffer import Lane, Ticket
from flatshard.engine.schedule.root import Root
from flatshard.engine.tree.roots import gathered_bytes
from flatshard.engine.units.unit import unit_of

DIM, DEPTH = 6, 4
ROOT = "FSDPChain"


class Chain(nn.Module):
    """`DEPTH` blocks, each a unit of one group, and a head that the root owns. ``order`` are the blocks that run."""

    def __init__(self, recompute: str | None = None, order: tuple[int, ...] = tuple(range(DEPTH))) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, 1)
        self.recompute = recompute
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            block = self.blocks[index]
            if self.recompute is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def sharded_chain(reshard: bool | None = None, schedule: SchedulePolicy | None = None, **kwargs: Any) -> Chain:
    model = Chain(**kwargs)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard, schedule=schedule)


def equal(found: Any, wanted: Any) -> None:
    assert found == wanted, f"{found} instead of {wanted}"


def rows() -> torch.Tensor:
    return torch.ones(2, DIM, requires_grad=True)


def step(model: nn.Module) -> None:
    model(rows()).sum().backward()
    model.zero_grad()


def root_of(model: nn.Module) -> Root:
    root = unit_of(model).root
    assert root is not None
    return root


class Counter:
    """What the lanes of a model launch while the counter is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.root = root_of(model)

    def __enter__(self) -> Counter:
        self._before = [lane.launched for lane in self._lanes]
        return self

    def __exit__(self, *error: Any) -> None:
        self.gathers, self.reduces = (self._names(lane, before) for lane, before in zip(self._lanes, self._before))
        assert [lane.launched - before for lane, before in zip(self._lanes, self._before)] == self.counts

    @property
    def _lanes(self) -> tuple[Lane, Lane]:
        return self.root.gather_lane, self.root.reduce_lane

    @staticmethod
    def _names(lane: Lane, before: int) -> list[str]:
        return [operation.name for operation in lane.history if operation.number > before]

    @property
    def counts(self) -> list[int]:
        return [len(self.gathers), len(self.reduces)]


def warm(model: nn.Module) -> Counter:
    """The orders are recorded by the first step; the ranks agree on them at its end."""
    step(model)
    step(model)
    return Counter(model)


BLOCKS = [f"blocks.{index}" for index in range(DEPTH)]
FORWARD = [ROOT, *BLOCKS]
BACKWARD = BLOCKS[::-1]
RESHARD = {None: FORWARD + BACKWARD, True: [*FORWARD, ROOT, *BACKWARD], False: FORWARD}


def _per_step(rank: int, world: int, reshard: bool | None, recompute: str | None, prefetch: bool) -> None:
    model = sharded_chain(reshard, SchedulePolicy(prefetch=prefetch), recompute=recompute)
    step(model)
    first = Counter(model)
    equal([op.name for op in first.root.gather_lane.history], RESHARD[reshard])
    for _ in range(2):
        with first as counter:
            step(model)
        equal(counter.gathers, RESHARD[reshard])
        equal(counter.reduces, [ROOT, *BACKWARD])


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_a_step_gathers_each_unit_twice_and_a_kept_one_once(ranks, recompute):
    """A recompute uses the gather of the backward that it belongs to. Without prefetch the counts are the same."""
    for reshard in (None, True, False):
        for prefetch in (True, False):
            ranks(2, _per_step, reshard, recompute, prefetch)


def _evaluation(rank: int, world: int) -> None:
    model = sharded_chain()
    counter = warm(model)
    for _ in range(2):
        with counter, torch.no_grad():
            model(rows())
        equal((counter.gathers, counter.reduces), (FORWARD, []))
        equal(counter.root.gather_pool.live_buffers, 0)
        with counter:
            step(model)
        equal((counter.gathers, counter.reduces), (FORWARD + BACKWARD, [ROOT, *BACKWARD]))
        equal(counter.root.gather_pool.live_buffers, 0)
    with counter:
        model(rows())  # with gradients that nobody asks for
    equal(counter.gathers, FORWARD)
    with counter, torch.no_grad():
        model.blocks[2](rows())
    equal(counter.gathers[0], "blocks.2")
    equal(counter.root.gather_pool.live_buffers, 1)
    with counter:
        step(model)
    equal((counter.gathers, counter.reduces), (FORWARD[1:] + BACKWARD, [ROOT, *BACKWARD]))
    equal(counter.root.gather_pool.live_buffers, 0)


def test_evaluation_between_steps_gathers_once_and_changes_no_count(ranks):
    ranks(2, _evaluation)


def _several_forwards(rank: int, world: int) -> None:
    model = sharded_chain()
    counter = warm(model)
    with counter:
        (model(rows()).sum() + model(2 * rows()).sum()).backward()
    equal(counter.gathers, FORWARD + FORWARD[1:] + BACKWARD)  # the root is kept
    equal(counter.reduces, [ROOT, *BACKWARD])
    with counter:
        losses = [model(rows()).sum(), model(rows()).sum()]
        for loss in losses:
            loss.backward()
    # The first backward ends with everything released, so the second gathers the root too.
    equal(counter.gathers, [*FORWARD, *FORWARD[1:], *BACKWARD, ROOT, *BACKWARD])
    equal(counter.reduces, [ROOT, *BACKWARD] * 2)
    with counter:
        for _ in range(3):  # accumulation: every backward reduces
            model(rows()).sum().backward()
    equal(counter.counts, [3 * (2 * DEPTH + 1), 3 * (DEPTH + 1)])


def test_several_forwards_share_the_gathers_and_reduces_of_one_backward(ranks):
    ranks(2, _several_forwards)


def _called_twice(rank: int, world: int, recompute: str | None, prefetch: bool) -> None:
    model = sharded_chain(schedule=SchedulePolicy(prefetch=prefetch), recompute=recompute, order=(0, 1, 0, 2, 3))
    counter = warm(model)
    with counter:
        step(model)
    forward = [ROOT, "blocks.0", "blocks.1", "blocks.0", "blocks.2", "blocks.3"]
    return counter.gathers[len(forward) :], counter.reduces, counter.gathers[: len(forward)] == forward


def test_a_unit_called_twice_is_gathered_once_and_reduced_once_by_backward(ranks):
    for recompute in (None, "non-reentrant"):
        for prefetch in (True, False):
            for gathers, reduces, forward in ranks(2, _called_twice, recompute, prefetch):
                assert forward
                assert gathers == ["blocks.3", "blocks.2", "blocks.0", "blocks.1"]
                assert reduces == [ROOT, "blocks.3", "blocks.2", "blocks.1", "blocks.0"]


def _unused(rank: int, world: int) -> None:
    model = sharded_chain(order=(0, 1, 2, 3))
    counter = warm(model)
    model.order = (0, 2, 3)
    seen = []
    for _ in range(2):
        with counter:
            step(model)
        seen.append((sorted(counter.gathers), counter.reduces))
        equal(counter.root.gather_pool.live_buffers, 0)
    # The order of the step before had block 1 in it: it was gathered ahead, in vain. Then it is no longer expected.
    used = sorted([ROOT, *(["blocks.0", "blocks.2", "blocks.3"] * 2)])
    equal(seen[1], (used, [ROOT, "blocks.3", "blocks.2", "blocks.0"]))
    equal(seen[0], (sorted([*used, "blocks.1", "blocks.1"]), seen[1][1]))


def test_a_unit_that_is_skipped_is_gathered_in_vain_once_and_never_reduced(ranks):
    ranks(2, _unused)


def _skipped(rank: int, world: int, max_gathered: int) -> None:
    model = sharded_chain(schedule=SchedulePolicy(max_gathered=max_gathered))
    for order in ((0, 2), (1, 3), (0, 3)):
        model.order = tuple(range(DEPTH))
        pool = warm(model).root.gather_pool
        model.order, pool.peak_buffers = order, 0
        step(model)
        equal(pool.peak_buffers, 1 + max_gathered)  # the root is kept
        equal(pool.live_buffers, 0)


@pytest.mark.parametrize("max_gathered", [1, 2])
def test_skipped_units_that_were_prefetched_do_not_stay_gathered(ranks, max_gathered):
    ranks(2, _skipped, max_gathered)


def _beside_the_loss(rank: int, world: int) -> None:
    model = sharded_chain()
    warm(model)
    last, seen = unit_of(model.blocks[-1]), []
    model.blocks[-1][0].register_full_backward_pre_hook(lambda *_: seen.append(last.is_gathered))
    out = model(torch.ones(2, DIM))
    out.register_hook(lambda _: seen.append(last.is_gathered))  # called when the unit of the loss has been reached
    out.sum().backward()
    assert seen == [world > 1, True]


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_alone_does_not_prefetch_beside_the_loss(ranks, world):
    ranks(world, _beside_the_loss)


class _Log(deque[Ticket]):
    """A lane's history that also writes down the names of what is launched."""

    def __init__(self, events: list[tuple[str, str]], label: str) -> None:
        super().__init__(maxlen=1)
        self._events, self._label = events, label

    def append(self, operation: Ticket) -> None:
        self._events.append((self._label, operation.name))


def _events(model: Chain) -> list[tuple[str, str]]:
    """Launches, and begins and ends of forwards, in the order in which the host makes them; filled by what runs."""
    events: list[tuple[str, str]] = []
    root = root_of(model)
    root.gather_lane.history = _Log(events, "gather")
    root.reduce_lane.history = _Log(events, "reduce")
    for name, block in zip(BLOCKS, model.blocks):
        block[0].register_forward_pre_hook(lambda *_, name=name: events.append(("begin", name)))
        block[0].register_forward_hook(lambda *_, name=name: events.append(("end", name)))
    return events


def _order(rank: int, world: int, max_gathered: int) -> None:
    model = sharded_chain(schedule=SchedulePolicy(max_gathered=max_gathered))
    warm(model)
    events = _events(model)
    step(model)
    at = {event: len(events) - 1 - events[::-1].index(event) for event in events}  # the last of each
    first = {event: events.index(event) for event in events}
    for number in range(DEPTH - 1):
        ahead = min(number + max_gathered - 1, DEPTH - 1)
        assert first["gather", BLOCKS[ahead]] < first["begin", BLOCKS[number]]
        if ahead + 1 < DEPTH:
            assert first["gather", BLOCKS[ahead + 1]] > first["end", BLOCKS[number]]
    for number in range(1, DEPTH):
        before = max(number - max_gathered + 1, 0)
        assert at["gather", BLOCKS[before]] < at["reduce", BLOCKS[number]]
    assert events.index(("reduce", ROOT)) > at["gather", BLOCKS[-1]] or max_gathered == 1


@pytest.mark.parametrize("max_gathered", [1, 2, 3])
def test_the_next_gather_is_launched_before_this_forward_and_before_this_reduce(ranks, max_gathered):
    ranks(2, _order, max_gathered)


class Uneven(nn.Module):
    """Three small units, a large one, three small ones."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [DIM] * 3 + [20 * DIM] + [DIM] * 3
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, n), nn.Linear(n, DIM)) for n in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _by_bytes(rank: int, world: int) -> None:
    grads = []
    for policy in (SchedulePolicy(), SchedulePolicy(max_gathered_bytes=8_000), SchedulePolicy(max_gathered_bytes=1)):
        torch.manual_seed(0)
        model = Uneven()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, schedule=policy)
        counter = warm(model)
        pool = counter.root.gather_pool
        pool.peak_bytes = pool.peak_buffers = 0
        with counter:
            model(rows()).sum().backward()
        grads.append([parameter.grad.to_local() for parameter in model.parameters()])
        sizes = [gathered_bytes(unit_of(block)) for block in model.blocks]
        small, large = sizes[0], sizes[3]
        assert large + 3 * small <= 8_000 < large + 4 * small
        equal(len(counter.gathers), 14)
        if policy.max_gathered_bytes == 8_000:
            # Beside the large one, all small ones before it or after it fit in.
            equal(pool.peak_bytes, large + 3 * small)
            equal(pool.peak_buffers, 4)
        else:
            equal(pool.peak_bytes, large + small)
            equal(pool.peak_buffers, 2)
    for other in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], other))


def test_units_are_gathered_further_ahead_as_long_as_they_fit_into_so_many_bytes(ranks):
    ranks(2, _by_bytes)


def _explicit(rank: int, world: int) -> None:
    model = sharded_chain()
    b = model.blocks
    b[0].set_modules_to_forward_prefetch([b[2], b[1]])
    b[1].set_modules_to_forward_prefetch([])
    b[3].set_modules_to_backward_prefetch([b[1]])
    counter = warm(model)
    with counter:
        step(model)
    name = BLOCKS
    # The root's own prefetch is by the order; block 0 gathers the two of its list; block 1 nothing.
    equal(counter.gathers[:5], [ROOT, name[0], name[2], name[1], name[3]])
    equal(counter.gathers[5:], [name[3], name[1], name[2], name[0]])
    equal(counter.reduces, [ROOT, *BACKWARD])
    equal(counter.root.gather_pool.live_buffers, 0)


def test_explicit_prefetch_lists_take_the_place_of_the_recorded_order(ranks):
    ranks(2, _explicit)


def _alive(rank: int, world: int, schedule: dict[str, Any], recompute: str | None) -> tuple[int, int]:
    model = sharded_chain(schedule=SchedulePolicy(**schedule), recompute=recompute)
    root = warm(model).root
    reducing = []
    reduce = root.reduces.launch

    def watched(*args: Any) -> None:
        reduce(*args)
        reducing.append(len(root.reduces.in_flight))

    root.reduces.launch = watched
    root.gather_pool.peak_buffers = 0
    step(model)
    equal(len(reducing), DEPTH + 1)
    equal(root.gather_pool.live_buffers, 0)
    return root.gather_pool.peak_buffers, max(reducing)


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_gathered_units_and_reduces_in_flight_are_limited(ranks, recompute):
    """Beyond the root, which is kept: the unit in use and what is gathered ahead of it."""
    for schedule, gathered, reducing in (
        ({}, 2, 2),
        ({"prefetch": False}, 1, 2),
        ({"max_gathered": 1}, 1, 2),
        ({"max_gathered": 3, "max_reducing": 1}, 3, 1),
        ({"async_reduce": False}, 2, 0),
    ):
        assert ranks(2, _alive, schedule, recompute) == [(1 + gathered, reducing)] * 2, schedule
