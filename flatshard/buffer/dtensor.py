"""The tensors of a buffer seen as DTensors, for users, optimizers and checkpoints."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from flatshard import _torch
from flatshard.buffer.dbuffer import DBuffer
from flatshard.layout import Flat, Replicate


def as_dtensor(buffer: DBuffer, index: int) -> DTensor:
    """Tensor ``index`` of a buffer as a DTensor over the buffer's memory: ``Shard(0)`` where an axis is sharded.

    A cut over two axes is one over all their ranks, so its DTensor lives on the flattened mesh.

    DTensor takes shards to be those of torch.chunk, so the buffer must hold exactly them; ValueError where it does
    not (layout ``flat`` with rows dealt out otherwise, `Block`, `Whole`).
    """
    slot = buffer.layout.slots[index]
    sharded = [isinstance(placement, Flat) for placement in buffer.placements]
    for placement in buffer.placements:
        if not isinstance(placement, (Replicate, Flat)):
            raise ValueError(f"a buffer placed {placement} has no DTensor that says so")
    if any(sharded):
        _require_chunks(buffer, index)
    mesh, placements = buffer.mesh, [TorchShard(0) if cut else TorchReplicate() for cut in sharded]
    if sum(sharded) > 1:
        mesh, placements = _flattened(mesh), [TorchShard(0)]
    meta = torch.empty(slot.shape, device="meta")
    return _torch.make_dtensor(buffer.local_view(index), mesh, placements, meta.shape, meta.stride())


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh on one axis, in the order of the pieces they hold: the last axis of ``mesh`` is the major.

    DTensor cuts by the first axis first. On this mesh the pieces of a cut over all axes are torch.chunk's, in order.
    """
    known = mesh.__dict__.get("_flatshard_flattened")
    if known is None:
        ranks = mesh.mesh.permute(*reversed(range(mesh.ndim))).reshape(-1)
        known = mesh.__dict__["_flatshard_flattened"] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("flat",))
    assert isinstance(known, DeviceMesh)
    return known


def _require_chunks(buffer: DBuffer, index: int) -> None:
    slot = buffer.layout.slots[index]
    if not slot.shape:
        raise ValueError("a tensor without dims cannot be sharded as a DTensor; replicate it")
    shards = buffer.layout.num_shards
    chunk = -(-slot.shape[0] // shards) * slot.row
    piece = buffer.layout.segments[slot.segment].piece
    if shards > 1 and not (buffer.held.count == 1 and slot.offset == 0 and piece == chunk):
        raise ValueError(
            f"tensor {index} of shape {slot.shape} is not cut as torch.chunk cuts it over {shards} shards; "
            "use layout 'tensor', which is"
        )
