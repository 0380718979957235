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
from flatshard.megatron.experimental.placement import BlockAtomic, Placement, Replicate, to_engine, to_torch
from flatshard.megatron.experimental.placement import Flat as Flat  # both are imported from here
from flatshard.megatron.experimental.placement import Partial as Partial
from flatshard.megatron.experimental.redistribute import redistribute


@dataclass(frozen=True)
class GlobalLayout:
    """The offsets of tensors in the whole buffer of ``size`` elements, of which every rank has an equal piece."""

    tensor_shapes: tuple[torch.Size, ...]
    engine: Layout
    block_size: int = 1

    @classmethod
    def build(cls, tensor_shapes: Iterable[Sequence[int]], dp_size: int, block_size: int = 1) -> GlobalLayout:
        """Place tensors one after another. The piece of a rank is a multiple of every row size, so no row is split."""
        shapes = tuple(torch.Size(shape) for shape in tensor_shapes)
        slots, end, step = [], 0, ALIGN
        for shape in shapes:
            row = max(math.prod(shape[1:]), 1)
            end = round_up(end, row * block_size)
            slots.append(Slot(0, end, tuple(shape), row))
            end, step = end + shape.numel(), math.lcm(step, row * block_size)
        piece = round_up(end, dp_size * step) // dp_size
        return cls(shapes, Layout(tuple(slots), (Segment(piece),), dp_size), block_size)

    size = property(lambda self: self.engine.buffer_numel(self.engine.num_shards), doc="Elements of the whole.")
    tensor_to_offset = property(
        lambda self: tuple(slot.offset for slot in self.engine.slots), doc="Where each tensor starts in the whole."
    )


Shapes: TypeAlias = Iterable[Sequence[int]] | GlobalLayout


