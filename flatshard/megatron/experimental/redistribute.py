"""A buffer of the engine in other placements. Training uses only `DBuffer.gather_in_place` and reduces of lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.buffer import DBuffer, Lane
from flatshard.buffer.dbuffer import axes_to_change
from flatshard.layout import Partial, Placement, Replicate, is_sharded


def redistribute(source: DBuffer, placements: Sequence[Placement], *, lane: Lane | None = None) -> DBuffer:
    """A buffer in other placements; ``source`` itself if it has those.

    It is complete when the call returns (on CUDA: for the current stream). Axes are gathered first to last and
    reduced or scattered last to first, so that every part stays contiguous.
    """
    if len(placements) != source.mesh.ndim:
        raise ValueError(f"{len(placements)} placements were given for a mesh of {source.mesh.ndim} axes")
    lane = Lane("redistribute", source.device) if lane is None else lane
    for axis in axes_to_change(source.placements, placements):
        source = _change(source, axis, placements[axis], lane)
    return source


def _change(source: DBuffer, axis: int, placement: Placement, lane: Lane) -> DBuffer:
    """Change one axis."""
    before, placements = source.placements[axis], list(source.placements)
    placements[axis] = placement
    out = DBuffer.zeros(source.layout, source.mesh, placements, dtype=source.dtype, device=source.device)
    if isinstance(before, Replicate):  # a scatter
        if out.local.numel():
            torch._foreach_copy_(out.runs(), source.runs(out.held))
        return out
    group = lane.group(source.mesh, axis)
    if not isinstance(before, Partial):
        ticket = lane.all_gather(group, out.runs(), source.runs(), after=(lane.mark(),))
    elif is_sharded(placement):
        ticket = lane.reduce_scatter(group, out.runs(), source.runs(), before.op, after=(lane.mark(),))
    else:
        out.local.copy_(source.local)
        ticket = lane.all_reduce(group, [out.local], before.op, after=(lane.mark(),))
    ticket.wait()
    return out
