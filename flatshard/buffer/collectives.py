"""All-gathers and reduce-scatters of lists of tensors on each backend; lanes call these functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from flatshard import _torch
from flatshard.buffer.tickets import DONE, Action, Pending, Ticket, Tickets

Op: TypeAlias = Literal["sum", "avg", "max"]
Tensors: TypeAlias = Sequence[torch.Tensor]
Reduction: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]  # over a dim
_Started: TypeAlias = tuple[list[Work], Action]

nbytes: Callable[[torch.Tensor], int] = operator.attrgetter("nbytes")
# The dtypes that every backend supports. Tensors of other dtypes are gathered as bytes, and cannot be reduced.
_NATIVE = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
REDUCTIONS: dict[Op, Reduction] = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax}


class Peers(Protocol):
    """Ranks of a group that can access each other's memory (`flatshard.experimental.peers`)."""

    def gather(self, outputs: Tensors, inputs: Tensors) -> Callable[[], None]:
        """An all-gather that can be launched many times, on the current stream."""

    def reduce(self, outputs: Tensors, inputs: Tensors, reduction: Reduction) -> None:
        """A reduce-scatter, on the current stream."""


class LaneProtocol(Protocol):
    """The members of `Lane` that a gather uses."""

    stream: torch.cuda.Stream | None
    coalescing: CoalescedGather | None
    peers: dict[ProcessGroup, Peers]

    @property
    def backend_in(self) -> Callable[[ProcessGroup], str]: ...

    def entered(self, after: Tickets = ()) -> Any: ...

    def mark(self) -> Ticket: ...

    def record_launch(
        self, group: ProcessGroup, kind: str, name: str, numbytes: int, works: Sequence[Work], then: Action = None
    ) -> Ticket: ...


class Gather:
    """An all-gather that can be launched many times: what does not change is computed once."""

    __slots__ = ("_call", "_lane", "_merged", "_native", "_numbytes", "_tensors", "group", "is_kept")

    _call: Callable[[], _Started]

    def __init__(
        self, lane: LaneProtocol, group: ProcessGroup, outputs: Tensors, inputs: Tensors, is_kept: bool = False
    ) -> None:
        """``is_kept``: it will be launched again, so its tensors are kept alive anyway."""
        self._lane, self.group, self.is_kept = lane, group, is_kept
        self._merged: tuple[Sequence[Gather], Gather] | None = None  # the last result of `merged`, and with which
        self._numbytes = sum(map(nbytes, outputs))
        self._tensors = outputs, inputs
        outputs, inputs = list(as_bytes(outputs)), list(as_bytes(inputs))
        self._native = None  # the arguments of a backend that takes lists; otherwise `_call` launches
        if group.size() == 1:
            self._call = lambda: (copy_locally(outputs, inputs), None)
        elif group in lane.peers:
            gather = lane.peers[group].gather(outputs, inputs)
            self._call = lambda: ([], gather())
        elif lane.backend_in(group) != "gloo":
            self._native = group, outputs, inputs, _torch.ALL_GATHER
        elif lane.stream is None and len(inputs) > 1:
            self._call = lambda: gather_by(_OneTensor(), group, outputs, inputs, asynchronous=True)
        else:
            pairs = list(zip(outputs, inputs))
            self._call = lambda: ([_torch.all_gather_one(group, *pair, _torch.ALL_GATHER) for pair in pairs], None)

    def launch(self, name: str) -> Ticket:
        """Called inside `Lane.entered`. In a `CoalescedGather` it is deferred."""
        coalescing = self._lane.coalescing
        return self.launch_now(name) if coalescing is None else coalescing.add(self, name)

    def launch_now(self, name: str) -> Ticket:
        """Called inside `Lane.entered`."""
        if self._native is not None:
            works, then = [_torch.all_gather_coalesced(*self._native)], None
        else:
            works, then = self._call()
        return self._lane.record_launch(self.group, "all_gather", name, self._numbytes, works, then)

    def merged(self, others: Sequence[Gather]) -> Gather:
        """One gather for this one and others of the same process group."""
        if not others:
            return self
        if self._merged is not None and self._merged[0] == others:
            return self._merged[1]
        outputs, inputs = ([tensor for each in (self, *others) for tensor in each._tensors[side]] for side in (0, 1))
        made = Gather(self._lane, self.group, outputs, inputs)
        if self.is_kept and all(other.is_kept for other in others):
            self._merged = others, made
        return made


class CoalescedGather:
    """Within it, all-gathers of a lane are deferred: consecutive ones of one process group are launched together.

    They are launched at the end, before an all-gather of another group, or when one of them is waited for. If the body
    raises, deferred all-gathers are not launched: other ranks launch more of them at once, and sizes would not match.
    """

    def __init__(self, lane: LaneProtocol) -> None:
        self._lane = lane
        self._waiting: list[Gather] = []
        self._then: list[Callable[[], None]] = []  # called on the lane's stream after them
        self._ticket: Pending | None = None
        self._name = ""

    def __enter__(self) -> None:
        self._lane.coalescing = self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._lane.coalescing = None
        if kind is None:
            self.launch()
        else:
            self.drop()

    def add(self, gather: Gather, name: str) -> Ticket:
        """Defer a gather; returns a ticket for it and for all that are launched with it."""
        if self._waiting and self._waiting[0].group is not gather.group:
            self.launch()
        if self._ticket is None:
            self._ticket = Pending(self.launch)
        self._waiting.append(gather)
        self._name = name
        return self._ticket

    def follow(self, ticket: Ticket, action: Callable[[], None]) -> bool:
        """If the ticket is for deferred gathers, do something on the lane's stream after them. Returns whether it is.

        The ticket then includes this work.
        """
        if ticket is not self._ticket:
            return False
        self._then.append(action)
        return True

    def drop(self) -> None:
        """Drop the deferred gathers without launching them."""
        if self._ticket is not None:
            self._ticket.launched = DONE
        self._ticket, self._waiting, self._then = None, [], []

    def launch(self) -> None:
        """Launch the deferred gathers."""
        ticket, waiting, then = self._ticket, self._waiting, self._then
        self.drop()  # if the launch raises, there is nothing to wait for
        if ticket is None:
            return
        with self._lane.entered():
            ticket.launched = waiting[0].merged(waiting[1:]).launch_now(self._name)
            for action in then:
                action()
            if then:
                ticket.launched = self._lane.mark()


