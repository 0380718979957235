"""The planned pool: one slot per buffer over all passes, whatever they do, and training that is none the wiser."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatshard import SchedulePolicy, fully_shard, microbatch, summary
from flatshard.buffer import Lane, Planner, Pool, Ticket
from flatshard.buffer.planned import make_plan
from flatshard.buffer.pools import _Slot
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import unit_of
from tests.dist.models import assert_rows, loss_of, make_net
from tests.dist.test_counts import DEPTH, DIM, Chain, equal, sharded_chain
from tests.dist.test_errors import Bomb

CPU = torch.device("cpu")
MIB = 1 << 20


class Recorded:
    """A pool whose buffers, takes and releases are written down; it checks what it hands out."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.events: list[tuple[str, int, int]] = []
        self.slots: dict[int, list[_Slot]] = {}  # by buffer, what it got in turn
        allocate, release = pool.allocate, pool.release
        numbers: dict[int, int] = {}

        def taking(tensor: torch.Tensor, lasting: bool = False, here: bool = False) -> None:
            before = tensor.untyped_storage().nbytes()
            allocate(tensor, lasting, here)
            if before or lasting or not tensor.numel():
                return
            slot = pool._taken[tensor.untyped_storage()._cdata]
            assert slot.size >= tensor.untyped_storage().nbytes()
            assert slot not in pool._free
            assert len({id(taken) for taken in pool._taken.values()}) == len(pool._taken)
            number = numbers.setdefault(id(tensor), len(numbers))
            self.events.append(("take", number, tensor.untyped_storage().nbytes()))
            self.slots.setdefault(number, []).append(slot)

        def releasing(tensor: torch.Tensor) -> None:
            if tensor.untyped_storage()._cdata in pool._taken:
                self.events.append(("release", numbers[id(tensor)], 0))
            release(tensor)

        pool.allocate, pool.release = taking, releasing  # type: ignore[method-assign]

    def clear(self) -> None:
        self.slots.clear()

    @property
    def fixed(self) -> bool:
        """Whether every buffer has got the same slot every time since `clear`."""
        return all(len(set(slots)) == 1 for slots in self.slots.values())


passes = st.lists(
    st.tuples(st.lists(st.integers(0, 6), max_size=20), st.sampled_from(["over", "over", "broken", "unfinished"])),
    max_size=8,
)


def run_pass(pool: Pool, buffers: list[torch.Tensor], toggled: list[int], end: str) -> int:
    """Take or release these buffers in turn; the most bytes that were live."""
    peak = 0
    for index in toggled:
        tensor = buffers[index]
        if tensor.untyped_storage().nbytes():
            pool.release(tensor)
        else:
            pool.allocate(tensor)
        peak = max(peak, pool.live_bytes)
    if end == "broken":
        pool.forget()
    for tensor in buffers if end != "unfinished" else ():
        pool.release(tensor)
    pool.end_pass()
    return peak


def run_all(given_passes: list[tuple[list[int], str]], sizes: list[int]) -> tuple[Recorded, list[torch.Tensor]]:
    pool = Pool(Lane("gather", CPU), Planner())
    recorded = Recorded(pool)
    buffers = [pool.empty(size, torch.uint8) for size in sizes]
    for toggled, end in given_passes:
        run_pass(pool, buffers, toggled, end)
    run_pass(pool, buffers, [], "over")
    return recorded, buffers


