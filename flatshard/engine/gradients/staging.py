"""Full-size inputs of a reduce: which gradients can be sent from where they are, and staging for the others.

Kernels may write into staging themselves (`Direct`; see direct.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

import torch

from flatshard.buffer import DBuffer, turns
from flatshard.layout import Layout

Given: TypeAlias = Sequence[torch.Tensor | None]  # the full-size gradients of a group, where autograd has left some


def sole_owners(layout: Layout) -> tuple[int | None, ...]:
    """Per segment, the tensor that fills it without padding and in its own order, if one does."""
    owners: list[int | None] = [None] * len(layout.segments)
    for index, slot in enumerate(layout.slots):
        if index not in layout.turned and slot.numel == layout.segments[slot.segment].piece * layout.num_shards:
            owners[slot.segment] = index
    return tuple(owners)


def fill_runs(layout: Layout, staging: torch.Tensor, runs: list[torch.Tensor | None], gradients: Given) -> None:
    """Copy the gradients of segments without a run into ``staging``, and use its parts as their runs."""
    end = filled = 0
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    staged = [run is None for run in runs]
    for number, segment in enumerate(layout.segments):
        if staged[number]:
            runs[number] = staging[end : end + segment.piece * layout.num_shards]
            end += segment.piece * layout.num_shards
    for index, slot in enumerate(layout.slots):
        gradient, run = gradients[index], runs[slot.segment]
        assert run is not None
        if gradient is None or not staged[slot.segment]:
            continue
        filled += slot.numel
        if index not in layout.turned:
            places.append(run[slot.offset : slot.stop].view(slot.shape))
            sources.append(gradient)
            continue
        for place, part in turns(layout, index, run, gradient):
            places.append(place)
            sources.append(part)
    if filled < end:
        staging.zero_()  # padding and missing gradients
    if places:
        torch._foreach_copy_(places, sources)


def add_to(unreduced: DBuffer, gradients: Given) -> None:
    """Add gradients to a buffer that holds earlier ones, full size."""
    layout = unreduced.layout
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if index not in layout.turned:
            unreduced.local_view(index).add_(gradient)
            continue
        for place, part in turns(layout, index, unreduced.run_of(index), gradient):
            place.add_(part)


class Direct:
    """The gradients of a group that kernels have written in the running backward."""

    def __init__(self) -> None:
        self.staging: DBuffer | None = None
        self.written: dict[int, bool] = {}  # params, and whether autograd's gradient is ignored
        self._cleared: set[int] = set()

    def wrote(self, index: int, alone: bool = False) -> None:
        """A kernel has written a gradient. ``alone``: ignore the gradient that autograd computes for it."""
        self.written[index] = alone or self.written.get(index, False)

    def view(self, index: int, clear: bool, make: Callable[[], DBuffer]) -> torch.Tensor:
        """The place of a gradient. Its values are undefined, or zero with ``clear``, before the first write."""
        if self.staging is None:
            self.staging = make()
        view = self.staging.local_view(index)
        if clear and index not in self._cleared | self.written.keys():
            view.zero_()
            self._cleared.add(index)
        return view


def fill(staging: DBuffer, gradients: Given, turned: Set[int], written: Set[int]) -> None:
    """Copy gradients of autograd into a buffer that kernels have partly written, except those of ``turned`` tensors."""
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, gradient in enumerate(gradients):
        if index in turned:
            continue
        view = staging.local_view(index)
        if index in written:
            if gradient is not None:
                view.add_(gradient)
        elif gradient is None:
            view.zero_()
        else:
            places.append(view)
            sources.append(gradient)
    if places:
        torch._foreach_copy_(places, sources)
