"""The tensors of a buffer seen as DTensors, for users, optimizers and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from flatshard import _torch
from flatshard.buffer.dbuffer import DBuffer
from flatshard.buffer.ragged import Cut, RaggedDTensor
from flatshard.layout import Flat, Replicate


@dataclass(frozen=True)
class Parallel:
    """A parameter that is a DTensor before it is sharded.

    ``cut`` and ``copied``: the axes of its mesh over which data parallelism shards and replicates it, if it uses axes
    of that mesh. ``hidden``: the parameter was a plain tensor, and is one in forward and backward.
    """

    spec: _torch.Spec
    cut: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    hidden: bool = False

    @classmethod
    def held_apart(cls, local: torch.Tensor, mesh: DeviceMesh) -> Parallel:
        """For different plain parameters on the ranks of ``mesh``, which become shards on dim 0 of one DTensor."""
        shape = torch.Size((local.shape[0] * mesh.size(), *local.shape[1:]))
        return cls(_torch.make_spec(mesh, [TorchShard(0)], shape, local.stride(), local.dtype), hidden=True)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The local part of a gradient in the placements of its parameter, except along data-parallel axes.

        Tensor parallelism may leave it in other placements. Along data-parallel axes, the reduce follows.
        """
        if self.hidden:
            return gradient
        if isinstance(gradient, _torch.AsyncCollectiveTensor):
            gradient = gradient.wait()
        assert isinstance(gradient, DTensor)
        ours = {*self.cut, *self.copied}
        wanted = enumerate(self.spec.placements)
        placements = tuple(gradient.placements[axis] if axis in ours else p for axis, p in wanted)
        if gradient.placements != placements:
            gradient = gradient.redistribute(placements=placements)
        return _torch.local_of(gradient)


def as_dtensor(
    buffer: DBuffer, index: int, inner: Parallel | None = None, local: torch.Tensor | None = None
) -> DTensor:
    """Tensor ``index`` of a buffer as a DTensor over the buffer's memory.

    It is a `RaggedDTensor` if its shards are not those of torch.chunk. ``inner``: the tensor is the local part of a
    DTensor (tensor parallelism), and the result is on both meshes. ``local``: this rank's part, if it is not in the
    buffer.
    """
    slot = buffer.layout.slots[index]
    sharded = tuple(isinstance(placement, Flat) for placement in buffer.placements)
    for placement in buffer.placements:
        if not isinstance(placement, (Replicate, Flat)):
            raise ValueError(f"a buffer with placement {placement} has no DTensor; use Replicate or Flat")
    if any(sharded) and not slot.shape:
        raise ValueError("a tensor without dims cannot be sharded as a DTensor; replicate it")
    local = _torch.rebased(buffer.local_view(index)) if local is None else local
    if inner is not None:
        if not _is_canonical(buffer, index, sharded):
            raise ValueError(
                f"a DTensor with a local part of shape {tuple(slot.shape)}: tensor parallelism, and experts that are "
                "sharded apart, need layout='tensor' or 'auto' and one sharded axis of the mesh"
            )
        return composed(local, buffer.mesh, sharded, slot.dim, inner)
    placements = [TorchShard(slot.dim) if cut else TorchReplicate() for cut in sharded]
    made = _torch.make_dtensor(local, buffer.mesh, placements, torch.Size(slot.shape))
    if _is_canonical(buffer, index, sharded):
        return made
    return RaggedDTensor.make(local, made, Cut(buffer.layout, index, buffer.mesh, sharded))