@settings(max_examples=100, deadline=None)
@given(passes, st.lists(st.integers(1, 9).map(lambda mib: mib * MIB), min_size=7, max_size=7))
def test_any_passes_are_planned_and_replayed(given_passes, sizes):
    recorded, buffers = run_all(given_passes, sizes)
    pool, planner = recorded.pool, recorded.pool.planner
    again = run_all(given_passes, sizes)[0].pool.planner
    assert (again.plan, again.statistics) == (planner.plan, planner.statistics)
    equal(pool.live_bytes, 0)
    equal(pool.num_slots, len(pool._free))
    recorded.clear()
    before = planner.statistics
    peak = 0
    if all(end != "unfinished" for _, end in given_passes):  # else what starts a pass is not what it started with then
        for toggled, end in given_passes:
            if end == "over":
                peak = max(peak, run_pass(pool, buffers, toggled, end))
    after = planner.statistics
    assert recorded.fixed
    equal((after.missed, after.plans, after.bytes), (before.missed, before.plans, before.bytes))
    equal(after.planned - before.planned, sum(len(slots) for slots in recorded.slots.values()))
    assert peak <= after.bytes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_a_plan_separates_what_is_live_together(sizes, data):
    pairs = st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, len(sizes) - 1)).filter(lambda p: p[0] != p[1])
    beside: dict[int, set[int]] = {buffer: set() for buffer in range(len(sizes))}
    for left, right in data.draw(st.lists(pairs, max_size=30)):
        beside[left].add(right)
        beside[right].add(left)
    plan = make_plan(dict(enumerate(sizes)), beside)
    for buffer, others in beside.items():
        assert plan.slot_of[buffer] not in {plan.slot_of[other] for other in others}
        assert sizes[buffer] <= plan.sizes[plan.slot_of[buffer]]
    assert plan.sizes == sorted(plan.sizes, reverse=True)
    assert len(plan.sizes) <= 1 + max(len(others) for others in beside.values())


def test_a_pass_that_is_broken_off_leaves_nothing_in_the_plan():
    pool = Pool(Lane("gather", CPU), Planner())
    buffers = [pool.empty(MIB, torch.uint8) for _ in range(3)]
    run_pass(pool, buffers, [0, 1, 2], "broken")
    equal((pool.planner.plans, pool.num_slots), (0, 3))
    run_pass(pool, buffers, [0, 0, 1, 1, 2, 2], "over")
    equal((pool.planner.statistics.slots, pool.num_slots), (1, 1))
    run_pass(pool, buffers, [2, 1], "unfinished")  # not planned before all is released
    equal((pool.planner.plans, pool.planner.missed), (1, 1))
    run_pass(pool, buffers, [], "over")
    equal((pool.planner.plans, pool.planner.statistics.slots), (2, 2))


def test_a_slot_whose_memory_cannot_be_had_is_free_again(monkeypatch):
    """Out of memory in the middle of `allocate`: the plan goes on as if it had not been asked for."""
    pool = Pool(Lane("test", CPU), Planner())
    tensors = [pool.empty(MIB, torch.uint8) for _ in range(2)]

    def refuse(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", refuse)
        for tensor in tensors:
            with pytest.raises(torch.OutOfMemoryError):
                pool.allocate(tensor)
    assert (pool.live_buffers, len(pool._taken), len(pool._free)) == (0, 0, pool.num_slots)
    pool.forget()
    for tensor in tensors:
        pool.allocate(tensor)
        pool.release(tensor)
    pool.end_pass()
    assert pool.planner is not None
    assert (pool.planner.plans, len(pool.planner.plan.sizes)) == (1, 1)


def test_a_lane_is_left_where_a_wait_fails():
    lane = Lane("test", CPU)

    def fail():
        raise RuntimeError("of the wait")

    with pytest.raises(RuntimeError, match="of the wait"), lane.entered((Ticket(then=fail),)):
        pass
    assert lane.inside.depth == 0
    with lane.entered():
        assert lane.inside.depth == 1
    assert lane.inside.depth == 0


def test_buffers_that_are_gone_leave_the_plan():
    pool = Pool(Lane("gather", CPU), Planner())
    buffers = [pool.empty(MIB, torch.uint8) for _ in range(3)]
    run_pass(pool, buffers, [0, 1, 2], "over")
    equal(pool.planner.statistics.slots, 3)
    del buffers[1]
    run_pass(pool, buffers, [], "over")
    equal((pool.planner.statistics.slots, pool.num_slots), (2, 2))
    pool.allocate(buffers[0])
    del buffers[0]  # while it is live: nobody can release it any more
    run_pass(pool, buffers, [], "over")
    equal((pool.planner.statistics.slots, pool.planner.statistics.missed), (1, 0))


class Trained:
    """A planned model beside the same model in one process, on the same rows."""

    def __init__(self, **schedule) -> None:
        torch.manual_seed(0)
        self.reference = Chain()
        torch.manual_seed(0)
        self.model = sharded_chain(schedule=SchedulePolicy(planned_pool=True, **schedule))
        self.pool = find_root(unit_of(self.model), self.model).gather_pool
        self.recorded = Recorded(self.pool)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.model, self.reference)]

    def step(self, forwards: int = 1) -> tuple[int, int, int]:
        """Train both; how many buffers got their planned places and how many did not, and the number of the plan."""
        before, launched = self.pool.planner.statistics, len(self.recorded.events)
        for each, optimizer in zip((self.model, self.reference), self.optimizers):
            dtype = each.head.weight.dtype
            inputs = [torch.full((2, DIM), 0.1 * (n + 1), requires_grad=True, dtype=dtype) for n in range(forwards)]
            sum(each(given).square().sum() for given in inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters()):
            assert_rows(ours.detach(), theirs.detach())
        equal(self.pool.live_buffers, 0)
        after = self.pool.planner.statistics
        planned, missed = after.planned - before.planned, after.missed - before.missed
        takes = sum(kind == "take" for kind, _, _ in self.recorded.events[launched:])
        assert planned + missed == (takes if before.plans or planned else 0)
        return planned, missed, after.plans

    def evaluate(self) -> None:
        with torch.no_grad():
            rows = torch.ones(3, DIM, dtype=self.reference.head.weight.dtype)
            torch.testing.assert_close(self.model(rows), self.reference(rows))


