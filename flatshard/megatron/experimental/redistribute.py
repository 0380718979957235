"""A buffer of the engine in other placements. Training uses only `DBuffer.gather_in_place` and reduces of lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.buffer import DBuffer, Lane, Ticket
from flatshard.buffer.dbuffer import axes_to_change
from flatshard.layout import Partial, Placement, Replicate, is_sharded


def redistribute(
    source: DBuffer, placements: Sequence[Placement], *, out: DBuffer | None = None, lane: Lane | None = None
) -> DBuffer:
    """A buffer in other placements, complete when the call returns (on CUDA: for the current stream).

    Axes are gathered first to last and reduced or scattered last to first, so that every part stays contiguous.
    """
    placements = tuple(placements)
    _check_target(source, placements, out)
    lane = Lane("redistribute", source.device) if lane is None else lane
    current, ticket = source, lane.mark()
    for axis in axes_to_change(source.placements, placements):
        step = (*current.placements[:axis], placements[axis], *current.placements[axis + 1 :])
        current, ticket = _change(current, axis, step, out if step == placements else None, lane, ticket)
    ticket.wait()
    if out is None or current is out:
        return current
    out.local.copy_(source.local)  # in the same placements
    return out


def _change(
    source: DBuffer, axis: int, placements: tuple[Placement, ...], out: DBuffer | None, lane: Lane, after: Ticket
) -> tuple[DBuffer, Ticket]:
    """Change one axis."""
    placement = source.placements[axis]
    if out is None:
        with lane.entered():
            out = DBuffer.zeros(source.layout, source.mesh, placements, dtype=source.dtype, device=source.device)
    if isinstance(placement, Replicate):  # a scatter
        with lane.entered((after,)):
            if out.local.numel():
                torch._foreach_copy_(out.runs(), source.runs(out.held))
            return out, lane.mark()
    group = lane.group(source.mesh, axis)
    if not isinstance(placement, Partial):
        return out, lane.all_gather(group, out.runs(), source.runs(), after=(after,))
    shared = out.local.untyped_storage()._cdata == source.local.untyped_storage()._cdata
    if not is_sharded(placements[axis]):
        with lane.entered((after,)):
            if not shared:
                out.local.copy_(source.local)
        return out, lane.all_reduce(group, [out.local], placement.op)
    if shared:
        raise ValueError("`out` shares storage with the input of a reduce-scatter; give it separate storage")
    return out, lane.reduce_scatter(group, out.runs(), source.runs(), placement.op, after=(after,))


def _check_target(source: DBuffer, placements: tuple[Placement, ...], out: DBuffer | None) -> None:
    if len(placements) != source.mesh.ndim:
        raise ValueError(f"{len(placements)} placements were given for a mesh of {source.mesh.ndim} axes")
    if out is None:
        return
    expected = {
        "mesh": (out.mesh, source.mesh),
        "placements": (out.placements, placements),
        "dtype": (out.dtype, source.dtype),
        "device": (out.device, source.device),
        "layout": (out.layout, source.layout),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise ValueError(f"`out` has {what} {found}; expected {wanted}")
