"""The gradients of one group that are not reduced: as autograd and kernels leave them, and accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.engine.gradients.staging import Direct, Given, add_to, fill
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.weights.extensions import as_plain
from flatshard.engine.weights.offload import Home
from flatshard.layout import Layout, Partial


class Collected:
    """The gradients of full parameters, before they are reduced."""

    reduce_dtype: torch.dtype
    rests_in: torch.dtype  # between micro-batches

    def __init__(self, params: Sequence[ShardedParam], main: DBuffer, home: Home) -> None:
        self.params, self.main, self.home = params, main, home
        self.expected = sum(param.sharded.requires_grad for param in params)  # gradients of a backward that uses all
        # Called with False when the first gradient of a watched param arrives, and with True when all have arrived.
        self.on_arrival: Callable[[bool], None] | None = None
        self.direct: Direct | None = None  # not None: kernels may write gradients themselves
        self._arrived: set[int] = set()  # watched params with a gradient
        self._used: set[int] = set()  # params with a gradient since the last reduce to final gradients
        self._unreduced: DBuffer | None = None  # those of earlier backwards, full size

    @property
    def layout(self) -> Layout:
        return self.main.layout

    @property
    def waiting(self) -> bool:
        """Whether gradients have arrived that are not reduced."""
        if self.direct is not None and self.direct.written:
            return True
        for param in self.params:
            if param.full is not None and param.full.grad is not None:
                return True
        return False

    def arrived(self, index: int) -> None:
        """Autograd has set the gradient of a watched param; reentrant checkpointing may do so more than once."""
        if not self._arrived and self.on_arrival is not None:
            self.on_arrival(False)
        self._arrived.add(index)
        if len(self._arrived) == self.expected and self.on_arrival is not None:
            self.on_arrival(True)

    def take(self) -> list[torch.Tensor | None]:
        """Move the gradients that have arrived from the full parameters to the returned list."""
        if self._arrived:
            self._arrived.clear()
        taken: list[torch.Tensor | None] = [None] * len(self.params)
        for index, param in enumerate(self.params):
            full = param.full
            gradient = None if full is None else full.grad
            if full is not None and gradient is not None:
                full.grad = None
                if gradient.requires_grad:  # of a backward with create_graph=True; no graph goes through a reduce
                    gradient = gradient.detach()
                if gradient.is_sparse:  # of nn.Embedding(sparse=True)
                    gradient = gradient.to_dense()
                if param.inner is not None:
                    gradient = param.inner.local_gradient(gradient)
                taken[index] = gradient if type(gradient) is torch.Tensor else as_plain(gradient)
        return taken

    @property
    def kernels(self) -> Direct:
        """The gradients that kernels have written, if kernels may write them."""
        assert self.direct is not None
        return self.direct

    def place(self, index: int, clear: bool = False) -> torch.Tensor:
        """The place for a kernel's gradient of a full parameter. With ``clear``, it is zero before the first write."""
        if self._unreduced is not None:
            return self._unreduced.local_view(index)
        return self.kernels.view(index, clear, self._kernel_buffer)

    def is_vacant(self, index: int) -> bool:
        """Whether no gradient has been written to `place` yet."""
        return self._unreduced is None and index not in self.kernels.written

    def drop(self) -> None:
        """Drop gradients that have arrived and are not reduced."""
        self.take()
        self._drop_written()

    def _drop_written(self) -> None:
        self.direct = None if self.direct is None else Direct()

    def _join_written(self, direct: Direct, gradients: Given) -> list[torch.Tensor | None]:
        """Use the buffer of gradients that kernels have written as the unreduced one; returns gradients left to add."""
        self._used |= direct.written.keys()
        left = [None if direct.written.get(index) else gradient for index, gradient in enumerate(gradients)]
        if direct.staging is not None:  # otherwise they were written into the unreduced buffer
            turned = self.layout.turned
            fill(direct.staging, left, turned, direct.written.keys())
            self._unreduced = direct.staging
            left = [gradient if index in turned else None for index, gradient in enumerate(left)]
        self._drop_written()
        return left

    def _kernel_buffer(self) -> DBuffer:
        """A buffer for gradients that kernels write; its padding is zero."""
        numel = self.layout.buffer_numel(self.layout.num_shards)
        full = numel == sum(slot.numel for slot in self.layout.slots)
        local = self._empty(numel, self.reduce_dtype)
        local = local if full and not self.layout.turned else local.zero_()
        return DBuffer(self.layout, self.main.mesh, [Partial()] * self.main.mesh.ndim, local)

    def _add_unreduced(self, gradients: Given) -> None:
        if self._unreduced is not None and self._unreduced.dtype != self.rests_in:
            self._unreduced = self._unreduced.cast(self.rests_in)  # written by kernels, in the reduce dtype
        if self._unreduced is None:
            mesh, dtype = self.main.mesh, self.rests_in
            partial = [Partial()] * mesh.ndim
            self._unreduced = DBuffer.zeros(self.layout, mesh, partial, dtype=dtype, device=self.home.device)
        add_to(self._unreduced, gradients)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.home.device)


@_torch.uncompiled
def gradient_arrived(gradients: weakref.ref[Collected], index: int, full: torch.Tensor) -> None:
    """The autograd hook of a watched parameter."""
    target = gradients()
    if target is None:
        refuse_orphan()
    elif full.grad is not None or (target.direct is not None and index in target.direct.written):
        target.arrived(index)


def refuse_orphan() -> NoReturn:
    """Raise for a gradient of a parameter whose group has been freed."""
    raise RuntimeError(
        "a gradient arrived for a sharded parameter that has been moved, cast or deleted since its forward; run the "
        "backward before you change the model"
    )
