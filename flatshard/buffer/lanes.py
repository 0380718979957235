"""Lanes: ordered queues of collectives. Training launches its collectives through lanes only.

On CUDA a lane is a stream, on CPU the process group's queue of asynchronous work. A launch returns a `Ticket`.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _recording, _torch
from flatshard.buffer import collectives
from flatshard.buffer.collectives import CoalescedGather, Gather, Op, Tensors, nbytes
from flatshard.buffer.groups import WITHOUT_PEERS, own_group
from flatshard.buffer.tickets import DONE, Action, Ticket, Tickets
from flatshard.trust.alarm import Watched, alarm
from flatshard.trust.loop import CALL_LIMIT
from flatshard.trust.record import KINDS, GroupRecord, ranges, record

# Backends that cannot average; they sum, and the lane divides.
_WITHOUT_AVG = frozenset({"gloo", "mpi", "ucc"})
HISTORY = 256  # operations in the history of a lane
_CPU = torch.device("cpu")
_IN_THREADS = "threaded"  # torch's backend for tests, whose ranks are threads of one process
_KINDS = {kind: number for number, kind in enumerate(KINDS)}


class _Inside:
    """Makes a lane's stream the current one. One object per lane, because every launch enters it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.after: Tickets = ()
        self.began: Any = None  # the moment, in a recording
        self._stream = stream
        self._outer: torch.cuda.Stream | None = None
        self.depth = 0

    def __enter__(self) -> None:
        if self._stream is not None and self.depth == 0:
            self._outer = _torch.current_stream(self._stream.device_index)
            _torch.set_stream(self._stream)
        self.depth += 1
        after, self.after = self.after, ()
        try:
            for ticket in after:
                ticket.wait()
            recording = _recording.active
            if recording is not None and not recording.only_waits:
                self.began = recording.now(_CPU if self._stream is None else self._stream.device)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self._outer is not None and self.depth == 0:
            _torch.set_stream(self._outer)
            self._outer = None


