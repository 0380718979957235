"""DBuffer: a flat local tensor with a mesh, placements and a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer.collectives import Gather
from flatshard.buffer.lanes import Lane
from flatshard.buffer.tickets import DONE, Ticket
from flatshard.layout import Holding, Layout, Partial, Parts, Placement, holding, is_sharded


class DBuffer:
    """This rank's part of the tensors of a group, in one flat tensor.

    ``placements`` has one entry per axis of ``mesh``; `flatshard.layout.holding` says how sharded axes cut the buffer.
    ``layout`` has a shard for each rank that any buffer of the group is sharded over. So buffers with different
    placements share one layout, and one is a contiguous part of the other, segment by segment.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        local: torch.Tensor,
        held: Holding | None = None,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.placements = tuple(placements)
        self.local = local
        self.held = held_by_this_rank(layout, mesh, self.placements) if held is None else held
        numel = layout.buffer_numel(self.held.count)
        if local.shape != (numel,):
            raise ValueError(f"local has shape {tuple(local.shape)}; placements {self.placements} need ({numel},)")
        self._runs: dict[Holding | None, list[torch.Tensor]] = {}  # None: those of `held`
        self._parts: Parts | None = None  # how to split `local` into the runs of `held`
        self._gathers: list[tuple[Sequence[Placement], Lane, DBuffer | None, list[Gather]]] = []

    def like(self, local: torch.Tensor) -> DBuffer:
        """Another buffer of the same mesh, placements and layout."""
        made = DBuffer(self.layout, self.mesh, self.placements, local, self.held)
        made._parts = self._parts
        return made

    @classmethod
    def made(
        cls, layout: Layout, mesh: DeviceMesh, placements: Sequence[Placement], make: Callable[[int], torch.Tensor]
    ) -> DBuffer:
        """A buffer over ``make(number of elements)``."""
        held = held_by_this_rank(layout, mesh, placements)
        return cls(layout, mesh, placements, make(layout.buffer_numel(held.count)), held)

    @classmethod
    def zeros(
        cls,
        layout: Layout,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DBuffer:
        return cls.made(layout, mesh, placements, lambda numel: torch.zeros(numel, dtype=dtype, device=device))

    @classmethod
    def distribute(
        cls, tensors: Sequence[torch.Tensor], layout: Layout, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> DBuffer:
        """Keep this rank's part of full tensors that every rank has; padding is zero. Nothing is communicated."""
        shapes = tuple(slot.shape for slot in layout.slots)
        given = tuple(tuple(tensor.shape) for tensor in tensors)
        if given != shapes:
            raise ValueError(f"tensors have shapes {given}, but the layout was planned for {shapes}")
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            raise ValueError(f"tensors must have one dtype and device: {[(t.dtype, t.device) for t in tensors]}")
        if not tensors:
            raise ValueError("tensors is empty: a buffer needs at least one tensor")
        made = cls.zeros(layout, mesh, placements, dtype=tensors[0].dtype, device=tensors[0].device)
        for index, tensor in enumerate(tensors):
            made.local_view(index).copy_(made.rows_of(index, tensor.detach()))
        return made

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    def __repr__(self) -> str:
        return f"DBuffer({self.placements}, {self.dtype}, {self.local.numel()} elements on {self.device})"

    def local_view(self, index: int) -> torch.Tensor:
        """This rank's rows of tensor ``index``, which may be none: a view of ``local``.

        A turned tensor (`Layout.turned`) has no such view; `turns` returns it in parts.
        """
        assert self.held.count == 1 or index not in self.layout.turned
        offset, shape, stride = self.layout.windows(self.held.first, self.held.count)[index]
        return self.local.as_strided(shape, stride, offset + self.local.storage_offset())

    def run_of(self, index: int) -> torch.Tensor:
        """The run of the segment of tensor ``index``, a view of ``local``."""
        number = self.layout.slots[index].segment
        start, size = self.layout.run_starts(self.held.count)[number], self.layout.segments[number].piece
        return self.local.narrow(0, start, size * self.held.count)

    def rows_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor ``index`` that `local_view` holds."""
        slot = self.layout.slots[index]
        if not slot.shape:
            return whole
        return whole.narrow(slot.dim, *self.layout.rows(slot, self.held.first, self.held.count))

    def runs(self, held: Holding | None = None) -> list[torch.Tensor]:
        """Per non-empty segment, the run of ``held`` (default: all that this buffer holds) as a view of ``local``."""
        found = self._runs.get(held)
        if found is None:
            if held is None:
                if self._parts is None:
                    self._parts = self.layout.run_parts(self.held.count, 0, self.held.count)
                sizes, are_runs = self._parts
            elif self.held.contains(held):
                sizes, are_runs = self.layout.run_parts(self.held.count, held.first - self.held.first, held.count)
            else:
                raise ValueError(f"pieces {held} do not lie in {self.held}")
            # One split is cheaper than many slices.
            found = self._runs[held] = list(compress(self.local.split_with_sizes(sizes), are_runs))
        return found

    def cast(self, dtype: torch.dtype) -> DBuffer:
        """The same values in another dtype, in a buffer of its own."""
        return self.like(self.local.to(dtype, copy=True))

    def gather_in_place(
        self,
        source: Sequence[Placement],
        *,
        lane: Lane,
        own: DBuffer | None = None,
        after: Sequence[Ticket] = (),
        name: str = "",
        comm: Any = None,
    ) -> Ticket:
        """All-gather the shards of placements ``source`` into this buffer.

        This rank's shard is in its place in this buffer, or else it is ``own``. One coalesced launch per axis, or one
        call of ``comm``, an ``AllGather`` of torch's.
        """
        ticket = DONE
        if comm is not None:
            for number, (axis, outputs, inputs) in enumerate(self._plan_gathers(tuple(source), own)):
                group, tickets = lane.group(self.mesh, axis), (ticket,) if number else after
                ticket = lane.all_gather(group, outputs, inputs, after=tickets, name=name, comm=comm)
            return ticket
        for known in self._gathers:  # one or two; a comparison of identities is cheaper than a dict
            if known[0] is source and known[1] is lane and known[2] is own:
                launches = known[3]
                break
        else:
            plan = self._plan_gathers(tuple(source), own)
            launches = [
                Gather(lane, lane.group(self.mesh, axis), outputs, inputs, is_kept=True)
                for axis, outputs, inputs in plan
            ]
            self._gathers = [*self._gathers[-3:], (source, lane, own, launches)]
        for number, gather in enumerate(launches):
            if number == 0 and not after and lane.inside.depth:
                ticket = gather.launch_now(name) if lane.coalescing is None else gather.launch(name)
                continue
            with lane.entered(after if number == 0 else (ticket,)):
                ticket = gather.launch(name)
        return ticket

    def _plan_gathers(
        self, source: tuple[Placement, ...], own: DBuffer | None
    ) -> list[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
        """Axis, outputs and inputs of each launch of `gather_in_place`."""
        plan: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
        current = source
        for axis in axes_to_change(source, self.placements):
            step = (*current[:axis], self.placements[axis], *current[axis + 1 :])
            if not is_sharded(current[axis]):
                raise ValueError(f"axis {axis} goes from {current[axis]} to {step[axis]}, which is not a gather")
            have, get = (held_by_this_rank(self.layout, self.mesh, p) for p in (current, step))
            plan.append((axis, self.runs(get), self.runs(have) if plan or own is None else own.runs()))
            current = step
        return plan


def turns(
    layout: Layout, index: int, run: torch.Tensor, whole: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views with the same elements: of the full run of a segment, and of the one tensor in it.

    A tensor cut on dim 1 over two ranks, with elements numbered in its own order:

        whole   0 1 2 3        run   |0 1 4 5|2 3 6 7|
                4 5 6 7               piece 0 piece 1
    """
    slot = layout.slots[index]
    if not slot.numel:
        return []
    dim, piece, total = slot.dim, layout.segments[slot.segment].piece, slot.shape[slot.dim]
    chunk = piece // slot.row
    full, rest = divmod(total, chunk)
    before, after = slot.shape[:dim], slot.shape[dim + 1 :]
    in_run = run[: full * piece].view(full, *before, chunk, *after)
    pairs = [(in_run, whole.narrow(dim, 0, full * chunk).unflatten(dim, (full, chunk)).movedim(dim, 0))]
    if rest:
        last = run[full * piece : full * piece + rest * slot.row].view(*before, rest, *after)
        pairs.append((last, whole.narrow(dim, full * chunk, rest)))
    return pairs


def held_by_this_rank(layout: Layout, mesh: DeviceMesh, placements: Sequence[Placement]) -> Holding:
    """The pieces that this rank holds in a buffer with these placements."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in mesh {mesh}")
    if len(placements) != mesh.ndim:
        raise ValueError(f"{len(placements)} placements were given for a mesh of {mesh.ndim} axes")
    return holding(layout.num_shards, mesh.shape, coordinate, [is_sharded(p) for p in placements])


def axes_to_change(source: Sequence[Placement], target: Sequence[Placement]) -> list[int]:
    """The axes that change, in the order in which they can: gathers from the first axis on, others from the last."""
    gathers: list[int] = []
    others: list[int] = []
    for axis, (old, new) in enumerate(zip(source, target)):
        if old != new:
            if isinstance(new, Partial):
                raise ValueError(f"a buffer cannot go from {old} to {new}")
            (gathers if is_sharded(old) else others).append(axis)
    return gathers + others[::-1]
