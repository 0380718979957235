"""Where the full weights of a group come from: one class per way. `source_for` chooses it, once.

`OfMain`      main itself: every rank has all of it, in the compute dtype
`Compute`     persistent compute weights, if every rank has all of them; refreshed from main after a step
`Gathered`    a buffer that is allocated for each use and gathered from shards of main or of persistent compute weights,
              or in a backward from shards on the post-forward mesh
`FromBytes`   the same for encoded shards: gathered bytes are decoded when the weights are needed
`Decoded`     tensor subclasses, which encode and decode themselves (extensions.py)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer import DONE, DBuffer, Pool, Ticket, turns
from flatshard.engine.weights.codec import Blocks, Cast
from flatshard.engine.weights.offload import Home, HostCopy
from flatshard.layout import Flat, Layout, Placement, Replicate
from flatshard.policy import Placements


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Create tensors that outlive the running pass: without a graph, and not in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Source:
    """Provides the full weights of a group on this rank and frees their memory.

    After the ticket of `gather` has been waited for, `open` makes the weights usable by the current stream. `full`
    returns those of a param: the same tensors from the first `open` on, with or without storage.
    """

    is_resident = False  # the full weights are always on this rank: a pass neither gathers nor releases them
    opens = True  # `open` does something
    is_gathered_twice = False  # along the outer axis once per step, and along the inner one for each pass
    buffer: DBuffer | None = None  # full weights are views of it, except `Layout.turned` ones
    compute: Compute | None = None  # persistent compute weights, if their placement differs from main's
    host_copy: HostCopy | None = None  # sends main, if that is in host memory and gathers read it
    keeps_storage = False  # full weights keep their memory while they are not gathered, and so their addresses

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        """Start. ``lasting``: the weights stay for several passes. ``comm``: an ``AllGather`` of torch's to use."""
        raise NotImplementedError

    def open(self) -> None:
        """Make the gathered weights usable."""

    def full(self, index: int) -> torch.Tensor:
        """The full weights of a param, with their own version counter: autograd saves them, and later gathers write."""
        raise NotImplementedError

    def mark_stale(self) -> None:
        """Main may have changed: derive everything from it again at the next gather."""

    def release(self) -> None:
        """Free the memory, once the current stream has finished with it."""

    def cancel(self) -> None:
        """Free what a gather has allocated that has raised."""
        self.release()

    def keep_post_forward_shard(self, mesh: DeviceMesh) -> None:
        """Before the reshard after forward: copy this rank's shard on a smaller mesh, for the backward to gather."""

    def drop_post_forward_shard(self) -> None:
        """Free that shard: the backward has ended."""

    @property
    def launches(self) -> bool:
        """Whether the next gather communicates."""
        return True

    @property
    def decodes(self) -> bool:
        """Whether the next gather fetches encoded bytes, which `open` decodes into full weights."""
        return False


class OfMain(Source):
    is_resident = True
    launches = False

    def __init__(self, main: DBuffer) -> None:
        self.buffer = self._main = main

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        return Ticket()

    def full(self, index: int) -> torch.Tensor:
        return self._main.local_view(index).data