class Lane:
    """An ordered queue of collectives on one device.

    ``own_groups=True`` gives the lane separate process groups. Collectives of one process group run in launch order,
    even on two lanes; lanes whose collectives must overlap need separate groups. ``patience``: the lane has separate
    Gloo groups with this timeout.
    """

    def __init__(
        self, name: str, device: torch.device, *, own_groups: bool = False, patience: timedelta | None = None
    ) -> None:
        self.name = name
        self.device = device = torch.empty(0, device=device).device  # with its index
        # High priority: a gather that waits until a large matrix product leaves room delays all that follows, and
        # takes almost nothing from the product.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.history: deque[Ticket] = deque(maxlen=HISTORY)
        self.launched = 0
        self.own_groups = own_groups or patience is not None
        # With `own_groups`: the axes of meshes along which other lanes communicate too. None: all may be.
        self.shared_axes: frozenset[tuple[DeviceMesh, int]] | None = None
        self._patience = patience
        self.inside = _Inside(self.stream)
        self.coalescing: CoalescedGather | None = None  # while it defers gathers
        self._groups: dict[tuple[DeviceMesh, int, bool], ProcessGroup] = {}
        self.size_of: Callable[[ProcessGroup], int] = functools.cache(lambda group: group.size())
        # The name of the backend in a group for tensors of this device; and the entry of a group in the flight record.
        self.backend_in = functools.cache(lambda group: _torch.backend_name(group, device))
        self._group_record = functools.cache(lambda group: _group_record(name, group))
        self.peers: dict[ProcessGroup, collectives.Peers] = {}  # groups whose ranks access each other's memory

    def group(self, mesh: DeviceMesh, axis: int) -> ProcessGroup:
        """The process group in which this lane communicates along one axis of a mesh.

        With ``own_groups``, the first call for an axis creates the group and is collective among its ranks. All lanes
        of one name share it.
        """
        own = self.own_groups and (self.shared_axes is None or (mesh, axis) in self.shared_axes)
        key = (mesh, axis, own)
        if key not in self._groups:
            made = mesh.get_group(axis)
            if own and made.size() > 1:
                backend = None if self._patience is None else "gloo"
                made = own_group(made, f"flatshard_{self.name}", self._patience, backend, user=self)
            assert isinstance(made, ProcessGroup)
            self._groups[key] = made
        return self._groups[key]

    def use(self, mesh: DeviceMesh, axis: int, group: ProcessGroup) -> None:
        """Use an existing process group of the same ranks along an axis."""
        ranks, given = (sorted(dist.get_process_group_ranks(each)) for each in (mesh.get_group(axis), group))
        if ranks != given:
            raise ValueError(f"the process group has ranks {given}; axis {axis} of the mesh has {ranks}")
        for own in (False, True):
            self._groups[mesh, axis, own] = group

    def entered(self, after: Tickets = ()) -> _Inside:
        """A context in which device work is in the order of this lane, after the given tickets. Can be nested."""
        self.inside.after = after
        return self.inside

    def after_current_stream(self) -> _Inside:
        """The same, after all work that has been enqueued on the current stream."""
        if self.stream is not None:
            self.inside.after = (self.mark(),)
        return self.inside

    def mark(self) -> Ticket:
        """A ticket for all work that has been enqueued on the current stream. On CPU that work is already done."""
        if self.stream is None:
            return DONE
        event = _torch.Event()
        index = self.stream.device_index
        event.record(_torch.current_stream(index))
        return Ticket(event, index)

    def join(self) -> None:
        """Order the current stream after all work of this lane."""
        if self.stream is not None:
            with self.entered():
                ticket = self.mark()
            ticket.wait()

    def ticket(self, event: Any) -> Ticket:
        """A ticket for the work before a recorded CUDA event. On CPU there is nothing to wait for."""
        return Ticket() if self.stream is None else Ticket(event, self.stream.device_index)

    def follow(self, ticket: Ticket, action: Callable[[], None]) -> Ticket:
        """A ticket for ``action`` done after ``ticket``: on the lane's stream, or on CPU when it is waited for."""
        if self.stream is None:

            def in_order() -> None:
                ticket.wait()
                action()

            return Ticket(then=in_order)
        if self.coalescing is not None and self.coalescing.follow(ticket, action):
            return ticket
        with self.entered((ticket,)):
            action()
            return self.mark()

    def all_gather(
        self,
        group: ProcessGroup,
        outputs: Tensors,
        inputs: Tensors,
        *,
        after: Tickets = (),
        name: str = "",
        comm: Any = None,
    ) -> Ticket:
        """Concatenate each input over the ranks into its output. An input may be this rank's piece of its output.

        With ``comm``, an ``AllGather`` of torch's protocol, that object communicates, in one call.
        """
        with self.entered(after):
            if comm is None:
                return Gather(self, group, outputs, inputs).launch(name)
            works, unpack = collectives.gather_by(comm, group, outputs, inputs, self.stream is None)
            return self.record_launch(group, "all_gather", name, sum(map(nbytes, outputs)), works, unpack)

    def reduce_scatter(
        self,
        group: ProcessGroup,
        outputs: Tensors,
        inputs: Tensors,
        op: Op = "sum",
        *,
        after: Tickets = (),
        then: Action = None,
        name: str = "",
        comm: Any = None,
    ) -> Ticket:
        """Reduce each input over the ranks and give each rank its piece. Outputs must not overlap inputs.

        The ticket includes ``then``, which is called on the complete outputs. With ``comm``, a ``ReduceScatter`` of
        torch's protocol, that object communicates, in one call.
        """
        if after or not self.inside.depth:
            with self.entered(after):
                return self.reduce_scatter(group, outputs, inputs, op, then=then, name=name, comm=comm)
        collectives.require_native(inputs, "reduce_scatter")
        backend = self.backend_in(group)
        if op == "avg" and backend in _WITHOUT_AVG:
            op, then = "sum", collectives.one_after_other(_divide_by(group, outputs), then)
        options = _torch.REDUCE_SCATTER[op]
        if comm is not None:
            works, unpack = collectives.reduce_by(comm, group, outputs, inputs, op, self.stream is None)
            then = collectives.one_after_other(unpack, then)
        elif self.size_of(group) == 1 or not inputs:
            works = collectives.copy_locally(outputs, inputs)
        elif group in self.peers:
            self.peers[group].reduce(outputs, inputs, collectives.REDUCTIONS[op])
            works = []
        elif backend != "gloo":
            works = [_torch.reduce_scatter_coalesced(group, list(outputs), list(inputs), options)]
        elif self.stream is None:
            works, reduce = collectives.exchange_pieces(group, outputs, inputs, op)
            then = collectives.one_after_other(reduce, then)
        else:
            works = [_torch.reduce_scatter_one(group, out, inp, options) for out, inp in zip(outputs, inputs)]
        return self.record_launch(group, "reduce_scatter", name, sum(map(nbytes, inputs)), works, then)

    def all_reduce(
        self, group: ProcessGroup, tensors: Tensors, op: Op = "sum", *, after: Tickets = (), name: str = ""
    ) -> Ticket:
        """Reduce each tensor over the ranks, in place."""
        collectives.require_native(tensors, "all_reduce")
        then = None
        if op == "avg" and self.backend_in(group) in _WITHOUT_AVG:
            op, then = "sum", _divide_by(group, tensors)
        options = _torch.ALL_REDUCE[op]
        with self.entered(after):
            works = [group.allreduce([tensor], options) for tensor in tensors] if group.size() > 1 else []
            return self.record_launch(group, "all_reduce", name, sum(map(nbytes, tensors)), works, then)

    def init_communicators(self, groups: Sequence[ProcessGroup]) -> None:
        """Run one collective in each group, also in groups of one rank: NCCL creates communicators at first use."""
        with self.entered():
            for group in groups:
                collectives.join(group.allreduce([torch.zeros(1, device=self.device)], _torch.ALL_REDUCE["sum"]))

    def all_to_all(
        self,
        group: ProcessGroup,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        after: Tickets = (),
        name: str = "",
    ) -> Ticket:
        """Send split ``r`` of the input to rank ``r``; splits are counted in elements, and equal if none are given."""
        (out,), (inp,) = collectives.as_bytes([output]), collectives.as_bytes([input])
        scale = output.element_size() if out.dtype != output.dtype else 1
        sizes = [scale * n for n in output_splits], [scale * n for n in input_splits]
        with self.entered(after):
            if group.size() == 1:
                works = collectives.copy_locally([out], [inp])
            elif self.stream is not None and self.backend_in(group) == "gloo":  # which reads CUDA memory as the host's
                back = torch.empty(out.shape, dtype=out.dtype)
                _torch.all_to_all_one(group, back, inp.cpu(), *sizes, _torch.ALL_TO_ALL).wait()
                works = collectives.copy_locally([out], [back])
            else:
                works = [_torch.all_to_all_one(group, out, inp, *sizes, _torch.ALL_TO_ALL)]
            return self.record_launch(group, "all_to_all", name, input.nbytes, works)

    def max_over_ranks(self, meshes: Sequence[DeviceMesh], numbers: Sequence[int], about: str) -> list[int]:
        """The elementwise maximum of the ranks' numbers over all ranks of these meshes, on each of them.

        Blocks. It runs the same collectives per axis whatever the numbers are, and does not count as a launch.
        ``about``: for errors while it waits.
        """
        with self.entered():
            values = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
            for mesh in [*meshes, *meshes[:-1]]:  # again, so that ranks of earlier meshes learn of the later ones
                for axis in range(mesh.ndim):
                    group = self.group(mesh, axis)
                    if group.size() > 1:
                        work = _torch.backend_of(group, self.device).allreduce([values], _torch.ALL_REDUCE["max"])
                        if self.stream is not None:
                            collectives.join(work)
                        ticket = Ticket(works=[work]) if self.stream is None else self.mark()
                        ticket.kind, ticket.name = "the other ranks,", about
                        record.append(self._group_record(group), _KINDS["all_reduce"], about, values.nbytes, ticket)
                        ticket.wait()
            found: list[int] = values.tolist()
        return found

    def record_launch(
        self, group: ProcessGroup, kind: str, name: str, numbytes: int, works: Sequence[Work], then: Action = None
    ) -> Ticket:
        """The ticket of a collective that has just been launched, and records of the launch."""
        if self.stream is None:
            ticket = Ticket(works=works, then=then)
        else:
            for work in works:
                collectives.join(work)
            if then is not None:
                then()
            ticket = self.mark()
        self.launched += 1
        ticket.number, ticket.kind, ticket.name, ticket.numbytes = self.launched, kind, name, numbytes
        recording = _recording.active
        if recording is not None and not recording.only_waits:
            recording.launched(self.name, kind, name, numbytes, self.inside.began, works, self.device)
        record.append(self._group_record(group), _KINDS[kind], name, numbytes, ticket)
        if alarm.verdict.is_failure and self.stream is not None:  # on the CPU, the wait for it raises
            raise alarm.verdict.error(f"{kind} {name or '(unnamed)'}, launched just now (step {record.step})")
        self.history.append(ticket)
        return ticket


