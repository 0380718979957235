"""The way of the gradients of a group through the axes of its mesh: stages, built once, and a reduce on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer import DBuffer, Lane, Ticket
from flatshard.buffer.lanes import Op
from flatshard.engine.main_grads import MainGrads
from flatshard.layout import Partial, Placement, is_sharded


class Goal(Enum):
    """How far a backward takes its gradients."""

    UNREDUCED = "unreduced"  # nowhere: they are added to what this rank has
    REST = "rest"
    FINAL = "final"


@dataclass
class Reduction:
    """A reduce on its way. ``held`` are tensors that the lane still reads; ``then`` is called when it is done."""

    ticket: Ticket
    name: str
    held: list[torch.Tensor] = field(default_factory=list)
    then: Callable[[], None] | None = None
    writes: MainGrads | None = None  # which are its result

    def wait(self) -> None:
        """Order the current stream after it. It is not on its way any more, also if that fails."""
        try:
            self.ticket.wait()
        finally:
            if self.writes is not None:
                self.writes.in_flight -= 1


class Stage:
    """A reduce over one axis of the mesh. ``placements`` are those of the result."""

    def __init__(self, mesh: DeviceMesh, axis: int, placements: tuple[Placement, ...]) -> None:
        self.placements = placements
        self._mesh, self._axis = mesh, axis
        self._scatters = is_sharded(placements[axis])
        self._group: tuple[Lane, bool, ProcessGroup] | None = None

    def launch(
        self,
        inputs: Sequence[torch.Tensor],
        out: DBuffer,
        lane: Lane,
        op: Op,
        *,
        after: Sequence[Ticket] = (),
        then: Callable[[], None] | None = None,
        name: str = "",
        comm: Any = None,
    ) -> Ticket:
        """Reduce runs into ``out`` and do ``then``, inside the lane. ``comm``: a `ReduceScatter` of torch's to use."""
        if not inputs:  # only empty tensors
            return Ticket()
        if self._group is None or self._group[0] is not lane or self._group[1] != lane.own_groups:
            self._group = lane, lane.own_groups, lane.group(self._mesh, self._axis)
        group = self._group[2]
        if self._scatters:
            return lane.reduce_scatter(group, out.runs(), inputs, op, after=after, then=then, name=name, comm=comm)
        with lane.entered(after):
            torch._foreach_copy_(out.runs(), list(inputs))
        ticket = lane.all_reduce(group, [out.local], op, name=name)
        return ticket if then is None else lane.follow(ticket, then)


def stages_to(mesh: DeviceMesh, final: tuple[Placement, ...]) -> list[Stage]:
    """From unreduced gradients, every rank's own, to placements ``final``: one axis after the other, the last first."""
    unreduced = (Partial(),) * len(final)
    return [Stage(mesh, axis, (*unreduced[:axis], *final[axis:])) for axis in reversed(range(len(final)))]
