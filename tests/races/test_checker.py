"""The checker sees races: between two streams, in memory that is given back, and wherever a wait is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatshard import SchedulePolicy, _torch
from flatshard.buffer import Lane, Pool, Ticket, lanes, pools
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.backend import RehearsalGroup
from flatshard.rehearsal.clock_cpu import CpuWork
from tests.races.checker import Checker, Event, place, watching
from tests.races.order import line_of
from tests.races.test_races import CHOICES, TO_BF16, accumulate, as_microbatch, sharded, train

CPU = torch.device("cpu")


def kinds(checker: Checker) -> set[str]:
    return {race.kind for race in checker.races}


# Two streams


def read(tensor: torch.Tensor) -> None:
    tensor.sum()


def write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (write, read, "read after write"),
        (read, write, "write after read"),
        (write, write, "write after write"),
        (read, read, None),
    ],
)
def test_two_streams_with_and_without_an_event(first, second, kind, ordered):
    tensor = torch.zeros(4)
    with watching() as checker:
        side, event = checker.stream("side"), checker.event()
        with checker.on(side):
            first(tensor)
        event.record(side)
        if ordered:
            event.wait()
        second(tensor)
    assert kinds(checker) == ({kind} if kind and not ordered else set())


def test_an_event_orders_what_came_before_it_and_through_others():
    early, late, through = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    with watching() as checker:
        one, two = checker.stream("one"), checker.stream("two")
        with checker.on(one):
            write(through)
            event = checker.event()
            event.record()
        with checker.on(two):
            event.wait()
            write(early)
            event = checker.event()
            event.record()
            write(late)
        event.wait()
        read(through)
        read(early)
        assert not checker.races
        read(late)
    assert kinds(checker) == {"read after write"}


def test_parts_of_one_memory_are_told_apart():
    tensor = torch.zeros(8, 4)
    with watching() as checker:
        with checker.on(checker.stream("side")):
            write(tensor[:4])
        write(tensor[4:])
        read(tensor[4:].t())
        assert not checker.races
        read(tensor[3:5])
    assert [(race.kind, race.memory.split(",")[0]) for race in checker.races] == [
        ("read after write", "bytes 48 to 80 of 128")
    ]


def test_what_touches_no_values_is_no_access():
    tensor = torch.zeros(4, 4)
    with watching() as checker:
        with checker.on(checker.stream("side")):
            write(tensor)
        tensor.detach().view(-1)[3:].t_()
        torch.empty_like(tensor)
        tensor.new_zeros(3)
        tensor.reshape(2, 8).contiguous().to(torch.float32)
        with torch.inference_mode():
            tensor.reshape(2, 8).contiguous()
        assert not checker.races
        torch.mm(torch.ones(4, 4), torch.ones(4, 4), out=tensor)
        assert kinds(checker) == {"write after write"}


def test_a_race_is_told_with_both_places():
    with watching() as checker:
        tensor = torch.zeros(4)
        with checker.on(checker.stream("side")):
            write(tensor)
    report = checker.report()
    assert "1 race(s)" in report
    assert "write after write, without an event between them: bytes 0 to 16 of 16" in report
    for line in ("stream 'compute' writes it by aten::zeros", "stream 'side' writes it by aten::add_"):
        assert line in report
    assert report.count("tests/races/test_checker.py:") == 4  # where it was made, both accesses, and `write`'s caller


# Memory that is given back


@pytest.mark.parametrize("by", ["reference", "storage"])
@pytest.mark.parametrize("ordered", [False, True])
def test_memory_comes_back_while_another_stream_reads_it(ordered, by):
    with watching() as checker:
        side, event = checker.stream("side"), checker.event()
        tensor = torch.zeros(4)
        event.record()
        with checker.on(side):
            event.wait()
            read(tensor)
            event = checker.event()
            event.record()
        if by == "reference":
            del tensor
        else:
            tensor.untyped_storage().resize_(0)
        if ordered:
            event.wait()
        torch.zeros(4)
    assert kinds(checker) == (set() if ordered else {"reuse of memory in use"})


@pytest.mark.parametrize("ordered", [False, True])
def test_new_memory_belongs_to_the_stream_that_asked_for_it(ordered):
    with watching() as checker:
        tensor, event = torch.empty(4), checker.event()
        event.record()
        with checker.on(checker.stream("side")):
            if ordered:
                event.wait()
            write(tensor)
    assert kinds(checker) == (set() if ordered else {"write after write"})


@pytest.mark.parametrize("kept", [False, True])
def test_temporaries_are_kept_until_the_lane_is_waited_for(kept):
    with watching() as checker:
        lane = Lane("side", CPU)
        tensor = Pool(lane).temporary(4, torch.float32)
        with lane.entered():
            write(tensor)
            ticket = lane.mark()
        if kept:
            ticket.wait()
        del tensor
    assert kinds(checker) == (set() if kept else {"drop of a temporary in use"})


def gather_and_read(pool: Pool, tensor: torch.Tensor, lasting: bool = False) -> None:
    """What becomes of the weights of a unit."""
    pool.allocate(tensor, lasting)
    with pool.lane.entered():
        write(tensor)
        ticket = pool.lane.mark()
    ticket.wait()
    read(tensor)
    pool.release(tensor)


def forgetful(release: Callable[..., None]) -> Callable[..., None]:
    def forgotten(self: Pool, tensor: torch.Tensor, keep: bool = False) -> None:
        release(self, tensor, keep)

        for slot in self._free:
            slot.released = ()

    return forgotten


@pytest.mark.parametrize("ordered", [False, True])
def test_slots_wait_for_who_read_them_last(ordered):
    with watching() as checker:
        pool = Pool(Lane("gather", CPU))
        tensors = [pool.empty(64, torch.float32) for _ in range(2)]
        with mock.patch.object(Pool, "release", Pool.release if ordered else forgetful(Pool.release)):
            for _ in range(3):
                for tensor in tensors:
                    gather_and_read(pool, tensor)
    assert kinds(checker) == (set() if ordered else {"reuse of memory in use"})


@pytest.mark.parametrize("left_out", [None, "lane", "compute"])
def test_the_current_stream_writes_slots_that_nobody_uses(left_out):
    """It waits for a lane's last writes, and the lane for its."""

    def waits(self: Ticket) -> None:
        if (_torch.current_stream(0).name == "compute") is not (left_out == "compute"):
            wait(self)

    wait = Ticket.wait
    with watching() as checker:
        pool = Pool(Lane("gather", CPU))
        tensor = pool.empty(64, torch.float32)
        assert pool.num_slots == 1
        with mock.patch.object(Ticket, "wait", wait if left_out is None else waits):
            for _ in range(2):
                pool.allocate(tensor)
                with pool.lane.entered():
                    write(tensor)
                    pool.release(tensor)  # where the lane stands
                pool.allocate(tensor, for_current_stream=True)
                write(tensor)
                pool.release(tensor)
        assert pool.num_slots == 1
    assert kinds(checker) == (set() if left_out is None else {"reuse of memory in use"})