def _is_canonical(buffer: DBuffer, index: int, sharded: tuple[bool, ...]) -> bool:
    """Whether the shards are those of torch.chunk."""
    slot, shards = buffer.layout.slots[index], buffer.layout.num_shards
    if shards == 1 or not any(sharded):
        return True
    chunk = -(-slot.shape[slot.dim] // shards) * slot.row
    piece = buffer.layout.segments[slot.segment].piece
    return sum(sharded) == 1 and buffer.held.count == 1 and slot.offset == 0 and piece == chunk


# On top of tensor parallelism


def composed(local: torch.Tensor, mesh: DeviceMesh, sharded: Sequence[bool], dim: int, parallel: Parallel) -> DTensor:
    """A DTensor over ``local``, this rank's shard, on ``dim`` over axes of ``mesh``, of the local part of a DTensor.

    It is on the axes of both meshes. If tensor parallelism shards the same dim, data parallelism shards it second.
    """
    inner = parallel.spec
    meta = inner.tensor_meta
    assert meta is not None
    if parallel.cut or parallel.copied:
        placed, placements = _within(mesh, sharded, dim, parallel)
    else:
        ours = _cut_after(inner, dim, 0)
        placements = [*(ours if cut else TorchReplicate() for cut in sharded), *inner.placements]
        placed = _torch.join_meshes([mesh, inner.mesh])
    return _torch.make_dtensor(local, placed, placements, meta.shape, meta.stride)


def _within(
    mesh: DeviceMesh, sharded: Sequence[bool], dim: int, parallel: Parallel
) -> tuple[DeviceMesh, list[TorchPlacement]]:
    """Mesh and placements of a parameter that is sharded over axes of its own mesh. Several of them become one axis."""
    inner = parallel.spec
    placements = list(inner.placements)
    for axis in parallel.cut:
        placements[axis] = _cut_after(inner, dim, axis + 1) if sharded[-1] else TorchReplicate()
    if len(parallel.cut) < 2:
        return inner.mesh, placements
    names = inner.mesh.mesh_dim_names
    assert names is not None
    parts: list[DeviceMesh] = []
    placed: list[TorchPlacement] = []
    for axis, name in enumerate(names):
        if axis == parallel.cut[0]:
            parts.append(mesh)
            placed += [TorchReplicate()] * (mesh.ndim - 1) + [placements[axis]]
        elif axis not in parallel.cut and axis not in parallel.copied:
            parts.append(inner.mesh[name])
            placed.append(placements[axis])
    return _torch.join_meshes(parts), placed


def _cut_after(inner: _torch.Spec, dim: int, first: int) -> TorchPlacement:
    """A placement that shards ``dim`` after the axes from ``first`` on have sharded it."""
    cuts = [axis for axis, placement in enumerate(inner.placements) if axis >= first and _dim_of(placement) == dim]
    return _strided(dim, math.prod(map(inner.mesh.size, cuts)))


def _strided(dim: int, factor: int) -> TorchPlacement:
    return _torch.StridedShard(dim, split_factor=factor) if factor > 1 else TorchShard(dim)


def _dim_of(placement: TorchPlacement) -> int | None:
    """The dim that a placement shards, if it does."""
    return placement.dim if isinstance(placement, (TorchShard, _torch.StridedShard)) else None


def largest_part(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the largest local part of a tensor, the same on all ranks."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if (dim := _dim_of(placement)) is not None:
                sizes[dim] = -(-sizes[dim] // parameter.device_mesh.size(axis))
    return tuple(sizes)


def without_axis(tensor: DTensor, axis: str, mesh: DeviceMesh) -> DTensor:
    """The slice of a DTensor on one rank of an axis that shards dim 0 first; ``mesh`` has the other axes."""
    names = tensor.device_mesh.mesh_dim_names or ()
    size = tensor.device_mesh.size(names.index(axis))
    placements: list[TorchPlacement] = []
    for name, placement in zip(names, _torch.spec_of(tensor).placements):
        if isinstance(placement, _torch.StridedShard) and placement.dim == 0:
            placements.append(_strided(0, placement.split_factor // size))
        elif name != axis:
            placements.append(placement)
    shape = torch.Size((tensor.shape[0] // size, *tensor.shape[1:]))
    return _torch.make_dtensor(_torch.local_of(tensor), mesh, placements, shape)