class _OneTensor:
    """Packs a list for Gloo. As fast as Gloo's own list form, which must not be used.

    After each operation, threads of Gloo write its name into a shared string without a lock. A name of more than 15
    bytes, as that of the list form, is on the heap, and is freed twice once in thousands of operations (seen with torch
    2.13).
    """

    allocate = staticmethod(torch.empty)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool
    ) -> Work:
        return _torch.all_gather_one(group, output_tensor, input_tensor, _torch.ALL_GATHER)


def exchange_pieces(group: ProcessGroup, outputs: Tensors, inputs: Tensors, op: Op) -> _Started:
    """A reduce-scatter for Gloo; torch's own is an all-reduce per tensor, with twice the bytes and more messages.

    Each rank sends the others their pieces and adds those that it receives, always in rank order.
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
        mine = REDUCTIONS[op](received.view(world, -1), 0)
        torch._foreach_copy_(list(outputs), list(mine.split(sizes)))

    return [work], reduce


# With a user's own communication object, an ``AllGather`` or ``ReduceScatter`` of torch's FSDP: it allocates flat
# buffers and communicates them in one call. Runs are copied into its buffers before the call, and out of them after it.


def gather_by(
    comm: Any, group: ProcessGroup, outputs: Tensors, inputs: Tensors, asynchronous: bool
) -> tuple[list[Work], Callable[[], None]]:
    """Start gathering each input into its output. Returns the works to wait for, and what to call then."""
    sizes, world = [tensor.numel() for tensor in inputs], group.size()
    total = sum(sizes)
    flat = comm.allocate((world * total,), dtype=inputs[0].dtype, device=inputs[0].device)
    mine = flat[group.rank() * total : (group.rank() + 1) * total]
    torch._foreach_copy_(list(mine.split(sizes)), list(inputs))
    work = comm(output_tensor=flat, input_tensor=mine, group=group, async_op=asynchronous)

    def unpack() -> None:
        by_tensor = flat.view(world, total).split(sizes, dim=1)
        torch._foreach_copy_([out.view(world, size) for out, size in zip(outputs, sizes)], list(by_tensor))

    return [] if work is None else [work], unpack


def reduce_by(
    comm: Any, group: ProcessGroup, outputs: Tensors, inputs: Tensors, op: str, asynchronous: bool
) -> tuple[list[Work], Callable[[], None]]:
    """Start reducing each input to this rank's piece of it. Returns the works to wait for, and what to call then."""
    sizes, world = [tensor.numel() for tensor in outputs], group.size()
    total = sum(sizes)
    sent = comm.allocate((world * total,), dtype=inputs[0].dtype, device=inputs[0].device)
    received = comm.allocate((total,), dtype=inputs[0].dtype, device=inputs[0].device)
    places = list(sent.view(world, total).split(sizes, dim=1))
    torch._foreach_copy_(places, [tensor.view(world, size) for tensor, size in zip(inputs, sizes)])
    reduce_op = getattr(dist.ReduceOp, op.upper())
    work = comm(output_tensor=received, input_tensor=sent, group=group, op=reduce_op, async_op=asynchronous)

    def unpack() -> None:
        places.clear()  # until here, they keep what is sent alive
        torch._foreach_copy_(list(outputs), list(received.split(sizes)))

    return [] if work is None else [work], unpack


# What they share


def join(work: Work | None) -> None:
    """Let the current stream wait for a work that was launched in it. NCCL, which ran in it itself, gives None."""
    if work is not None:
        work.wait()


def one_after_other(*actions: Action) -> Action:
    """One function that calls all of these in order; None if there are none."""
    found = list(filter(None, actions))
    if len(found) < 2:
        return found[0] if found else None

    def act() -> None:
        for action in found:
            action()

    return act


def copy_locally(outputs: Tensors, inputs: Tensors) -> list[Work]:
    """A collective in a group of one rank: nothing to wait for."""
    apart = [(out, inp) for out, inp in zip(outputs, inputs) if out.data_ptr() != inp.data_ptr()]
    if apart:
        torch._foreach_copy_([out for out, _ in apart], [inp for _, inp in apart])
    return []


def as_bytes(tensors: Tensors) -> Tensors:
    """The tensors of one call with a single dtype that the backend supports."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2 and dtypes <= _NATIVE:
        return tensors
    return [tensor.view(torch.uint8) for tensor in tensors]


def require_native(tensors: Tensors, kind: str) -> None:
    if tensors and tensors[0].dtype not in _NATIVE:
        raise TypeError(f"{kind} of {tensors[0].dtype}: this dtype cannot be summed; cast to float32 or bfloat16 first")
