"""Lanes: ordered queues of communication, and the only callers of collectives.

On CUDA a lane is a stream. Collectives are enqueued on it and a `Ticket` is an event: waiting for one orders the
current stream and never blocks the host. On CPU a lane is the process group's own queue of asynchronous work: a ticket
holds the work, and waiting for it completes it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _recording, _torch
from flatshard.buffer.custom import gather_by, reduce_by
from flatshard.buffer.groups import own_group
from flatshard.buffer.peers import PeerGather, Peers, node_number
from flatshard.trust.alarm import PATIENCE, alarm
from flatshard.trust.record import KINDS, PHASES, Wire, ranges, record

Op: TypeAlias = Literal["sum", "avg", "max"]
_Started: TypeAlias = "tuple[list[Work], Callable[[], None] | None]"

# Backends that cannot average; they sum, and the lane divides.
_WITHOUT_AVG = frozenset({"gloo", "mpi", "ucc"})
# What every backend reduces and moves as it is. Anything else is moved as bytes, and cannot be reduced.
_NATIVE = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
_REDUCTIONS: dict[Op, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum,
    "avg": torch.mean,
    "max": torch.amax,
}
# How many operations a lane remembers for its history.
HISTORY = 256
_CPU = torch.device("cpu")
_used: WeakSet[ProcessGroup] = WeakSet()  # groups of all lanes
# Backends without other ranks.
_IMAGINED = frozenset({"rehearsal", "fake"})
_KINDS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(slots=True)
class Operation:
    """One collective as the history of a lane shows it."""

    number: int
    kind: str
    name: str
    numbytes: int
    ticket: Ticket

    def __str__(self) -> str:
        state = "done" if self.ticket.done() else "pending"
        return f"#{self.number} {self.kind} {self.name or '(unnamed)'} {self.numbytes} bytes: {state}"


class Ticket:
    """The end of an operation. A ticket without event and works is already done."""

    __slots__ = ("__weakref__", "_device", "_epoch", "_event", "_failed", "_then", "_works", "what")

    def __init__(
        self,
        event: Any = None,
        device: int = 0,
        works: Sequence[Work] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        self._event, self._epoch = event, _torch.epochs.now
        self._device = device
        self._works = works
        self._then = then
        self._failed = False
        self.what = ("", "")  # kind and name

    def wait(self) -> None:
        """Order what follows after the operation: the current stream on CUDA, the caller itself on CPU."""
        if self._event is not None and self._epoch == _torch.epochs.now:
            self._event.wait(_torch.current_stream(self._device))
        for work in self._works:
            try:
                work.wait(PATIENCE)
            except RuntimeError as error:
                self._failed = True
                alarm.outwait(work, self._told, error)
                self._failed = False
        self._works = ()
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def synchronize(self) -> None:
        """Hold up the caller until the operation is over, on CUDA too."""
        if self._event is not None and self._epoch == _torch.epochs.now:
            self._event.synchronize()
        self.wait()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Order what follows on another stream after the operation."""
        if self._event is not None and self._epoch == _torch.epochs.now:
            self._event.wait(stream)

    def done(self) -> bool:
        """Whether the operation is over, without waiting."""
        return self._then is None and self.has_ended()

    @property
    def is_on_device(self) -> bool:
        return self._event is not None

    def has_ended(self) -> bool:
        """Whether the communication is over, and did not fail, whatever remains to be done. Any thread may ask."""
        if self._event is not None:
            return self._epoch != _torch.epochs.now or bool(self._event.query())
        return not self._failed and all(work.is_completed() for work in self._works)

    def _told(self) -> str:
        kind, name = self.what
        phase = f", {PHASES[record.phase]}" if record.phase else ""
        return f"{kind} {name or '(unnamed)'} (step {record.step}{phase})"


DONE = Ticket()  # has been waited for, and can be again and again