GATHERS = 2 * DEPTH + 1  # of a step: every block twice, the root once


def _training(rank, world):
    both = Trained()
    equal(both.step(), (0, 0, 0))  # recorded
    both.recorded.clear()
    for _ in range(3):
        equal(both.step(), (GATHERS, 0, 1))
        both.evaluate()  # goes by the same plan: nothing else is live together
    assert both.recorded.fixed
    equal(both.pool.planner.statistics.slots, 3)  # two blocks and the root
    assert both.step(forwards=2)[1]  # the backward of two forwards has more gathered at a time
    equal(both.step(forwards=2)[1:], (0, 2))
    equal(both.step(), (GATHERS, 0, 2))
    return both.pool.planner.plan


def test_a_step_is_recorded_and_replayed(ranks):
    plans = ranks(2, _training)
    assert plans[0] == plans[1]


def _other_passes(rank, world):
    both = Trained()
    for _ in range(2):
        both.step()
    both.model.order = both.reference.order = (2, 0, 1, 3)
    planned, missed, plans = both.step()  # blocks 0 and 2 had one slot
    assert missed
    equal(plans, 1)
    for order in ((2, 0, 1, 3), tuple(range(DEPTH)), (2, 0, 1, 3)):  # the new plan is for both
        both.model.order = both.reference.order = order
        both.step()
    settled = both.pool.planner.statistics
    both.recorded.clear()
    for order in (tuple(range(DEPTH)), (2, 0, 1, 3)):
        both.model.order = both.reference.order = order
        equal(both.step()[1:], (0, settled.plans))
        both.evaluate()
    assert both.recorded.fixed
    # other buffers: those of before leave the plan
    before = len(both.pool.planner.plan.slot_of)
    for each in (both.model, both.reference):
        each.double()
    both.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (both.model, both.reference)]
    planned, missed, _ = both.step()
    equal(planned, 0)
    assert missed
    equal(both.step()[1], 0)
    equal(len(both.pool.planner.plan.slot_of), before)
    equal(both.pool.num_slots, both.pool.planner.statistics.slots)


def test_another_order_and_other_buffers_are_planned_too(ranks):
    ranks(2, _other_passes)


def _whole(rank, world):
    """All units at once, by hand, after a plan for two at a time."""
    both = Trained()
    for _ in range(2):
        both.step()
    for block in both.model.blocks:
        block.unshard()
    equal(both.pool.live_buffers, DEPTH)
    missed = both.pool.planner.statistics.missed
    assert missed >= DEPTH - both.pool.planner.statistics.slots
    for block in both.model.blocks:
        block.reshard()
    equal(both.step(), (GATHERS, 0, 2))
    equal(both.pool.planner.statistics.slots, DEPTH + 1)


def test_units_gathered_by_hand_are_no_harm(ranks):
    ranks(2, _whole)


