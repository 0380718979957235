"""The reduce of a group over the axes of its mesh: stages, which are built once, and a reduce in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer import DONE, DBuffer, Lane, Op, Pool, Ticket
from flatshard.buffer.collectives import Tensors
from flatshard.buffer.dbuffer import held_by_this_rank
from flatshard.buffer.tickets import Action, Tickets
from flatshard.engine.gradients.main_grads import MainGrads, Reduced
from flatshard.engine.weights.formats import Formats
from flatshard.layout import Partial, Placement, is_sharded

if TYPE_CHECKING:
    from flatshard.buffer.blocks import Coder


_MOST = 32  # sets of parameters for which numbers are kept


class Goal(Enum):
    """How far a backward reduces its gradients."""

    UNREDUCED = "unreduced"  # nowhere: they are added to what this rank has
    REST = "rest"
    FINAL = "final"


# Steps the parameters of some `Gradients`, and returns when they can be read; or None, if it has left all of them to
# the optimizer. With `Reduced`, they are of one group in host memory.
OnFinal: TypeAlias = Callable[[Sequence[Any], Reduced | None], Ticket | None]


@dataclass
class Reduction:
    """A reduce in flight: what its stages share, and its state."""

    pool: Pool
    name: str
    op: Op = "sum"
    comm: Any = None  # a `ReduceScatter` of torch's that the first stage is to use
    held: list[torch.Tensor] = field(default_factory=list)  # what the lane reads until it is over
    ticket: Ticket = DONE
    then: Action = None  # called when it is over
    writes: MainGrads | None = None  # which are its result
    shown: Sequence[int] = ()  # params whose gradients were set when it was launched
    on_final: OnFinal | None = None  # called when it is over and the gradients are complete, with ``of``
    of: Any = None  # the `Gradients` that it reduces
    reduced: Reduced | None = None  # the result, if it is to be copied to host memory, unless `on_final` uses it
    # Which parameters ranks have used (`Uses`): what the next stage is given, and what the last has made of it.
    uses: torch.Tensor | None = None
    parameters: int = 0  # how many they are
    asks: Action = None  # called when it is over, and the host may wait: this rank has not used all of them

    def note_uses(self, noted: torch.Tensor) -> None:
        """Copy the reduced use counts."""
        assert self.uses is not None
        noted.copy_(self.uses)

    def conceal(self) -> None:
        """Set the gradients that were set at its launch to None, until `show`."""
        if self.writes is not None:
            self.writes.conceal(self.shown)

    def show(self) -> None:
        if self.writes is not None:
            self.writes.show(self.shown)

    def wait(self) -> None:
        """Order the current stream after it. It then no longer counts as in flight, even if the wait fails."""
        try:
            self.ticket.wait()
        finally:
            if self.writes is not None:
                self.writes.in_flight -= 1


class Stage:
    """A reduce over one axis of the mesh. ``placements`` are those of the result; inputs and result have one dtype."""

    is_encoded = False

    def __init__(self, mesh: DeviceMesh, axis: int, placements: tuple[Placement, ...]) -> None:
        self.placements = placements
        self._mesh, self._axis = mesh, axis
        self._scatters = is_sharded(placements[axis])
        self.copies = mesh.size(axis) if self._scatters else 1  # how many ranks get a piece of what it is given
        self.room = int(not self._scatters)  # additional elements of a result per parameter
        self._group: tuple[object, ProcessGroup] | None = None

    def launch(self, inputs: Tensors, out: DBuffer, of: Reduction, after: Tickets = (), then: Action = None) -> Ticket:
        """Reduce runs into ``out`` and call ``then``, inside the lane. ``held`` keeps other tensors that it reads."""
        if not inputs:  # only empty tensors
            return Ticket()
        lane, op, name = of.pool.lane, of.op, of.name
        group = self._among(lane)
        if self._scatters:
            outputs = out.runs()
            if of.uses is not None:
                inputs, outputs = self._with_uses(inputs, outputs, of, after)
            return lane.reduce_scatter(group, outputs, inputs, op, after=after, then=then, name=name, comm=of.comm)
        with lane.entered(after):
            torch._foreach_copy_(out.runs(), list(inputs))
            reduced = out.local
            if of.uses is not None:  # behind the gradients there is room for them
                reduced = reduced.as_strided((reduced.numel() + of.parameters,), (1,))
                of.uses = reduced[out.local.numel() :].copy_(of.uses)
        ticket = lane.all_reduce(group, [reduced], op, name=name)
        return ticket if then is None else lane.follow(ticket, then)

    def _with_uses(
        self, inputs: Tensors, outputs: Tensors, of: Reduction, after: Tickets
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs and outputs of a reduce-scatter, with the use counts added."""
        given, dtype = of.uses, inputs[0].dtype
        assert given is not None
        if given.shape != (self.copies * of.parameters,) or given.dtype != dtype:  # of the stage before
            with of.pool.lane.entered(after):
                given = given.to(dtype).repeat(self.copies)
        elif of.pool.groups:  # what is sent lies in memory of theirs
            given = of.pool.temporary(given.numel(), dtype).copy_(given)
        of.uses = of.pool.temporary(of.parameters, dtype)
        of.held += (given, of.uses)
        return [*inputs, given], [*outputs, of.uses]

    def _among(self, lane: Lane) -> ProcessGroup:
        now = lane, lane.own_groups, lane.beside
        if self._group is None or self._group[0] != now:
            self._group = now, lane.group(self._mesh, self._axis)
        return self._group[1]