class _Inside:
    """Makes a lane's stream the current one. One per lane, since entering is on the path of every launch."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.after: Sequence[Ticket] = ()
        self.began: Any = None  # when, in a recording
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
            if _recording.launches is not None:
                self.began = _recording.launches.now(_CPU if self._stream is None else self._stream.device)
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

    ``own_groups=True`` gives the lane process groups of its own. Two lanes that share a group are kept in launch order
    by the group, even though they have two streams; lanes that are to overlap each other need their own.
    ``patience``: its groups are its own, of Gloo, and wait no longer than this.
    """

    def __init__(
        self, name: str, device: torch.device, *, own_groups: bool = False, patience: timedelta | None = None
    ) -> None:
        self.name = name
        self.device = device = torch.empty(0, device=device).device  # with its index
        # Before compute where both want the device: a gather that waits until a large matrix product leaves room is
        # late for all that follows, and takes next to nothing from it.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.history: deque[Operation] = deque(maxlen=HISTORY)
        self.launched = 0
        self.own_groups = own_groups or patience is not None
        self._patience = patience
        self.inside = _Inside(self.stream)
        self._groups: dict[tuple[DeviceMesh, int, bool], ProcessGroup] = {}
        self._backends = _Backends(self.device)
        self._wires = _Wires(name)
        self._peers: dict[ProcessGroup, Peers] = {}

    def group(self, mesh: DeviceMesh, axis: int) -> ProcessGroup:
        """The process group in which this lane communicates along one axis of a mesh.

        With ``own_groups``, the first call for an axis makes the group and is collective among its ranks. All lanes of
        one name share it: models come and go, communicators stay.
        """
        key = (mesh, axis, self.own_groups)
        if key not in self._groups:
            made = mesh.get_group(axis)
            if self.own_groups and made.size() > 1:
                made = own_group(made, f"flatshard_{self.name}", self._patience)
            assert isinstance(made, ProcessGroup)
            self._groups[key] = made
            _used.add(made)
        return self._groups[key]

    def use(self, mesh: DeviceMesh, axis: int, group: ProcessGroup) -> None:
        """Communicate along an axis over a process group that somebody has made, of the same ranks."""
        ranks, given = (sorted(dist.get_process_group_ranks(each)) for each in (mesh.get_group(axis), group))
        if ranks != given:
            raise ValueError(f"the process group has ranks {given}; axis {axis} of the mesh has {ranks}")
        self._groups[mesh, axis, self.own_groups] = group

    def entered(self, after: Sequence[Ticket] = ()) -> _Inside:
        """A context in which device work goes in this lane's order, after the given tickets. Can be nested."""
        self.inside.after = after
        return self.inside

    def mark(self) -> Ticket:
        """A ticket for all that has been enqueued on the current stream. On CPU that work is done already."""
        if self.stream is None:
            return DONE
        event = _torch.Event()
        index = self.stream.device_index
        event.record(_torch.current_stream(index))
        return Ticket(event, index)

    def join(self) -> None:
        """Order the current stream after all that this lane has been given."""
        if self.stream is not None:
            with self.entered():
                ticket = self.mark()
            ticket.wait()

    def ticket(self, event: Any) -> Ticket:
        """A ticket for what a CUDA event was recorded after. On CPU there is nothing to wait for."""
        return Ticket() if self.stream is None else Ticket(event, self.stream.device_index)

    def follow(self, ticket: Ticket, action: Callable[[], None]) -> Ticket:
        """A ticket for ``action`` done after ``ticket``: on the lane's stream, or on CPU when it is waited for."""
        if self.stream is None:

            def in_order() -> None:
                ticket.wait()
                action()

            return Ticket(then=in_order)
        with self.entered((ticket,)):
            action()
            return self.mark()

    def all_gather(
        self,
        group: ProcessGroup,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        after: Sequence[Ticket] = (),
        name: str = "",
        comm: Any = None,
    ) -> Ticket:
        """Concatenate each input over the ranks into its output. An input may be this rank's piece of its output.

        With ``comm``, an ``AllGather`` of torch's, that is what communicates, in one call.
        """
        with self.entered(after):
            if comm is None:
                return Gather(self, group, outputs, inputs).launch(name)
            works, unpack = gather_by(comm, group, outputs, inputs, self.stream is None)
            return self._finish(group, "all_gather", name, _nbytes(outputs), works, unpack)

    def reduce_scatter(
        self,
        group: ProcessGroup,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        after: Sequence[Ticket] = (),
        then: Callable[[], None] | None = None,
        name: str = "",
        comm: Any = None,
    ) -> Ticket:
        """Reduce each input over the ranks and give each rank its piece. Outputs must not lie in the inputs.

        The ticket is for ``then``, which is done to the outputs when they are there. With ``comm``, a ``ReduceScatter``
        of torch's, that is what communicates, in one call.
        """
        _require_native(inputs, "reduce_scatter")
        op, rest = self._lowered(group, op, outputs)
        if rest is not None:
            then = _one_after_other(rest, then)
        if comm is not None:
            with self.entered(after):
                works, unpack = reduce_by(comm, group, outputs, inputs, op, self.stream is None)
                after_all = _one_after_other(unpack, then)
                return self._finish(group, "reduce_scatter", name, _nbytes(inputs), works, after_all)
        if self.inside.depth and not after:
            return self._reduce_scatter(group, outputs, inputs, op, then, name)
        with self.entered(after):
            return self._reduce_scatter(group, outputs, inputs, op, then, name)

    def _reduce_scatter(
        self,
        group: ProcessGroup,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: Op,
        then: Callable[[], None] | None,
        name: str,
    ) -> Ticket:
        """Inside the lane, by an operation that the backend knows."""
        options = _torch.REDUCE_SCATTER[op]
        if group.size() == 1 or not inputs:
            works = _copied(outputs, inputs)
        elif group in self._peers:
            self._peers[group].reduce(outputs, inputs, _REDUCTIONS[op])
            works = []
        elif self._backends[group] != "gloo":
            works = [_torch.reduce_scatter_coalesced(group, list(outputs), list(inputs), options)]
        elif self.stream is None:
            works, reduce = _exchange_pieces(group, outputs, inputs, op)
            then = _one_after_other(reduce, then)
        else:
            works = [_torch.reduce_scatter_one(group, out, inp, options) for out, inp in zip(outputs, inputs)]
        return self._finish(group, "reduce_scatter", name, _nbytes(inputs), works, then)

    def all_reduce(
        self,
        group: ProcessGroup,
        tensors: Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        after: Sequence[Ticket] = (),
        name: str = "",
    ) -> Ticket:
        """Reduce each tensor over the ranks, in place."""
        _require_native(tensors, "all_reduce")
        op, then = self._lowered(group, op, tensors)
        options = _torch.ALL_REDUCE[op]
        with self.entered(after):
            works = [group.allreduce([tensor], options) for tensor in tensors] if group.size() > 1 else []
            return self._finish(group, "all_reduce", name, _nbytes(tensors), works, then)

    def greet(self, groups: Sequence[ProcessGroup]) -> None:
        """Communicate once in each group, also in one of this rank alone: NCCL makes communicators at first use."""
        with self.entered():
            for group in groups:
                _join(group.allreduce([torch.zeros(1, device=self.device)], _torch.ALL_REDUCE["sum"]))

    def see_peers(self, groups: Sequence[ProcessGroup]) -> bool:
        """Gather and reduce by copies from now on in groups whose ranks are all on one node; whether there are any.

        Collective in each of them. In a group of one rank nothing is communicated.
        """
        assert self.stream is not None
        others = [group for group in groups if group.size() > 1]
        for group in others:
            if self._backends[group] not in _IMAGINED:
                number = torch.tensor([node_number()], device=self.device)
                numbers = number.new_empty(group.size())
                self.all_gather(group, [numbers], [number], after=(self.mark(),), name="nodes").wait()
                if len(set(numbers.tolist())) == 1:
                    self._peers[group] = Peers(group, self.stream)
        return bool(self._peers) or not others

    def all_to_all(
        self,
        group: ProcessGroup,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        after: Sequence[Ticket] = (),
        name: str = "",
    ) -> Ticket:
        """Send split ``r`` of the input to rank ``r``; splits are counted in elements, and equal if none are given."""
        (out,), (inp,) = _as_bytes([output]), _as_bytes([input])
        scale = output.element_size() if out.dtype != output.dtype else 1
        sizes = [scale * n for n in output_splits], [scale * n for n in input_splits]
        with self.entered(after):
            if group.size() == 1:
                works = _copied([out], [inp])
            elif self.stream is not None and self._backends[group] == "gloo":  # which reads CUDA memory as the host's
                back = torch.empty(out.shape, dtype=out.dtype)
                _torch.all_to_all_one(group, back, inp.cpu(), *sizes, _torch.ALL_TO_ALL).wait()
                works = _copied([out], [back])
            else:
                works = [_torch.all_to_all_one(group, out, inp, *sizes, _torch.ALL_TO_ALL)]
            return self._finish(group, "all_to_all", name, input.nbytes, works)

    @property
    def rank(self) -> int:
        """Of this process among all."""
        return dist.get_rank()

    def most(self, meshes: Sequence[DeviceMesh], numbers: Sequence[int], about: str) -> list[int]:
        """The highest of the ranks' numbers, in every place, over all ranks of these meshes, on each of them.

        Waits. It takes part in one collective per axis whatever the numbers are, and leaves no trace in the history.
        ``about``: for whoever waits for it in vain.
        """
        with self.entered():
            values = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
            for mesh in [*meshes, *meshes[:-1]]:  # what the later ones found out, the earlier ones learn
                for axis in range(mesh.ndim):
                    group = self.group(mesh, axis)
                    if group.size() > 1:
                        work = _torch.backend_of(group, self.device).allreduce([values], _torch.ALL_REDUCE["max"])
                        if self.stream is None:
                            ticket = Ticket(works=[work])
                            ticket.what = "the other ranks,", about
                            ticket.wait()
                        else:
                            _join(work)
            found: list[int] = values.tolist()
        return found

    def extremes(self, meshes: Sequence[DeviceMesh], number: int, about: str = "a number") -> tuple[int, int]:
        """The lowest and the highest of the ranks' numbers."""
        lowest, highest = self.most(meshes, [-number, number], about)
        return -lowest, highest

    def backend(self, mesh: DeviceMesh, axis: int) -> str:
        """The name of what this lane communicates by along an axis."""
        return self._backends[self.group(mesh, axis)]

    def _lowered(
        self, group: ProcessGroup, op: Op, outputs: Sequence[torch.Tensor]
    ) -> tuple[Op, Callable[[], None] | None]:
        """The operation that the backend knows, and what remains to be done to the outputs."""
        if op != "avg" or self._backends[group] not in _WITHOUT_AVG:
            return op, None
        return "sum", lambda: torch._foreach_div_(list(outputs), group.size())

    def _finish(
        self,
        group: ProcessGroup,
        kind: str,
        name: str,
        numbytes: int,
        works: Sequence[Work],
        then: Callable[[], None] | None = None,
    ) -> Ticket:
        if self.stream is None:
            ticket = Ticket(works=works, then=then)
        else:
            for work in works:
                _join(work)
            if then is not None:
                then()
            ticket = self.mark()
        ticket.what = kind, name
        self.launched += 1
        if _recording.launches is not None:
            began = self.inside.began
            _recording.launches.launched(self.name, kind, name, numbytes, began, works, self.device)
        record.append(self._wires[group], _KINDS[kind], name, numbytes, ticket)
        self.history.append(Operation(self.launched, kind, name, numbytes, ticket))
        return ticket


