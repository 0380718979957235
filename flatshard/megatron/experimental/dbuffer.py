"""`DBuffer`: several tensors in one flat local tensor, as Megatron-FSDP's second version shows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatshard import _torch, buffer, layout
from flatshard.buffer.dtensor import as_dtensor
from flatshard.layout import Layout, Segment, Slot, is_sharded
from flatshard.layout.planner import ALIGN, round_up
from flatshard.megatron.experimental.placement import Partial as Partial  # others import it from here
from flatshard.megatron.experimental.placement import Placement, Replicate, to_engine, to_torch


@dataclass(frozen=True)
class GlobalLayout:
    """Where tensors lie in the whole buffer: one run of ``size`` elements, cut into equal pieces for all ranks."""

    tensor_shapes: tuple[torch.Size, ...]
    engine: Layout
    block_size: int = 1

    @classmethod
    def build(cls, tensor_shapes: Iterable[Sequence[int]], dp_size: int, block_size: int = 1) -> GlobalLayout:
        """Tensors one after another; a piece is a multiple of all rows, so that it splits none."""
        shapes = tuple(torch.Size(shape) for shape in tensor_shapes)
        slots, end = [], 0
        for shape in shapes:
            row = max(math.prod(shape[1:]), 1)
            atom = row * block_size
            end = round_up(end, atom)
            slots.append(Slot(0, end, tuple(shape), row, atom))
            end += shape.numel()
        step = math.lcm(ALIGN, *(slot.atom for slot in slots))
        piece = round_up(end, dp_size * step) // dp_size
        return cls(shapes, Layout(tuple(slots), (Segment(piece),), dp_size, layout.Flat()), block_size)

    size = property(lambda self: self.engine.buffer_numel(self.engine.num_shards), doc="Of the whole, in elements.")
    tensor_to_offset = property(
        lambda self: tuple(slot.offset for slot in self.engine.slots), doc="The first element of each tensor."
    )


Shapes: TypeAlias = Iterable[Sequence[int]] | GlobalLayout


class DBuffer:
    """Tensors of ``tensor_shapes`` (or of another buffer's layout), as far as this rank holds them.

    ``local_buffer`` is its memory, ``offset`` where that begins in the whole. Methods that communicate have ``out`` for
    a buffer to write to, which may lie in the memory of this one.
    """

    # fmt: off
    def __init__(
        self, mesh: DeviceMesh, placements: Iterable[Placement], tensor_shapes: Shapes, dtype: torch.dtype,
        device: torch.device | str, *, local: torch.Tensor | None = None,
        allocation_stream: torch.cuda.Stream | None = None,
    ) -> None:
        # fmt: on
        self.mesh, self.placements = mesh, tuple(placements)
        if len(self.placements) != mesh.ndim:
            raise ValueError(f"{len(self.placements)} placements were given for a mesh of {mesh.ndim} axes")
        blocks = {rows for each in map(to_engine, self.placements) if (rows := getattr(each, "rows", None))}
        self.layout = tensor_shapes if isinstance(tensor_shapes, GlobalLayout) else GlobalLayout.build(
            tensor_shapes, mesh.size(), math.lcm(1, *blocks)
        )  # fmt: skip
        cut = _cut(self.placements)
        if local is None:
            self._engine = buffer.DBuffer.zeros(self.layout.engine, mesh, cut, dtype=dtype, device=device)
        else:
            self._engine = buffer.DBuffer(self.layout.engine, mesh, cut, local)
        if allocation_stream is None and self.device.type == "cuda":
            allocation_stream = torch.cuda.current_stream(self.device)
        self.allocation_stream = allocation_stream  # on which its memory was made; None where there are none

    @classmethod
    def empty(cls, *args: Any, **kwargs: Any) -> DBuffer:
        """A new buffer; arguments are those of the class."""
        return cls(*args, **kwargs)

    @classmethod
    def from_local(
        cls, local_buffer: torch.Tensor, mesh: DeviceMesh, placements: Iterable[Any], tensor_shapes: Shapes, **on: Any
    ) -> DBuffer:
        """A buffer over memory that is there: flat, contiguous, and of the right size. ``allocation_stream``: its."""
        if local_buffer.dim() != 1 or not local_buffer.is_contiguous():
            raise ValueError("local_buffer must be flat and contiguous")
        dtype, device = local_buffer.dtype, local_buffer.device
        return cls(mesh, placements, tensor_shapes, dtype, device, local=local_buffer, **on)

    @classmethod
    def distribute_tensors(
        cls, tensors: Iterable[torch.Tensor], mesh: DeviceMesh, placements: Iterable[Placement], *, block_size: int = 1
    ) -> DBuffer:
        """Keep this rank's part of whole tensors that it has. Nothing is communicated."""
        given = [tensor.detach().contiguous() for tensor in tensors]
        if not given:
            raise ValueError("a buffer needs at least one tensor")
        if len({tensor.dtype for tensor in given}) > 1:
            raise ValueError(f"the tensors of a buffer have one dtype, not {[tensor.dtype for tensor in given]}")
        layout = GlobalLayout.build([tensor.shape for tensor in given], mesh.size(), block_size)
        made = cls(mesh, placements, layout, given[0].dtype, mesh.device_type)
        for index, tensor in enumerate(given):
            made.get_local_tensor(index).copy_(made._engine.rows_of(index, tensor))
        return made

    local_buffer = property(lambda self: self._engine.local, doc="What this rank holds, flat.")
    dtype = property(lambda self: self._engine.dtype)
    device = property(lambda self: self._engine.device)
    is_symmetric_memory = property(lambda self: _torch.is_symmetric(self.local_buffer), doc="From torch 2.12 on.")
    offset = property(
        lambda self: self._engine.held.first * self.layout.engine.segments[0].piece,
        doc="Where `local_buffer` begins in the whole buffer.",
    )

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """What this rank holds of a tensor: rows, none, or all of it."""
        return self._engine.local_view(index)

    get_tensor_view = get_local_tensor

    def get_dtensor(self, index: int) -> DTensor:
        """A tensor as a DTensor over this memory, placed as the buffer is."""
        wanted = tuple(map(to_torch, self.placements))
        if _torch.SUBCLASSES_DISPATCH and not any(placement.is_partial() for placement in wanted):
            return as_dtensor(self._engine, index)  # which knows its rows
        meta = torch.empty(self.layout.tensor_shapes[index], device="meta")
        return _torch.make_dtensor(self.get_local_tensor(index), self.mesh, wanted, meta.shape, meta.stride())

    def release_storage(self) -> None:
        """Free the memory; views of it stay, and are valid again after `reallocate_storage`."""
        self.local_buffer.untyped_storage().resize_(0)

    def reallocate_storage(self) -> None:
        """Give the buffer memory again, without values."""
        self.local_buffer.untyped_storage().resize_(self.local_buffer.numel() * self.local_buffer.element_size())

    def rendezvous(self, mesh_axis: int) -> None:
        """Let the ranks of an axis know of each other's memory, which must be symmetric. CUDA only."""
        if self.device.type != "cuda":
            raise ValueError(f"rendezvous: symmetric memory is CUDA's, and this buffer is on {self.device}")
        _torch.rendezvous(self.local_buffer, self.mesh.get_group(mesh_axis))

    def view(self, placements: Iterable[Placement]) -> DBuffer:
        """The same memory, or a part of it, under placements that need no communication."""
        wanted = tuple(placements)
        for old, new in zip(map(to_engine, self.placements), map(to_engine, wanted)):
            if is_sharded(old) and not is_sharded(new):
                raise ValueError(f"DBuffer.view: {old} does not hold what {new} shows; use redistribute")
        held = DBuffer(self.mesh, wanted, self.layout, self.dtype, "meta")
        begin = held.offset - self.offset
        local = self.local_buffer[begin : begin + held.local_buffer.numel()]
        return DBuffer.from_local(local, self.mesh, wanted, self.layout, allocation_stream=self.allocation_stream)

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """The same values in another dtype; itself where nothing changes."""
        if out is None and dtype == self.dtype:
            return self
        target = self._target(out, self.placements, dtype)
        target.local_buffer.copy_(self.local_buffer)
        return target

    def redistribute(self, new_placements: Iterable[Placement], *, out: DBuffer | None = None) -> DBuffer:
        """The same values under other placements."""
        wanted = tuple(new_placements)
        if wanted == self.placements and out is None:
            return self
        source, cut, relabelled = self._engine, _cut(wanted), []
        for old, new in zip(source.placements, cut):
            if isinstance(old, layout.Replicate) and isinstance(new, layout.Partial):
                if new.op != "avg":
                    raise NotImplementedError("equal values on all ranks are their average, not addends of their sum")
                old = new
            relabelled.append(old)
        source = buffer.DBuffer(self.layout.engine, self.mesh, relabelled, source.local)
        if out is None and cut == list(source.placements):
            return DBuffer(self.mesh, wanted, self.layout, self.dtype, self.device, local=self.local_buffer)
        target = self._target(out, wanted, self.dtype)
        own = target.local_buffer.untyped_storage().data_ptr() == self.local_buffer.untyped_storage().data_ptr()
        result = source.redistribute(cut, out=None if own else target._engine)
        if own:
            target.local_buffer.copy_(result.local)
        return target

    def allgather(self, mesh_axis: int, *, out: DBuffer | None = None) -> DBuffer:
        """A sharded axis becomes Replicate."""
        return self._change(mesh_axis, Replicate(), "allgather", out)

    def allreduce(self, mesh_axis: int, *, out: DBuffer | None = None) -> DBuffer:
        """A Partial axis becomes Replicate."""
        return self._change(mesh_axis, Replicate(), "allreduce", out)

    def reduce_scatter(self, mesh_axis: int, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """A Partial axis becomes sharded."""
        return self._change(mesh_axis, new_placement, "reduce_scatter", out)

    def scatter(self, mesh_axis: int, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """A Replicate axis becomes sharded: a view of this memory, or written to ``out``. Nothing is communicated."""
        return self._change(mesh_axis, new_placement, "scatter", out)

    def _change(self, axis: int, new: Placement, method: str, out: DBuffer | None) -> DBuffer:
        if not isinstance(self._engine.placements[axis], _CHANGED_BY[method]):
            raise ValueError(f"{method}: axis {axis} is placed {self.placements[axis]}")
        wanted = [*self.placements[:axis], new, *self.placements[axis + 1 :]]
        return self.view(wanted) if method == "scatter" and out is None else self.redistribute(wanted, out=out)

    def _target(self, out: DBuffer | None, placements: tuple[Placement, ...], dtype: torch.dtype) -> DBuffer:
        if out is None:
            return DBuffer(self.mesh, placements, self.layout, dtype, self.device)
        wanted = _cut(placements)
        found = (out.mesh, list(out._engine.placements), out.layout, out.dtype)
        if found != (self.mesh, wanted, self.layout, dtype):
            raise ValueError(f"`out` must have placements {wanted}, this buffer's mesh and layout, and dtype {dtype}")
        return out


# What an axis is placed as before each of these; a buffer of the engine has no other cut than this.
_CHANGED_BY: dict[str, type] = {"allgather": layout.Flat, "scatter": layout.Replicate}
_CHANGED_BY |= dict.fromkeys(("allreduce", "reduce_scatter"), layout.Partial)


def _cut(placements: Iterable[Placement]) -> list[layout.Placement]:
    """For the engine: pieces of the layout have whole rows or blocks, so that any cut is one of rows."""
    return [layout.Flat() if is_sharded(each) else each for each in map(to_engine, placements)]
