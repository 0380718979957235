"""The reduce of a group over the axes of its mesh: stages, which are built once, and a reduce in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from flatshard import _torch
from flatshard.buffer import DONE, DBuffer, Lane, Op, Pool, Ticket
from flatshard.buffer.collectives import Tensors
from flatshard.buffer.dbuffer import held_by_this_rank
from flatshard.buffer.tickets import Action, Tickets
from flatshard.engine.gradients.main_grads import MainGrads, Reduced
from flatshard.engine.weights.formats import Formats
from flatshard.layout import Partial, Placement, is_sharded

if TYPE_CHECKING:
    from flatshard.buffer.blocks import Coder


_MOST_CACHED = 32  # sets of parameters in each cache of `Uses`


class Goal(Enum):
    """How far a backward reduces its gradients."""

    UNREDUCED = "unreduced"  # not at all: they are added to those of this rank
    REST = "rest"  # to `Placements.gradient`, where they rest between micro-batches
    FINAL = "final"  # to `Placements.optimizer`


# Steps the parameters of some `Gradients`. Returns a ticket for the steps, or None if it leaves all of them to the
# optimizer. `Reduced` is given for one group in host memory.
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
    then: Action = None  # called when it has been waited for
    writes: MainGrads | None = None  # its result
    shown: Sequence[int] = ()  # params whose gradients were set when it was launched
    on_final: OnFinal | None = None  # called with ``gradients`` when it has been waited for and they are complete
    gradients: Any = None  # the `Gradients` that it reduces
    reduced: Reduced | None = None  # the result, if it is to be copied to host memory, unless `on_final` uses it
    guards: list[tuple[Any, RemovableHandle]] = field(default_factory=list)  # nodes and their hooks, of `guard`
    uses: torch.Tensor | None = None  # which params ranks have used (`Uses`), reduced as far as the gradients
    num_params: int = 0  # how many params ``uses`` is about
    resolve_uses: Action = None  # called when the host may wait, if this rank has not used all params

    def copy_uses(self, counts: torch.Tensor) -> None:
        assert self.uses is not None
        counts.copy_(self.uses)

    def guard(self, nodes: Sequence[Any], action: Callable[[], None]) -> None:
        """Until `wait`, call ``action`` before autograd executes these nodes, which add to what the reduce writes."""
        self.guards += [(node, _torch.before_node(node, action)) for node in nodes]

    def wait(self) -> None:
        """Order the current stream after it. It then no longer counts as in flight, even if the wait fails."""
        try:
            self.ticket.wait()
        finally:
            for _, hook in self.guards:
                hook.remove()
            self.guards.clear()
            if self.writes is not None:
                self.writes.in_flight -= 1


class Stage:
    """A reduce over one axis of the mesh. ``placements`` are those of the result; inputs and result have one dtype."""

    is_encoded = False

    def __init__(self, mesh: DeviceMesh, axis: int, placements: tuple[Placement, ...]) -> None:
        self.placements = placements
        self._mesh, self._axis = mesh, axis
        self._scatters = is_sharded(placements[axis])
        self.copies = mesh.size(axis) if self._scatters else 1  # of the uses: one for each rank that gets a piece
        self.room = int(not self._scatters)  # additional elements of a result per parameter
        self._group: tuple[object, ProcessGroup] | None = None

    def launch(
        self, inputs: Tensors, out: DBuffer, reduction: Reduction, after: Tickets = (), then: Action = None
    ) -> Ticket:
        """Reduce runs into ``out`` and call ``then``, inside the lane. ``held`` keeps other tensors that it reads."""
        if not inputs:  # only empty tensors
            return Ticket()
        lane, op, name = reduction.pool.lane, reduction.op, reduction.name
        group = self._among(lane)
        if self._scatters:
            outputs = out.runs()
            if reduction.uses is not None:
                inputs, outputs = self._with_uses(inputs, outputs, reduction, after)
            return lane.reduce_scatter(
                group, outputs, inputs, op, after=after, then=then, name=name, comm=reduction.comm
            )
        with lane.entered(after):
            torch._foreach_copy_(out.runs(), list(inputs))
            reduced = out.local
            if reduction.uses is not None:  # behind the gradients there is room for them
                reduced = reduced.as_strided((reduced.numel() + reduction.num_params,), (1,))
                reduction.uses = reduced[out.local.numel() :].copy_(reduction.uses)
        ticket = lane.all_reduce(group, [reduced], op, name=name)
        return ticket if then is None else lane.follow(ticket, then)

    def _with_uses(
        self, inputs: Tensors, outputs: Tensors, reduction: Reduction, after: Tickets
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs and outputs of a reduce-scatter, with the uses added."""
        uses, dtype = reduction.uses, inputs[0].dtype
        assert uses is not None
        if uses.shape != (self.copies * reduction.num_params,) or uses.dtype != dtype:  # the result of the last stage
            with reduction.pool.lane.entered(after):
                uses = uses.to(dtype).repeat(self.copies)
        elif reduction.pool.groups:  # what is sent must be in registered memory
            uses = reduction.pool.temporary(uses.numel(), dtype).copy_(uses)
        reduction.uses = reduction.pool.temporary(reduction.num_params, dtype)
        reduction.held += (uses, reduction.uses)
        return [*inputs, uses], [*outputs, reduction.uses]

    def _among(self, lane: Lane) -> ProcessGroup:
        now = lane, lane.own_groups, lane.shared_axes
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

    def launch(
        self, inputs: Tensors, out: DBuffer, reduction: Reduction, after: Tickets = (), then: Action = None
    ) -> Ticket:
        if not inputs:
            return Ticket()
        assert reduction.comm is None  # refused where it is set
        pool, coder, lane, piece = reduction.pool, self._coder, reduction.pool.lane, self._coder.wire.piece
        group = self._among(lane)
        ranks = group.size()
        with lane.entered(after):
            if reduction.uses is not None:
                reduction.uses = reduction.uses.clone()  # it is written here, and the given one may be cached
                reduction.held.append(reduction.uses)
            sent = coder.unencoded(inputs)
            if sent is None:
                sent = pool.temporary(piece * self._from.count, torch.uint8)
                coder.encode(inputs, self._from, sent, self._next_noise(sent.device))
                if reduction.uses is not None and coder.wire.uses_at is not None:
                    self._use_bytes(sent, reduction).copy_((reduction.uses > 0).expand(self._from.count, -1))
            received = pool.temporary(ranks * piece * out.held.count, torch.uint8)
        reduction.held += (sent, received)
        uses_reduced = DONE
        if reduction.uses is not None and coder.wire.uses_at is None:
            # The group has one tensor, which is sent from where it is: behind it is no room for the uses.
            uses_reduced = lane.all_reduce(group, [reduction.uses], "sum", name=f"uses {reduction.name}")
        if self._scatters:
            ticket = lane.all_to_all(group, received, sent, [], [], name=reduction.name)
        else:
            ticket = lane.all_gather(group, [received], [sent], name=reduction.name)
        factor = 1.0 / ranks if reduction.op == "avg" else 1.0

        def add() -> None:
            uses_reduced.wait()
            if reduction.uses is not None and coder.wire.uses_at is not None:
                reduction.uses.copy_(self._use_bytes(received, reduction).amax(0))
            if self._is_padded:
                out.local.zero_()
            coder.decode(received.view(ranks, -1), out.held, out.local, factor)
            if then is not None:
                then()

        return lane.follow(ticket, add)

    def _use_bytes(self, pieces: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """The bytes in some pieces that say which params were used."""
        first = self._coder.wire.uses_at
        assert first is not None
        return pieces.view(-1, self._coder.wire.piece)[:, first : first + reduction.num_params]

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
    all ranks. Only a rank that has not used a parameter reads the reduced number, for which its host waits.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._flags: dict[tuple[tuple[int, ...], int, torch.dtype], torch.Tensor] = {}
        self._used_by_any: dict[tuple[int, ...], list[int]] = {}

    def flags(self, used: Sequence[int], copies: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What this rank sends, in ``copies`` copies: 1 for each param it has ``used``, else 0. Read-only."""
        key = tuple(used), copies, dtype
        flags = self._flags.get(key)
        if flags is None:
            rows = torch.zeros(copies, self.count, dtype=dtype, device=device)
            for index in used:
                rows[:, index].fill_(1)
            flags = rows.view(-1)
            if not capturing(flags) and len(self._flags) < _MOST_CACHED:
                self._flags[key] = flags
        return flags

    def used_by_any(self, counts: torch.Tensor, unused: Sequence[int]) -> list[int]:
        """Which of the params ``unused`` some rank has used, by the reduced numbers. The host waits for them.

        A captured step cannot wait, and uses the same parameters in every step: the result is that of the last step
        before it.
        """
        key = tuple(unused)
        if not capturing(counts):
            numbers = counts.tolist()
            self._used_by_any[key] = [index for index in unused if numbers[index] > 0]
            if len(self._used_by_any) > _MOST_CACHED:
                self._used_by_any = {key: self._used_by_any[key]}
        elif key not in self._used_by_any:
            raise RuntimeError("the captured step uses parameters that no step before it used; raise `warmup`")
        return self._used_by_any[key]


def capturing(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor are being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