def watch_over(device: torch.device) -> bool:
    """Whether there are other ranks. If so, be told from now on what ends them, and tell them what ends this one."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or group.size() == 1 or _torch.backend_name(group, device) in _IMAGINED:
        return False
    store = _torch.default_store()
    alarm.start(store, _torch.store_within(store, "flatshard"), dist.get_rank(), group.size(), _abort)
    return True


def _abort() -> None:
    """Another rank will not come: let go of GPUs that wait for it. Over Gloo those who wait look up by themselves."""
    for group in list(_used):
        _torch.abort_nccl(group)


class _Backends(dict[ProcessGroup, str]):
    """The names of what serves tensors of a device in process groups."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, group: ProcessGroup) -> str:
        self[group] = name = _torch.backend_name(group, self._device)
        return name


class _Wires(dict[ProcessGroup, Wire]):
    """A lane's process groups as the flight record knows them: by the lane and the ranks."""

    def __init__(self, lane: str) -> None:
        super().__init__()
        self._lane = lane

    def __missing__(self, group: ProcessGroup) -> Wire:
        self[group] = wire = record.wire(f"{self._lane} {ranges(dist.get_process_group_ranks(group))}")
        return wire


class Gather:
    """An all-gather that can be launched again and again: what is the same every time is looked up once."""

    __slots__ = ("_call", "_group", "_lane", "_numbytes")

    _call: Callable[[], _Started]

    def __init__(
        self, lane: Lane, group: ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._lane, self._group = lane, group
        self._numbytes = _nbytes(outputs)
        outputs, inputs = list(_as_bytes(outputs)), list(_as_bytes(inputs))
        if group.size() == 1:
            call = _gather_alone
        elif group in lane._peers:
            self._call = functools.partial(_gather_by_copies, lane._peers[group].gather(outputs, inputs))
            return
        elif lane._backends[group] != "gloo":
            call = _gather_coalesced
        elif lane.stream is None and len(inputs) > 1:
            call = _gather_packed
        else:
            call = _gather_one_by_one
        self._call = functools.partial(call, group, outputs, inputs)

    def launch(self, name: str) -> Ticket:
        """Inside `Lane.entered`."""
        works, then = self._call()
        return self._lane._finish(self._group, "all_gather", name, self._numbytes, works, then)


def _join(work: Work | None) -> None:
    """Let the current stream wait for what was launched in it. NCCL, which ran in it itself, gives None."""
    if work is not None:
        work.wait()


# The ways to gather a list: what to wait for, and what to do then.


def _gather_alone(group: ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Started:
    return _copied(outputs, inputs), None


def _gather_by_copies(gather: PeerGather) -> _Started:
    gather()
    return [], None


def _gather_coalesced(group: ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Started:
    return [_torch.all_gather_coalesced(group, outputs, inputs, _torch.ALL_GATHER)], None


def _gather_one_by_one(group: ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Started:
    return [_torch.all_gather_one(group, out, inp, _torch.ALL_GATHER) for out, inp in zip(outputs, inputs)], None


def _gather_packed(group: ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Started:
    return gather_by(_OneCall(), group, outputs, inputs, asynchronous=True)


class _OneCall:
    """Packs a list for Gloo, as fast as Gloo's own list form, which must not be used.

    After each operation Gloo's two threads write its name into one string without a lock. A name of more than 15 bytes,
    as that of the list form, is on the heap, and is freed twice once in thousands of operations (seen with torch 2.13).
    """

    allocate = staticmethod(torch.empty)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool
    ) -> Work:
        return _torch.all_gather_one(group, output_tensor, input_tensor, _torch.ALL_GATHER)


def _exchange_pieces(
    group: ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Op
) -> tuple[list[Work], Callable[[], None]]:
    """A reduce-scatter for Gloo, whose own is an all-reduce per tensor: twice the bytes, and many times the messages.

    Each rank sends the others their pieces and reduces what it is sent, always in the order of ranks.
    """
    sizes, world = [tensor.numel() for tensor in outputs], group.size()
    sent = inputs[0]
    if len(inputs) > 1:
        sent = inputs[0].new_empty(world, sum(sizes))
        places = list(sent.split(sizes, dim=1))
        torch._foreach_copy_(places, [tensor.view(world, size) for tensor, size in zip(inputs, sizes)])
    received = torch.empty_like(sent)
    work = _torch.all_to_all_one(group, received.view(-1), sent.view(-1), [], [], _torch.ALL_TO_ALL)

    def reduce() -> None:
        mine = _REDUCTIONS[op](received.view(world, -1), 0)
        torch._foreach_copy_(list(outputs), list(mine.split(sizes)))

    return [work], reduce


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


class Exchange:
    """Short messages among all ranks, over a group of its own, so that a second thread can use it.

    Making one is a collective call. Without torch.distributed there is one rank.
    """

    def __init__(self, name: str) -> None:
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self.rank = dist.get_rank() if self._world is not None else 0
        self.size = dist.get_world_size() if self._world is not None else 1
        self._group = _torch.new_gloo_group(f"flatshard_{name}") if self.size > 1 else None

    @property
    def is_current(self) -> bool:
        """Whether the process group that it was made in is still the default one."""
        return self._world is (dist.group.WORLD if dist.is_initialized() else None)

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order, on each of them."""
        if self._group is None:
            return [message]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(message.ljust(longest, b" ") or b" "), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self._group)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(found, sizes)]


def from_first(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """The tensors as the first rank of a mesh has them, in the places of these. All its ranks call it."""
    found = [tensor.contiguous() for tensor in tensors]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        for tensor in found if group.size() > 1 else ():
            (whole,) = _as_bytes([tensor]) if tensor.dim() else [tensor]
            dist.broadcast(whole, group=group, group_src=0)
    return found


def spread(group: ProcessGroup, tensor: torch.Tensor) -> Work:
    """Begin to send a tensor of a group's rank 0 to all of its ranks, which give the place for it."""
    work: Work = group.broadcast(tensor, root=0)
    return work


def _one_after_other(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    def both() -> None:
        first()
        if second is not None:
            second()

    return both


def _copied(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Work]:
    """What a collective of one rank does."""
    apart = [(out, inp) for out, inp in zip(outputs, inputs) if out.data_ptr() != inp.data_ptr()]
    if apart:
        torch._foreach_copy_([out for out, _ in apart], [inp for _, inp in apart])
    return []


def _as_bytes(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors of one call, which share a dtype, as the backend can move them."""
    if not tensors or tensors[0].dtype in _NATIVE:
        return tensors
    return [tensor.view(torch.uint8) for tensor in tensors]


def _require_native(tensors: Sequence[torch.Tensor], kind: str) -> None:
    if tensors and tensors[0].dtype not in _NATIVE:
        raise TypeError(f"{kind} of {tensors[0].dtype}: no backend can add it; cast to float32 or bfloat16 first")