class DBuffer:
    """This rank's part of several tensors, in one flat ``local_buffer`` that starts at ``offset`` of the whole.

    ``tensor_shapes`` may be the ``layout`` of another buffer. Methods that communicate write to ``out`` if it is given;
    it may be a view of this buffer's memory.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Iterable[Placement], tensor_shapes: Shapes, dtype: torch.dtype,
        device: torch.device | str, *, local: torch.Tensor | None = None,
        allocation_stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.placements = mesh, tuple(placements)
        blocks = {each.rows for each in self.placements if isinstance(each, BlockAtomic)}
        self.layout = tensor_shapes if isinstance(tensor_shapes, GlobalLayout) else GlobalLayout.build(
            tensor_shapes, mesh.size(), math.lcm(1, *blocks)
        )  # fmt: skip
        cut = list(map(to_engine, self.placements))
        if local is None:
            self._engine = buffer.DBuffer.zeros(self.layout.engine, mesh, cut, dtype=dtype, device=device)
        else:
            self._engine = buffer.DBuffer(self.layout.engine, mesh, cut, local)
        if allocation_stream is None and self.device.type == "cuda":
            allocation_stream = torch.cuda.current_stream(self.device)
        self.allocation_stream = allocation_stream  # None on a device without streams
        self.offset = self._engine.held.first * self.layout.engine.segments[0].piece  # of `local_buffer` in the whole

    @classmethod
    def empty(cls, *args: Any, **kwargs: Any) -> DBuffer:
        """A new buffer. The arguments are those of the class."""
        return cls(*args, **kwargs)

    @classmethod
    def from_local(
        cls, local_buffer: torch.Tensor, mesh: DeviceMesh, placements: Iterable[Any], tensor_shapes: Shapes, **on: Any
    ) -> DBuffer:
        """A buffer over existing memory. ``allocation_stream`` may say on which stream that was allocated."""
        if local_buffer.dim() != 1 or not local_buffer.is_contiguous():
            actual = f"shape {tuple(local_buffer.shape)} and stride {local_buffer.stride()}"
            raise ValueError(f"local_buffer has {actual}; it must be flat and contiguous")
        dtype, device = local_buffer.dtype, local_buffer.device
        return cls(mesh, placements, tensor_shapes, dtype, device, local=local_buffer, **on)

    @classmethod
    def distribute_tensors(
        cls, tensors: Iterable[torch.Tensor], mesh: DeviceMesh, placements: Iterable[Placement], *, block_size: int = 1
    ) -> DBuffer:
        """Keep this rank's part of whole tensors that every rank has. Nothing is communicated."""
        given, placements = [tensor.to(mesh.device_type) for tensor in tensors], tuple(placements)
        layout = GlobalLayout.build([tensor.shape for tensor in given], mesh.size(), block_size)
        made = buffer.DBuffer.distribute(given, layout.engine, mesh, list(map(to_engine, placements)))
        return cls.from_local(made.local, mesh, placements, layout)

    local_buffer = property(lambda self: self._engine.local, doc="The memory of this rank's part.")
    dtype = property(lambda self: self._engine.dtype)
    device = property(lambda self: self._engine.device)
    is_symmetric_memory = property(lambda self: _torch.is_symmetric(self.local_buffer), doc="False before torch 2.12.")

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """This rank's rows of a tensor: some, none, or all of them."""
        return self._engine.local_view(index)

    get_tensor_view = get_local_tensor

    def get_dtensor(self, index: int) -> DTensor:
        """A tensor as a DTensor over this memory, with the placements of the buffer."""
        wanted = tuple(map(to_torch, self.placements))
        if not any(placement.is_partial() for placement in wanted):
            return as_dtensor(self._engine, index)  # stores which rows it has
        return _torch.make_dtensor(self.get_local_tensor(index), self.mesh, wanted, self.layout.tensor_shapes[index])

    def release_storage(self) -> None:
        """Free the memory. Views of it are valid again after `reallocate_storage`."""
        self.local_buffer.untyped_storage().resize_(0)

    def reallocate_storage(self) -> None:
        """Allocate the memory again; its values are undefined."""
        self.local_buffer.untyped_storage().resize_(self.local_buffer.numel() * self.local_buffer.element_size())

    def rendezvous(self, mesh_axis: int) -> None:
        """Exchange the addresses of symmetric memory among the ranks of an axis, all of which call it. CUDA only."""
        if self.device.type != "cuda":
            raise ValueError(f"rendezvous: this buffer is on {self.device}; symmetric memory needs CUDA")
        _torch.rendezvous(self.local_buffer, self.mesh.get_group(mesh_axis))

    def view(self, placements: Iterable[Placement]) -> DBuffer:
        """A buffer over the same memory, or a part of it. ValueError if the placements need communication."""
        wanted = tuple(placements)
        for old, new in zip(map(to_engine, self.placements), map(to_engine, wanted)):
            if is_sharded(old) and not is_sharded(new):
                raise ValueError(f"DBuffer.view: an axis placed {old} does not hold all of {new}; use redistribute")
        held = DBuffer(self.mesh, wanted, self.layout, self.dtype, "meta")
        begin = held.offset - self.offset
        local = self.local_buffer[begin : begin + held.local_buffer.numel()]
        return DBuffer.from_local(local, self.mesh, wanted, self.layout, allocation_stream=self.allocation_stream)

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """The same values in another dtype; this buffer if it has that dtype."""
        if out is None and dtype == self.dtype:
            return self
        return self._made(self.local_buffer.to(dtype), self.placements, out)

    def redistribute(self, new_placements: Iterable[Placement], *, out: DBuffer | None = None) -> DBuffer:
        """The same values under other placements; this buffer if it has those."""
        wanted = tuple(new_placements)
        if wanted == self.placements and out is None:
            return self
        cut, relabelled = list(map(to_engine, wanted)), list(self._engine.placements)
        for axis, new in enumerate(cut):
            if isinstance(new, layout.Partial) and isinstance(relabelled[axis], layout.Replicate):
                if new.op != "avg":
                    raise NotImplementedError(f"axis {axis}: Replicate can become Partial of an average, not of a sum")
                relabelled[axis] = new
        source = buffer.DBuffer(self.layout.engine, self.mesh, relabelled, self.local_buffer)
        return self._made(redistribute(source, cut).local, wanted, out)

    def allgather(self, mesh_axis: int, *, out: DBuffer | None = None) -> DBuffer:
        """Change a sharded axis to Replicate."""
        return self._change("allgather", layout.Flat, mesh_axis, Replicate(), out)

    def allreduce(self, mesh_axis: int, *, out: DBuffer | None = None) -> DBuffer:
        """Change a Partial axis to Replicate."""
        return self._change("allreduce", layout.Partial, mesh_axis, Replicate(), out)

    def reduce_scatter(self, mesh_axis: int, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Change a Partial axis to a sharded one."""
        return self._change("reduce_scatter", layout.Partial, mesh_axis, new_placement, out)

    def scatter(self, mesh_axis: int, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Change a Replicate axis to a sharded one, without communication: a view, unless ``out`` is given."""
        return self._change("scatter", layout.Replicate, mesh_axis, new_placement, out)

    def _change(self, method: str, before: type, axis: int, new: Placement, out: DBuffer | None) -> DBuffer:
        if not isinstance(self._engine.placements[axis], before):
            raise ValueError(f"{method}: axis {axis} is placed {self.placements[axis]}; it must be {before.__name__}")
        wanted = [*self.placements[:axis], new, *self.placements[axis + 1 :]]
        return self.view(wanted) if method == "scatter" and out is None else self.redistribute(wanted, out=out)

    def _made(self, local: torch.Tensor, placements: tuple[Placement, ...], out: DBuffer | None) -> DBuffer:
        """A buffer over ``local``, or ``out`` with its values."""
        if out is None:
            return DBuffer(self.mesh, placements, self.layout, local.dtype, self.device, local=local)
        wanted, dtype = list(map(to_engine, placements)), local.dtype
        actual = (out.mesh, list(out._engine.placements), out.layout, out.dtype)
        if actual != (self.mesh, wanted, self.layout, dtype):
            raise ValueError(f"`out` must have placements {wanted}, this buffer's mesh and layout, and dtype {dtype}")
        out.local_buffer.copy_(local)
        return out