def _broken(rank, world):
    both = Trained()
    for _ in range(2):
        both.step()
    before = both.pool.planner.statistics
    in_forward, in_backward = lambda *_: 1 / 0, lambda module, args, output: Bomb.apply(output)
    for order, hook in (((3, 1, 2, 0), in_forward), (tuple(range(DEPTH)), in_backward)):
        both.model.order = order
        handle = both.model.blocks[2].register_forward_hook(hook)
        with pytest.raises((ZeroDivisionError, ValueError)):
            both.model(torch.ones(2, DIM, requires_grad=True)).sum().backward()
        handle.remove()
        both.model.order = tuple(range(DEPTH))
        both.model.zero_grad()
        equal(both.step()[1:], (0, before.plans))
    assert both.pool.planner.statistics.missed > before.missed


def test_a_pass_that_raises_is_no_pattern(ranks):
    ranks(2, _broken)


def _kept(rank, world):
    """What is kept between micro-batches comes from elsewhere and is in nobody's way."""
    models = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Chain()
        for block in model.blocks:
            fully_shard(block)
        models.append(fully_shard(model, schedule=SchedulePolicy(keep_for_next=1 << 20, planned_pool=planned)))
    for _ in range(3):
        for model in models:
            for number in range(3):
                with microbatch(model, is_first=number == 0, is_last=number == 2):
                    model(torch.full((2, DIM), 0.1 * number, requires_grad=True)).sum().backward()
        for ours, theirs in zip(*(model.parameters() for model in models)):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
        for model in models:
            model.zero_grad()
    found = summary(models[1]).pool
    assert found.plans
    equal((found.missed, unit_of(models[1]).root.gather_pool.live_buffers), (0, 0))


def test_units_kept_between_microbatches(ranks):
    ranks(2, _kept)


def _ordinary(events: list[tuple[str, int, int]], scale: int) -> int:
    """Bytes that the slots of an ordinary pool have after these takes and releases."""
    pool, held = Pool(Lane("gather", CPU)), {}
    for kind, buffer, size in events:
        if kind == "take":
            held[buffer] = pool._take(size * scale)
        else:
            pool._free.append(held.pop(buffer))
    assert not held
    return sum(slot.size for slot in pool._free)


def _sizes(rank, world, depth, recompute):
    for vocab in (29, 290):
        for schedule in ({}, {"max_gathered": 1}, {"max_gathered": 3}, {"prefetch": False}):
            net = make_net(depth=depth, vocab=vocab, recompute=recompute)
            for unit in (*net.blocks, net.embed, net.head):
                fully_shard(unit)
            model = fully_shard(net, schedule=SchedulePolicy(planned_pool=True, **schedule))
            pool = find_root(unit_of(model), model).gather_pool
            recorded = Recorded(pool)
            tokens = torch.zeros(2, 5, dtype=torch.int64)
            for number in range(3):
                loss_of(model, tokens).backward()
                if number:
                    with torch.no_grad():
                        loss_of(model, tokens)
            model.reshard()
            scale = 20 << 10  # tiny models have tiny buffers; slots are for large ones
            planned = sum(_Slot(size * scale, CPU).size for size in pool.planner.plan.sizes)
            assert planned <= _ordinary(recorded.events, scale), (vocab, schedule)
            assert pool.planner.statistics.bytes >= pool.peak_bytes


@pytest.mark.parametrize(
    ("depth", "recompute"),
    [
        pytest.param(depth, recompute, marks=() if depth == 3 or recompute is None else pytest.mark.full)
        for depth in (2, 3, 6)
        for recompute in (None, "reentrant", "non-reentrant")
    ],
)
def test_a_plan_is_not_larger_than_the_slots_without(ranks, depth, recompute):
    ranks(1, _sizes, depth, recompute)


def _seen(rank, world):
    gc.collect()
    gc.disable()
    try:
        assert "planned" not in str(summary(sharded_chain()))
        model = Trained().model
        for _ in range(2):
            model(torch.ones(2, DIM, requires_grad=True)).sum().backward()
        found = summary(model)
        equal((found.pool.plans, found.pool.slots, found.pool.planned, found.pool.missed), (1, 3, GATHERS, 0))
        assert "3 slots" in str(found).splitlines()[-1]
        pool = unit_of(model).root.gather_pool
        for name in ("allocate", "release"):
            delattr(pool, name)  # what records refers to the pool
        dead = [weakref.ref(each) for each in (model, pool, pool.planner)]
        del model, pool
        equal([ref() for ref in dead], [None] * 3)
    finally:
        gc.enable()


def test_the_summary_shows_it_and_deletion_frees_it(ranks):
    ranks(2, _seen)
