"""How the backends gather and reduce lists of tensors: what a lane calls, once, to get works to wait for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup, Work

from flatshard import _torch
from flatshard.buffer.custom import gather_by
from flatshard.buffer.peers import PeerGather
from flatshard.buffer.tickets import Action, Ticket

if TYPE_CHECKING:
    from flatshard.buffer.lanes import Lane

Op: TypeAlias = Literal["sum", "avg", "max"]
Tensors: TypeAlias = Sequence[torch.Tensor]
_Started: TypeAlias = tuple[list[Work], Action]

# What every backend reduces and moves as it is. Anything else is moved as bytes, and cannot be reduced.
_NATIVE = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
REDUCTIONS: dict[Op, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum,
    "avg": torch.mean,
    "max": torch.amax,
}


class Gather:
    """An all-gather that can be launched again and again: what is the same every time is looked up once."""

    __slots__ = ("_call", "_group", "_lane", "_numbytes")

    _call: Callable[[], _Started]

    def __init__(self, lane: Lane, group: ProcessGroup, outputs: Tensors, inputs: Tensors) -> None:
        self._lane, self._group = lane, group
        self._numbytes = nbytes(outputs)
        outputs, inputs = list(as_bytes(outputs)), list(as_bytes(inputs))
        # What to wait for, and what to do then.
        if group.size() == 1:
            self._call = lambda: (copied(outputs, inputs), None)
        elif group in lane._peers:
            self._call = functools.partial(_by_copies, lane._peers[group].gather(outputs, inputs))
        elif lane.backend_in(group) != "gloo":
            self._call = lambda: ([_torch.all_gather_coalesced(group, outputs, inputs, _torch.ALL_GATHER)], None)
        elif lane.stream is None and len(inputs) > 1:
            self._call = lambda: gather_by(_OneCall(), group, outputs, inputs, asynchronous=True)
        else:
            pairs = list(zip(outputs, inputs))
            self._call = lambda: ([_torch.all_gather_one(group, *pair, _torch.ALL_GATHER) for pair in pairs], None)

    def launch(self, name: str) -> Ticket:
        """Inside `Lane.entered`."""
        works, then = self._call()
        return self._lane._finish(self._group, "all_gather", name, self._numbytes, works, then)


def _by_copies(gather: PeerGather) -> _Started:
    gather()
    return [], None


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


def exchange_pieces(group: ProcessGroup, outputs: Tensors, inputs: Tensors, op: Op) -> _Started:
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
        mine = REDUCTIONS[op](received.view(world, -1), 0)
        torch._foreach_copy_(list(outputs), list(mine.split(sizes)))

    return [work], reduce


# What they share


def join(work: Work | None) -> None:
    """Let the current stream wait for what was launched in it. NCCL, which ran in it itself, gives None."""
    if work is not None:
        work.wait()


def nbytes(tensors: Tensors) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def one_after_other(*actions: Action) -> Action:
    """All of them as one, in their order; None if there are none."""
    found = list(filter(None, actions))
    if len(found) < 2:
        return found[0] if found else None

    def act() -> None:
        for action in found:
            action()

    return act


def copied(outputs: Tensors, inputs: Tensors) -> list[Work]:
    """What a collective of one rank does."""
    apart = [(out, inp) for out, inp in zip(outputs, inputs) if out.data_ptr() != inp.data_ptr()]
    if apart:
        torch._foreach_copy_([out for out, _ in apart], [inp for _, inp in apart])
    return []


def as_bytes(tensors: Tensors) -> Tensors:
    """The tensors of one call, which share a dtype, as the backend can move them."""
    if not tensors or tensors[0].dtype in _NATIVE:
        return tensors
    return [tensor.view(torch.uint8) for tensor in tensors]


def require_native(tensors: Tensors, kind: str) -> None:
    if tensors and tensors[0].dtype not in _NATIVE:
        raise TypeError(f"{kind} of {tensors[0].dtype}: no backend can add it; cast to float32 or bfloat16 first")
