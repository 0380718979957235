"""The tensors of a buffer seen as DTensors, for users, optimizers and checkpoints."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from flatshard import _torch
from flatshard.buffer.dbuffer import DBuffer
from flatshard.layout import Flat, Replicate


def as_dtensor(buffer: DBuffer, index: int) -> DTensor:
    """Tensor ``index`` of a buffer as a DTensor over the buffer's memory: ``Shard(0)`` where an axis is sharded.

    DTensor takes shards to be those of torch.chunk, so the buffer must hold exactly them; ValueError where it does
    not (layout ``flat`` with rows dealt out otherwise, `Block`, `Whole`, a cut over two axes).
    """
    slot = buffer.layout.slots[index]
    placements: list[TorchPlacement] = []
    for placement in buffer.placements:
        if isinstance(placement, Replicate):
            placements.append(TorchReplicate())
        elif isinstance(placement, Flat):
            placements.append(TorchShard(0))
        else:
            raise ValueError(f"a buffer placed {placement} has no DTensor that says so")
    local = buffer.local_view(index)
    if sum(isinstance(p, TorchShard) for p in placements):
        _require_chunks(buffer, index)
    meta = torch.empty(slot.shape, device="meta")
    return _torch.make_dtensor(local, buffer.mesh, placements, meta.shape, meta.stride())


def _require_chunks(buffer: DBuffer, index: int) -> None:
    slot = buffer.layout.slots[index]
    if not slot.shape:
        raise ValueError("a tensor without dims cannot be sharded as a DTensor; replicate it")
    shards = buffer.layout.num_shards
    cut_by_one_axis = sum(isinstance(p, Flat) for p in buffer.placements) == 1 and buffer.held.count == 1
    chunk = -(-slot.shape[0] // shards) * slot.row
    piece = buffer.layout.segments[slot.segment].piece
    if shards > 1 and not (cut_by_one_axis and slot.offset == 0 and piece == chunk):
        raise ValueError(
            f"tensor {index} of shape {slot.shape} is not cut as torch.chunk cuts it over {shards} shards; "
            "use layout 'tensor', which is"
        )