class EncodedStage(Stage):
    """A reduce that sends encoded inputs and adds them in float32, in rank order, on the receiving rank.

    Each rank sends each other rank its piece, or all of its data if all ranks need the whole sum. Inputs and result may
    have any floating-point dtypes.
    """

    is_encoded = True

    def __init__(
        self, mesh: DeviceMesh, axis: int, placements: tuple[Placement, ...], coder: Coder, stochastic: bool
    ) -> None:
        super().__init__(mesh, axis, placements)
        self.copies, self.room = 1, 0
        self._coder = coder
        before = (*placements[:axis], Partial(), *placements[axis + 1 :])
        self._from = held_by_this_rank(coder.wire.layout, mesh, before)
        self._is_padded = coder.wire.layout.payload < coder.wire.layout.num_shards * coder.wire.layout.run_numel
        self._is_stochastic = stochastic
        self._noise: torch.Tensor | None = None  # another number on each rank, and in each reduce

    def launch(self, inputs: Tensors, out: DBuffer, of: Reduction, after: Tickets = (), then: Action = None) -> Ticket:
        if not inputs:
            return Ticket()
        assert of.comm is None  # refused where it is set
        pool, coder, lane, piece = of.pool, self._coder, of.pool.lane, self._coder.wire.piece
        group = self._among(lane)
        ranks = group.size()
        with lane.entered(after):
            if of.uses is not None:
                of.uses = of.uses.clone()  # the next stage and `asks` read another tensor
                of.held.append(of.uses)
            sent = coder.as_they_are(inputs)
            if sent is None:
                sent = pool.temporary(piece * self._from.count, torch.uint8)
                coder.encode(inputs, self._from, sent, self._next_noise(sent.device))
                if of.uses is not None and coder.wire.told is not None:
                    self._told(sent, of).copy_((of.uses > 0).expand(self._from.count, -1))
            received = pool.temporary(ranks * piece * out.held.count, torch.uint8)
        of.held += (sent, received)
        noted = DONE
        if of.uses is not None and coder.wire.told is None:
            # Of the one tensor, which is sent from where it is: its bytes have no room for what is told.
            noted = lane.all_reduce(group, [of.uses], "sum", name=f"uses {of.name}")
        if self._scatters:
            ticket = lane.all_to_all(group, received, sent, [], [], name=of.name)
        else:
            ticket = lane.all_gather(group, [received], [sent], name=of.name)
        factor = 1.0 / ranks if of.op == "avg" else 1.0

        def add() -> None:
            noted.wait()
            if of.uses is not None and coder.wire.told is not None:
                of.uses.copy_(self._told(received, of).amax(0))
            if self._is_padded:
                out.local.zero_()
            coder.decode(received.view(ranks, -1), out.held, out.local, factor)
            if then is not None:
                then()

        return lane.follow(ticket, add)

    def _told(self, pieces: torch.Tensor, of: Reduction) -> torch.Tensor:
        """What pieces tell of uses."""
        first = self._coder.wire.told
        assert first is not None
        return pieces.view(-1, self._coder.wire.piece)[:, first : first + of.parameters]

    def _next_noise(self, device: torch.device) -> torch.Tensor | None:
        if not self._is_stochastic:
            return None
        if self._noise is None:
            rank = self._mesh.get_rank()
            self._noise = torch.tensor(rank * 0x9E3779B1 + self._axis, dtype=torch.int64, device=device)
        return self._noise.add_(0x2545F491)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of encoded gradients, or of rows, that would otherwise be sent in ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def stages_to(mesh: DeviceMesh, final: tuple[Placement, ...], formats: Formats, dtype: torch.dtype) -> list[Stage]:
    """The stages from unreduced gradients to placements ``final``: one axis after the other, last axis first.

    ``dtype``: what is sent if there is no format.
    """
    unreduced = (Partial(),) * len(final)
    stages: list[Stage] = []
    for axis in reversed(range(len(final))):
        placements = (*unreduced[:axis], *final[axis:])
        if formats.reduces[axis] is None:
            stages.append(Stage(mesh, axis, placements))
        else:
            stages.append(EncodedStage(mesh, axis, placements, formats.reduce_coder(axis, dtype), formats.stochastic))
    return stages


class Uses:
    """Which of the ``count`` params of a group any rank has used: one number per param, reduced with its gradient.

    A parameter that no rank has used has no gradient, as in one process; a parameter that some rank has used has one on
    all ranks. Only a rank that has not used a parameter reads the reduced number, and only then does the host wait for
    the device.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: dict[tuple[tuple[int, ...], int, torch.dtype], torch.Tensor] = {}
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def given(self, used: Sequence[int], copies: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What this rank sends, in ``copies`` copies: 1 for each param it has ``used``, else 0. Read-only."""
        key = tuple(used), copies, dtype
        found = self._given.get(key)
        if found is None:
            rows = torch.zeros(copies, self.count, dtype=dtype, device=device)
            for index in used:
                rows[:, index].fill_(1)
            found = rows.view(-1)
            if not capturing(found) and len(self._given) < _MOST:
                self._given[key] = found
        return found

    def answer(self, noted: torch.Tensor, asked: Sequence[int]) -> list[int]:
        """Which of the params ``asked`` some rank has used, by the reduced numbers. The host waits for them.

        A captured step cannot wait, and uses the same parameters in every step: the answer is that of the last step
        before it.
        """
        key = tuple(asked)
        if not capturing(noted):
            counts = noted.tolist()
            self._answers[key] = [index for index in asked if counts[index] > 0]
            if len(self._answers) > _MOST:
                self._answers = {key: self._answers[key]}
        elif key not in self._answers:
            raise RuntimeError("the captured step uses parameters that no step before it used; raise `warmup`")
        return self._answers[key]


def capturing(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor are being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