def test_buffers_are_made_in_slots_that_nobody_reads():
    with watching() as checker:
        pool = Pool(Lane("gather", CPU))
        gather_and_read(pool, pool.empty(64, torch.float32))
        gather_and_read(pool, pool.empty(64, torch.float32))
        assert not checker.races
        with mock.patch.object(pools._Slot, "released", ()):
            pool.empty(64, torch.float32)
    assert kinds(checker) == {"reuse of memory in use"}


@pytest.mark.parametrize("ordered", [False, True])
def test_lasting_memory_is_of_the_current_stream(ordered):
    with watching() as checker:
        pool, side = Pool(Lane("gather", CPU)), checker.stream("side")
        tensor = pool.empty(64, torch.float32)
        pool.allocate(tensor, lasting=True)
        with pool.lane.entered():
            write(tensor)
            ticket = pool.lane.mark()
        ticket.wait()
        assert not checker.races
        with checker.on(side):
            ticket.wait()
            read(tensor)
            with mock.patch.object(
                Ticket, "order_before", Ticket.order_before if ordered else lambda self, stream: None
            ):
                pool.release(tensor)
        torch.zeros(64)
    assert kinds(checker) == (set() if ordered else {"reuse of memory in use"})


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("how", ["pool", "drop"])
def test_memory_goes_back_to_the_device_when_nobody_reads_it(how, ordered):
    with watching() as checker:
        pool = Pool(Lane("gather", CPU))
        tensors = [pool.empty(1 << size, torch.float32) for size in (22, 21, 20)]
        with mock.patch.object(Event, "wait", Event.wait if ordered else lambda self, stream=None: None):
            for tensor in tensors:
                gather_and_read(pool, tensor)
            if how == "pool":
                del pool
            else:
                pool.drop()
        assert ("unmapping of memory in use" in kinds(checker)) is not ordered


# Collectives


@pytest.mark.parametrize("waits", [False, True])
def test_collectives_run_on_a_stream_of_their_group(waits):
    with rehearse(2, "free"), watching() as checker:
        tensor = torch.zeros(4)
        work = dist.all_reduce(tensor, async_op=True)
        if waits:
            work.wait()
        read(tensor)
        assert kinds(checker) == (set() if waits else {"read after write"})


def test_collectives_of_lanes_run_on_their_streams():
    with rehearse(2, "free"), watching() as checker:
        lane, group = Lane("side", CPU), dist.group.WORLD
        mine, all_of_it = torch.zeros(4), torch.zeros(8)
        lane.all_gather(group, [all_of_it], [mine], after=(lane.mark(),))
        read(mine)
        assert not checker.races
        write(mine)
        read(all_of_it)
        assert [(race.kind, race.first.stream.name) for race in checker.races] == [
            ("write after read", "side"),
            ("read after write", "side"),
        ]


