"""Transient storage of gathered weights and staging buffers: storage is allocated and freed, tensors stay.

A pool allocates and frees the *storage* of a tensor by resizing it. The tensor, its views and what autograd saved of
them keep their identity, so a unit that is gathered again in backward fills the same tensors that its forward used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.distributed import ProcessGroup

from flatshard import _torch
from flatshard.buffer.lanes import Lane
from flatshard.buffer.tickets import DONE, Ticket

# A slot serves tensors of its own size and of somewhat smaller ones: a block in the place of an embedding would keep it
# from the head, which needs all of it.
_SHARE = 2 / 3
# A slot is a little larger than what it is made for: a head and its norm fit in the slot of an embedding.
_ROOM, _GRANULE = 1 / 256, 2 << 20


class _Slot:
    """Device memory for one tensor at a time: a separate memory pool, so that its block is never split.

    On CPU it has no memory of its own.
    """

    __slots__ = ("allocating", "least", "released", "size")

    def __init__(self, size: int, device: torch.device, groups: Sequence[ProcessGroup] = ()) -> None:
        self.size = -(-int(size + size * _ROOM) // _GRANULE) * _GRANULE
        self.least = int(_SHARE * size) if self.size > _GRANULE else 0
        on_cuda = device.type == "cuda"
        self.allocating: AbstractContextManager[None] = _torch.memory(device, groups) if on_cuda else nullcontext()
        self.released: tuple[Ticket, ...] = ()  # when its last reader has finished


class Pool:
    """Storage that a lane writes and compute reads, or the reverse.

    On CUDA the storage comes from private memory pools and belongs to the lane's stream. A release records an event on
    the releasing stream, and the next user of that memory waits for it: so a reused block is never written while it is
    still read, and no ``record_stream`` delays its reuse.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.refresh_lane = lane  # on which compute weights that rest are brought up to date
        self.live_bytes = 0
        self.peak_bytes = 0
        self.live_buffers = 0
        self.peak_buffers = 0
        self.groups: Sequence[ProcessGroup] = ()  # which its memory is registered with
        self.sent = DONE  # the last copy from host memory
        self._allocating = None if lane.stream is None else _torch.memory(lane.device)
        self.num_slots = 0
        self._free: list[_Slot] = []
        self._taken: dict[int, _Slot] = {}  # by the storage that has it
        self._lasting: dict[int, torch.cuda.Stream] = {}  # by storage, the stream that its memory belongs to
        self._kept_memory: list[object] | None = None  # what keeps memory alive, within `keeping_memory`
        self._end: weakref.finalize[[Lane], Pool] | None = None

    def register(self, groups: Sequence[ProcessGroup]) -> None:
        """From now on, register memory with NCCL for these process groups, which have communicated before."""
        self.drop()
        self.groups, self._allocating = groups, _torch.memory(self.lane.device, groups)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that has a size but no storage yet. Views of it can be made once it has been allocated."""
        if self.lane.stream is None:
            tensor = torch.empty(numel, dtype=dtype, device=self.lane.device)
        else:
            slot = self._take(numel * dtype.itemsize)
            try:
                # The slot may still be read, and torch fills new tensors in its deterministic mode.
                with self.lane.entered(slot.released), slot.allocating:
                    tensor = torch.empty(numel, dtype=dtype, device=self.lane.device)
                    slot.released = (self.lane.mark(),)
            finally:
                self._free.append(slot)
        tensor.untyped_storage().resize_(0)
        return tensor

    def temporary(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor for the lane's own use; it must be kept until the lane's work on it has been waited for."""
        if self._allocating is None:
            return torch.empty(numel, dtype=dtype, device=self.lane.device)
        with self.lane.entered(), self._allocating:
            return torch.empty(numel, dtype=dtype, device=self.lane.device)

    def allocate(self, tensor: torch.Tensor, lasting: bool = False, for_current_stream: bool = False) -> None:
        """Allocate the storage of a tensor; its values are undefined. No effect if it has storage.

        ``lasting`` storage comes from the ordinary heap of the current stream, not from slots.
        ``for_current_stream``: the current stream writes it, not the lane.
        """
        storage = tensor.untyped_storage()
        size = tensor.nbytes
        if storage.nbytes() or not size:
            return
        if self.lane.stream is None:
            storage.resize_(size)
        elif lasting:
            storage.resize_(size)
            if not for_current_stream:
                with self.lane.after_current_stream():
                    pass  # what the current stream still does with that memory comes first
            self._lasting[storage._cdata] = _torch.current_stream(self.lane.device.index)
        else:
            slot = self._take(size)
            try:
                for ticket in slot.released if for_current_stream else ():
                    ticket.wait()
                with self.lane.entered(() if for_current_stream else slot.released), slot.allocating:
                    storage.resize_(size)
            except BaseException:  # out of memory
                self._free.append(slot)
                raise
            slot.released = ()
            self._taken[storage._cdata] = slot
        self.live_bytes += size
        self.live_buffers += 1
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.live_buffers > self.peak_buffers:
            self.peak_buffers = self.live_buffers

    def release(self, tensor: torch.Tensor, keep: bool = False) -> None:
        """Free the storage after all work that has been enqueued on the current stream.

        Work of the lane itself on the storage is ordered before its next use; work of any other stream must have been
        waited for. With ``keep``, only let the lane write it again.
        """
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if keep:
            with self.lane.after_current_stream():
                pass
        if keep or not size:
            return
        if self.lane.stream is not None:
            slot, heap = self._taken.pop(storage._cdata, None), self._lasting.pop(storage._cdata, None)
            if slot is not None:
                slot.released = (self.lane.mark(),)
                self._free.append(slot)
            elif heap is not None and heap != _torch.current_stream(self.lane.device.index):
                self.lane.mark().order_before(heap)
        storage.resize_(0)
        self.live_bytes -= size
        self.live_buffers -= 1

    @contextmanager
    def keeping_memory(self) -> Iterator[list[object]]:
        """Yields what keeps alive the memory of tensors that are allocated within: a graph depends on addresses."""
        memory = self._kept_memory = [
            self._allocating,
            *[slot.allocating for slot in (*self._free, *self._taken.values())],
        ]
        try:
            yield memory
        finally:
            self._kept_memory = None

    def drop(self) -> None:
        """Free the memory of all unused slots, once all streams have finished with it."""
        with self.lane.entered([ticket for slot in self._free for ticket in slot.released]):
            pass
        self.num_slots -= len(self._free)
        self._free = []

    def _take(self, size: int) -> _Slot:
        """A free slot for this many bytes: the smallest that fits, or a new one if that would waste too much."""
        fitting = [slot for slot in self._free if slot.least <= size <= slot.size]
        if not fitting:
            return self._make(size)
        # Among slots of equal size, the one released first, for which the lane waits the least.
        slot = min(fitting, key=lambda slot: slot.size)
        self._free.remove(slot)
        return slot

    def _make(self, size: int) -> _Slot:
        slot = _Slot(size, self.lane.device, self.groups)
        if self._kept_memory is not None:
            self._kept_memory.append(slot.allocating)
        if self.lane.stream is not None:
            if self._end is None:
                self._end = weakref.finalize(self, _return_slots, self.lane)
                self._end.atexit = False
            with self.lane.entered(), slot.allocating:
                torch.empty(slot.size, dtype=torch.uint8, device=self.lane.device)  # reserves it; freed at once
                slot.released = (self.lane.mark(),)  # torch fills it in its deterministic mode
        self.num_slots += 1
        return slot


def _return_slots(lane: Lane) -> None:
    """Return the slots of a pool to the device, after the lane has waited for all work of the current stream.

    With expandable segments, torch unmaps memory when its own stream has finished with it, even if another stream reads
    it.
    """
    if lane.stream is not None:
        lane.mark().order_before(lane.stream)
