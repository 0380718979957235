"""Weight gradients that kernels write into the buffer of the reduce, instead of returning them to autograd.

During a backward, a group that offers this has one full-size buffer in the reduce dtype. The part of a full parameter
in it is its ``main_grad``. A kernel that computes a weight gradient writes it there, or adds to it, and sets
`grad_added_to_main_grad`. Autograd then has no gradient for that parameter, or one to be ignored. Gradients of the
group that autograd does compute (norms, biases) are copied to the same buffer before the reduce.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from typing import Protocol

import torch
from torch import nn

from flatshard.buffer import DBuffer

_PLACE = "_flatshard_main_grad_of"


class Direct:
    """The gradients of a group that kernels have written in the running backward."""

    def __init__(self) -> None:
        self.staging: DBuffer | None = None
        self.written: set[int] = set()
        self.alone: set[int] = set()  # of those, the ones for which autograd's gradient is to be ignored
        self._cleared: set[int] = set()

    def drop(self) -> None:
        """Forget all of it."""
        self.staging = None
        for known in (self.written, self.alone, self._cleared):
            known.clear()

    def wrote(self, index: int, alone: bool = False) -> None:
        """A kernel has written a gradient. ``alone``: ignore the gradient that autograd computes for it."""
        self.written.add(index)
        if alone:
            self.alone.add(index)

    def view(self, index: int, clear: bool, make: Callable[[], DBuffer]) -> torch.Tensor:
        """The place of a gradient. Its values are undefined, or zero with ``clear``, until it has been written."""
        if self.staging is None:
            self.staging = make()
        view = self.staging.local_view(index)
        if clear and index not in self._cleared | self.written:
            view.zero_()
            self._cleared.add(index)
        return view


def fill(staging: DBuffer, gradients: Sequence[torch.Tensor | None], turned: Set[int], written: Set[int]) -> None:
    """Copy gradients of autograd to a buffer that kernels have partly written. ``turned`` tensors are left out."""
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


class Destination(Protocol):
    """The gradients of a group, as kernels see them."""

    # fmt: off
    @property
    def kernels(self) -> Direct: ...
    def place(self, index: int, clear: bool = False) -> torch.Tensor: ...
    def is_vacant(self, index: int) -> bool: ...
    # fmt: on


class Destined(nn.Parameter):
    """A full parameter with a buffer for its gradient. The names follow Megatron's convention."""

    @property
    def main_grad(self) -> torch.Tensor:
        """Full-size, in the reduce dtype: unreduced gradients and what kernels wrote in this backward, or zero.

        To be read and written within a backward only. Add to it, and set `grad_added_to_main_grad`.
        """
        gradients, index = destination(self)
        return gradients.place(index, clear=True)

    @property
    def overwrite_main_grad(self) -> bool:
        """Whether nothing is in `main_grad` yet: a kernel may write instead of adding."""
        gradients, index = destination(self)
        return gradients.is_vacant(index)

    @property
    def grad_added_to_main_grad(self) -> bool:
        """Whether a kernel has written this parameter's gradient; autograd's gradient for it is then ignored."""
        gradients, index = destination(self)
        return index in gradients.kernels.alone

    @grad_added_to_main_grad.setter
    def grad_added_to_main_grad(self, value: bool) -> None:
        gradients, index = destination(self)
        if value:
            gradients.kernels.wrote(index, alone=True)


def destine(full: nn.Parameter, gradients: Destination, index: int) -> None:
    """Give a full parameter the attributes of `Destined`."""
    full.__class__ = Destined
    full.__dict__[_PLACE] = (weakref.ref(gradients), index)


def destination(full: torch.Tensor) -> tuple[Destination, int]:
    """The parameter whose gradient a kernel is about to write."""
    ref, index = full.__dict__[_PLACE]
    found: Destination | None = ref()
    if found is None:
        raise RuntimeError(
            "a gradient is written for a sharded parameter that has been moved, cast or deleted since its forward; run "
            "the backward before you change the model"
        )
    return found, index