def _divide_by(group: ProcessGroup, outputs: Tensors) -> Callable[[], None]:
    """The remaining divisor of an average if the backend can only sum."""
    return lambda: torch._foreach_div_(list(outputs), group.size())


def _group_record(lane: str, group: ProcessGroup) -> GroupRecord:
    """The entry of a lane's process group in the flight record."""
    return record.group(f"{lane} {ranges(dist.get_process_group_ranks(group))}", _torch.limit_of(group).total_seconds())


def record_replay(lane: Lane, name: str, ranks: Sequence[int]) -> None:
    """Record a replay, on the current stream, of a graph with collectives of these ranks."""
    world = dist.group.WORLD
    assert world is not None
    replays = record.group(f"replay {ranges(ranks)}", _torch.limit_of(world).total_seconds())
    record.append(replays, _KINDS["replay"], name, 0, lane.mark())


def watch_over(device: torch.device) -> bool:
    """Whether there are other ranks. If so, start the alarm among them."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or _torch.backend_name(world, device) in WITHOUT_PEERS:
        return False
    if _torch.backend_name(world, device) == _IN_THREADS:
        return True  # a process has one alarm and one flight record, which its ranks cannot share
    store = _torch.default_store()
    watched = Watched(
        store=functools.partial(_own_store, weakref.ref(store)),
        kept=_kept_store(store) if dist.get_rank() == 0 else None,
        rank=dist.get_rank(),
        world=world.size(),
        is_lost_peer=_torch.lost_a_peer,
        settle_in=_torch.allow_events_amid_captures,
        place=_place_of(store),
    )
    alarm.start(store, watched)
    return True


def _own_store(known: weakref.ref[Any], prefix: str) -> Any:
    """A store with a separate connection: waiting for a key blocks all other requests of a connection."""
    store = known()
    if store is None:
        raise RuntimeError("the process group was destroyed; call torch.distributed.init_process_group() again")
    own = store.clone()
    if _without_prefixes(own) is not _without_prefixes(store):  # a HashStore is its own clone
        own.set_timeout(timedelta(seconds=CALL_LIMIT))
    return _torch.PrefixStore(prefix, own)


def _kept_store(store: Any) -> Any:
    """The object that keeps the store's server alive, if that is in this process; None if torchrun has it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        return None
    store = _without_prefixes(store)
    return store if isinstance(store, _torch.TCPStore) else None


def _place_of(store: Any) -> str:
    """The address or the path of a store; empty for one that is in this process only."""
    store = _without_prefixes(store)
    if isinstance(store, _torch.TCPStore):
        return f"{store.host}-{store.port}"
    return str(getattr(store, "path", ""))


def _without_prefixes(store: Any) -> Any:
    while isinstance(store, _torch.PrefixStore):
        store = store.underlying_store
    return store