# Everything is as before


PLACES = [
    *((_torch, name) for name in ("Event", "current_stream", "set_stream", "memory")),
    *((torch.Tensor, "tolist"), (torch.UntypedStorage, "resize_")),
    *((lanes.Lane, "__init__"), (pools, "_Slot"), (pools.Pool, "temporary"), (pools.Pool, "allocate")),
    *((RehearsalGroup, "_launch"), (CpuWork, "wait")),
]


def test_nothing_is_left_behind():
    before = [(getattr(*place), place[1] in vars(place[0])) for place in PLACES]

    def fail() -> None:
        with watching():
            assert Lane("side", CPU).stream is not None
            assert not any(getattr(*place) is was for place, (was, _) in zip(PLACES, before))
            raise KeyError("within")

    with pytest.raises(KeyError, match="within"):
        fail()
    assert [(getattr(*place), place[1] in vars(place[0])) for place in PLACES] == before
    assert Lane("side", CPU).stream is None


# Training with something left out


def train_in_bf16() -> None:
    train(sharded(mp_policy=TO_BF16), steps=2)


def is_on_a_lane() -> bool:
    return _torch.current_stream(0).name != "compute"


def waiting_where(condition: Callable[[], bool]) -> Callable[..., None]:
    wait = Ticket.wait

    def waits(self: Ticket) -> None:
        if condition():
            wait(self)

    return waits


SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    "nobody waits": (Ticket, "wait", lambda self: None),
    "lanes do not wait": (Ticket, "wait", waiting_where(lambda: not is_on_a_lane())),
    "compute does not wait": (Ticket, "wait", waiting_where(is_on_a_lane)),
    "nobody says where it stands": (Lane, "mark", lambda self: Ticket()),
    "lanes begin at once": (Lane, "entered", lambda self, after=(): self.inside),
    "slots are free at once": (Pool, "release", forgetful(Pool.release)),
    "events are of nothing": (Event, "record", lambda self, stream=None: None),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_seen(name):
    with rehearse(4, "free"), watching() as checker, mock.patch.object(*SABOTAGES[name]):
        train_in_bf16()
        assert checker.races


# Every wait of these, left out alone, is missed


def keep_for_the_next_microbatch() -> None:
    model = sharded(mp_policy=TO_BF16, schedule=SchedulePolicy(keep_for_next=1 << 20))
    accumulate(model, as_microbatch(model))


def train_in_bytes() -> None:
    train(sharded(**CHOICES["in bytes"]), steps=2)


def rest_between_axes() -> None:
    model = sharded(**CHOICES["bf16 HSDP"])
    accumulate(model, as_microbatch(model))


Site = tuple[str, ...]
# Waits that change an order which nothing needs: the functions that wait. None is known.
IN_VAIN: set[str] = set()


class Waits:
    """The events that are waited for, by the lines that do; of one line, no wait has an effect."""

    def __init__(self, left_out: Site | None = None) -> None:
        self.seen: dict[Site, None] = {}
        self._left_out = left_out

    @contextmanager
    def watched(self) -> Iterator[None]:
        wait = Event.wait

        def noted(event: Event, stream: Any = None) -> None:
            waiting = stream or event.checker.current
            here = place()
            lines = [line_of(here, number) for number in range(len(here))]
            # Who calls the function that calls the lanes or pools need not be told apart.
            site = (f"{event.stream.name} to {waiting.name}", *[line for line in lines if "flatshard/" in line][:4])
            if waiting.knows(event.clock):
                return
            self.seen[site] = None
            if site != self._left_out:
                wait(event, stream)

        with mock.patch.object(Event, "wait", noted):
            yield


@pytest.mark.parametrize(
    "body",
    [
        train_in_bf16,
        pytest.param(train_in_bytes, marks=pytest.mark.full),
        pytest.param(keep_for_the_next_microbatch, marks=pytest.mark.full),
        pytest.param(rest_between_axes, marks=pytest.mark.full),
    ],
)
def test_every_wait_that_is_left_out_is_seen(body):
    def run(left_out: Site | None) -> tuple[list[Site], bool]:
        waits = Waits(left_out)
        with rehearse(4, "free", rank=1), watching() as checker, waits.watched():
            body()
            return list(waits.seen), bool(checker.races)

    sites, races = run(None)
    assert not races
    assert len(sites) > 7
    unseen = [site for site in sites if not run(site)[1] and not any(name in " ".join(site) for name in IN_VAIN)]
    assert not unseen, f"left out and not seen (or waits that are in vain): {unseen}"
