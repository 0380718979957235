"""Transient storage: gathered weights and staging gradients come and go, their tensors stay.

A pool gives and takes the *storage* of a tensor by resizing it. The tensor, its views and what autograd saved of them
keep their identity, so a unit that is gathered again in backward fills the very tensors that its forward used.
"""

from __future__ import annotations

import torch

from flatshard import _torch
from flatshard.buffer.lanes import Lane, Ticket


class Pool:
    """Storage that a lane writes and compute reads, or the reverse.

    On CUDA the storage comes from a private memory pool and belongs to the lane's stream. Release records where the
    releasing stream stands, and the lane waits for that point before it takes storage again: so a block that is reused
    is never written while it is still read, and no ``record_stream`` delays its return.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.live_bytes = 0
        self.peak_bytes = 0
        self.live_buffers = 0
        self.peak_buffers = 0
        self._pool = torch.cuda.MemPool() if lane.stream is not None else None
        self._allocating = _torch.AllocatingFrom(self._pool, lane.device.index) if self._pool is not None else None
        self._released: Ticket | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that has a size but no storage yet. Views of it can be made once it has been allocated."""
        tensor = self.temporary(numel, dtype)
        tensor.untyped_storage().resize_(0)
        return tensor

    def temporary(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor for the lane's own use; it must be kept until the lane's work on it has been waited for."""
        if self._allocating is None:
            return torch.empty(numel, dtype=dtype, device=self.lane.device)
        with self.lane.entered(), self._allocating:
            return torch.empty(numel, dtype=dtype, device=self.lane.device)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Give the tensor its storage; its values are undefined. No effect where it has storage already."""
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        if storage.nbytes() or not size:
            return
        if self._allocating is None:
            storage.resize_(size)
        else:
            after = () if self._released is None else (self._released,)
            self._released = None
            with self.lane.entered(after), self._allocating:
                storage.resize_(size)
        self.live_bytes += size
        self.live_buffers += 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_buffers = max(self.peak_buffers, self.live_buffers)

    def release(self, tensor: torch.Tensor) -> None:
        """Take the storage back once all that the current stream has been given so far is done with it.

        Work of the lane itself on the storage is in order with its next use; work of any third stream must have been
        waited for.
        """
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not size:
            return
        if self._allocating is not None:
            self._released = self.lane.mark()
        storage.resize_(0)
        self.live_bytes -= size
        self.live_buffers -= 1