class _Turned:
    """The full weights that are sharded on another dim than 0, copied from the gathered buffer into their own order."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._flat: dict[int, torch.Tensor] = {}
        self._pool: Pool | None = None

    def allocate(self, pool: Pool, for_current_stream: bool = False) -> None:
        self._pool = pool
        for index in self._layout.turned:
            if index not in self._flat:
                self._flat[index] = pool.empty(self._layout.slots[index].numel, self._dtype)
            pool.allocate(self._flat[index], for_current_stream=for_current_stream)

    def view(self, index: int) -> torch.Tensor:
        return self._flat[index].view(self._layout.slots[index].shape)

    def fill(self, gathered: DBuffer) -> None:
        pairs = []
        for index in self._layout.turned:
            pairs += turns(self._layout, index, gathered.run_of(index), self.view(index))
        if pairs:
            torch._foreach_copy_([whole for _, whole in pairs], [part for part, _ in pairs])

    def release(self, keep: bool = False) -> None:
        for flat in self._flat.values():
            assert self._pool is not None
            self._pool.release(flat, keep)


class Compute(Source):
    """Persistent compute weights: less sharded than main, and refreshed from it when they are stale.

    A source if this rank has all of them; otherwise `Gathered` gathers from them, and with a codec that encodes they
    are encoded. Weights that are sharded on another dim than 0 are reordered in place.
    """

    is_resident = True

    def __init__(self, main: DBuffer, codec: Cast | Blocks, home: Home, placements: Placements) -> None:
        self._main, self._codec, self._home, self._placement = main, codec, home, placements.parameter
        self.is_stale = True
        self._in_use: list[DBuffer] = []  # by the running refresh
        self.done = DONE  # of the last refresh
        self.has_read = DONE  # the last refresh has read main, which may be written again
        self._turned = main.layout.turned if _everywhere(self._placement) else frozenset[int]()

    def refresh(self, pool: Pool, name: str) -> tuple[DBuffer, Ticket]:
        """Bring the weights up to date. Returns them, and the ticket to wait for."""
        main, buffer, codec = self._main, self.buffer, self._codec
        lane = pool.lane if self._home.host or not isinstance(codec, Cast) else pool.refresh_lane
        decodes = isinstance(codec, Blocks) and _everywhere(self._placement)
        with lane.entered():
            if buffer is None:
                layout, dtype = main.layout, codec.dtype
                if isinstance(codec, Blocks) and not decodes:
                    layout, dtype = codec.layout, torch.uint8
                device = self._home.device
                buffer = DBuffer.zeros(layout, main.mesh, self._placement, dtype=dtype, device=device)
                self.buffer = buffer
            if not self.is_stale or not buffer.runs():
                return buffer, self.done
            if lane.stream is None:
                self.done.wait()  # the CPU may run this all-gather beside an earlier one that nothing has waited for
            fetched, wire = self._home.on_device(main, pool), buffer
            if isinstance(codec, Cast):
                codec.encode(fetched.runs(), buffer.runs(main.held))
            else:
                if decodes:
                    make = functools.partial(pool.temporary, dtype=torch.uint8)
                    wire = DBuffer.made(codec.layout, main.mesh, self._placement, make)
                codec.encode(fetched, wire)
            self._in_use = [fetched, wire]
            self.has_read = self.done = lane.mark()
            if self._placement != main.placements:
                self.done = wire.gather_in_place(main.placements, lane=lane, name=f"refresh {name}")
            if isinstance(codec, Blocks) and decodes:
                self.done = lane.follow(self.done, functools.partial(codec.decode, wire, buffer))
            if self._turned:
                self.done = lane.follow(self.done, self._turn)
            self.is_stale = False
            return buffer, self.done

    @property
    def compute(self) -> Compute:  # type: ignore[override]
        return self

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        return self.refresh(pool, name)[1]

    def full(self, index: int) -> torch.Tensor:
        return self._whole(index).data

    def _whole(self, index: int) -> torch.Tensor:
        """A full weight, if this rank has all of them."""
        assert self.buffer is not None
        if index not in self._turned:
            return self.buffer.local_view(index)
        slot = self._main.layout.slots[index]
        return self.buffer.run_of(index)[: slot.numel].view(slot.shape)

    def _turn(self) -> None:
        assert self.buffer is not None
        for index in self._turned:
            run = self.buffer.run_of(index).clone()
            for part, whole in turns(self._main.layout, index, run, self._whole(index)):
                whole.copy_(part)

    @property
    def launches(self) -> bool:
        """Whether the next refresh communicates."""
        return self.is_stale and self._placement != self._main.placements

    def open(self) -> None:
        """The last refresh has been waited for."""
        self._in_use = []

    def mark_stale(self) -> None:
        self.is_stale = True


class Gathered(Source):
    """Full weights are views of one buffer, or turned. They are gathered from ``compute``, or from main without it."""

    opens = False

    def __init__(self, main: DBuffer, codec: Cast | Blocks, home: Home, compute: Compute | None) -> None:
        self._turned = _Turned(main.layout, codec.dtype) if main.layout.turned else None
        self.compute = compute
        self._main, self._home, self._dtype = main, home, codec.dtype
        self._cast = codec if isinstance(codec, Cast) else None
        if home.host and self._cast is not None and compute is None:
            self.host_copy = HostCopy(home, main, codec.dtype)
        self._pool: Pool | None = None
        self._own: list[torch.Tensor] | None = None  # this rank's runs of the buffer
        self._post_forward: tuple[DBuffer, Ticket] | None = None  # this rank's shard on a smaller mesh, once copied
        self._is_empty = not main.layout.payload  # collectives do not accept an empty list
        self._is_sharded = not _everywhere(main.placements)
        sends_main = self._cast is not None and self._cast.sends_main and self._is_sharded and not home.host
        self._part = main if sends_main else None  # this rank's input of the all-gather, if it needs no cast
        self.is_gathered_twice = compute is not None and self._cast is not None and compute.launches

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        self._pool = pool  # a unit with a new root has another pool
        part, refreshed = (self._part, DONE) if self.compute is None else self.compute.refresh(pool, name)
        buffer, lane = self._allocated(pool, lasting), pool.lane
        if self._is_empty:
            return Ticket()
        with lane.inside if refreshed is DONE else lane.entered((refreshed,)):
            if self._post_forward is not None:
                part, copied = self._post_forward
                # The gathered buffer as the smaller mesh sees it.
                seen, after = DBuffer(buffer.layout, part.mesh, [Replicate()], buffer.local), (copied,)
                ticket = seen.gather_in_place(part.placements, lane=lane, own=part, after=after, name=name, comm=comm)
            elif part is not None:
                ticket = buffer.gather_in_place(part.placements, lane=lane, own=part, name=name, comm=comm)
            else:
                ticket = self._from_main(buffer, pool, name, comm)
        if self._turned is None:
            return ticket
        return lane.follow(ticket, functools.partial(self._turned.fill, buffer))

    def full(self, index: int) -> torch.Tensor:
        if self._turned is not None and index in self._main.layout.turned:
            return self._turned.view(index).data
        assert self.buffer is not None
        return self.buffer.local_view(index).data

    @property
    def launches(self) -> bool:
        return self.compute is not None or self._is_sharded

    def _allocated(self, pool: Pool, lasting: bool, for_current_stream: bool = False) -> DBuffer:
        """The buffer of full weights, with storage. ``for_current_stream``: that stream writes it, not the lane."""
        buffer = self.buffer
        if buffer is None:
            buffer = self.buffer = self._unallocated(self._main.layout, self._dtype, pool)
        pool.allocate(buffer.local, lasting, for_current_stream)
        if self._turned is not None:
            self._turned.allocate(pool, for_current_stream)
        return buffer

    def _unallocated(self, layout: Layout, dtype: torch.dtype, pool: Pool) -> DBuffer:
        """A buffer for the shards of all ranks, without storage."""
        mesh, local = self._main.mesh, pool.empty(layout.buffer_numel(layout.num_shards), dtype)
        return DBuffer(layout, mesh, [Replicate()] * mesh.ndim, local)

    def _from_main(self, buffer: DBuffer, pool: Pool, name: str, comm: Any) -> Ticket:
        main, lane, cast = self._main, pool.lane, self._cast
        assert cast is not None
        if self._own is None:
            self._own = buffer.runs(main.held)
        if self.host_copy is not None:
            self.host_copy.send(self._own, pool)
        else:
            cast.encode(main.runs(), self._own)
        if not self._is_sharded:
            return lane.mark()
        return buffer.gather_in_place(main.placements, lane=lane, name=name, comm=comm)

    def release(self) -> None:
        if self.compute is not None:
            self.compute.open()
        if self.buffer is not None and self._pool is not None:
            self._pool.release(self.buffer.local, self.keeps_storage)
        if self._turned is not None:
            self._turned.release(self.keeps_storage)

    def cancel(self) -> None:
        if self.compute is not None:
            self.compute.done.wait()  # nothing else waits for a refresh
        if self._pool is not None:
            self._pool.lane.join()  # the lane may still use the memory
        self.release()

    def mark_stale(self) -> None:
        self._post_forward = None
        if self.host_copy is not None:
            self.host_copy.mark_stale()
        if self.compute is not None:
            self.compute.is_stale = True

    def keep_post_forward_shard(self, mesh: DeviceMesh) -> None:
        if self.buffer is None or self._post_forward is not None or not self._is_sharded:
            return
        dtype, device = self._dtype, self._home.device
        part = DBuffer.zeros(self._main.layout, mesh, [Flat()], dtype=dtype, device=device)
        if part.runs():
            torch._foreach_copy_(part.runs(), self.buffer.runs(part.held))
        assert self._pool is not None
        self._post_forward = part, self._pool.lane.mark()

    def drop_post_forward_shard(self) -> None:
        self._post_forward = None


class FromBytes(Gathered):
    """Encoded shards are gathered into separate memory, which is freed once they are decoded.

    They are decoded when the full weights are needed, on the stream that needs them: on the lane, decoding would slow
    down matrix products for longer than it takes alone.
    """

    def __init__(self, main: DBuffer, codec: Blocks, home: Home, compute: Compute) -> None:
        super().__init__(main, codec, home, compute)
        self.opens = True
        self._blocks = codec
        self._wire: DBuffer | None = None
        self._is_open = True
        self._lasting = False  # of the last `gather`

    @property
    def decodes(self) -> bool:
        return self._post_forward is None and not self._is_empty

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        if not self.decodes:
            return super().gather(pool, name, lasting, comm)
        assert self.compute is not None
        self._pool, self._lasting = pool, lasting
        part, refreshed = self.compute.refresh(pool, name)
        wire = self._wire
        if wire is None:
            wire = self._wire = self._unallocated(self._blocks.layout, torch.uint8, pool)
        pool.allocate(wire.local, lasting)
        self._is_open = False
        with pool.lane.entered(() if refreshed is DONE else (refreshed,)):
            return wire.gather_in_place(part.placements, lane=pool.lane, own=part, name=name, comm=comm)

    def open(self) -> None:
        if self._is_open:
            return
        pool, wire = self._pool, self._wire
        assert pool is not None
        assert wire is not None
        with lasting_tensors() if torch.is_inference_mode_enabled() else nullcontext():
            buffer = self._allocated(pool, self._lasting, for_current_stream=True)
            self._blocks.decode(wire, buffer)
            pool.release(wire.local)
            if self._turned is not None:
                self._turned.fill(buffer)
        self._is_open = True

    def keep_post_forward_shard(self, mesh: DeviceMesh) -> None:
        self.open()  # also on a rank that has skipped the unit: the others gather from its shard
        super().keep_post_forward_shard(mesh)

    def release(self) -> None:
        super().release()
        self._is_open = True
        if self._wire is not None and self._pool is not None:
            self._pool.release(self._wire.local)


def source_for(main: DBuffer, placements: Placements, codec: Cast | Blocks, home: Home, is_held: bool) -> Source:
    """The source for these placements, codec and home. ``is_held``: it keeps main's current values if main changes."""
    everywhere = _everywhere(placements.parameter)
    if isinstance(codec, Blocks):
        encoded = Compute(main, codec, home, placements)
        return encoded if everywhere else FromBytes(main, codec, home, encoded)
    if is_held or placements.parameter != placements.optimizer:
        compute = Compute(main, codec, home, placements)
        return compute if everywhere else Gathered(main, codec, home, compute)
    if everywhere and codec.sends_main and not home.host:
        return OfMain(main)
    return Gathered(main, codec, home, None)


def _everywhere(placements: Sequence[Placement]) -> bool:
    return all(isinstance(placement, Replicate) for placement in placements)
