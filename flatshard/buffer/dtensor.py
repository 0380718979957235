"""The tensors of a buffer seen as DTensors, for users, optimizers and checkpoints."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from flatshard import _torch
from flatshard.buffer.dbuffer import DBuffer
from flatshard.buffer.ragged import Cut, RaggedDTensor
from flatshard.layout import Flat, Replicate

_torch.add_elementwise_rules()


def as_dtensor(
    buffer: DBuffer, index: int, inner: _torch.Parallel | None = None, local: torch.Tensor | None = None
) -> DTensor:
    """Tensor ``index`` of a buffer as a DTensor over the buffer's memory.

    It is ``Shard`` of the dim that its rows are slices of where an axis is sharded. Where the rows that this rank
    holds are not torch.chunk's, it is a `RaggedDTensor`, which knows them. ``inner`` is given where the tensor is
    itself the local part of a DTensor, as tensor parallelism makes it; the result then lives on both meshes. ``local``
    is given where this rank's part is not in the buffer.
    """
    slot = buffer.layout.slots[index]
    sharded = tuple(isinstance(placement, Flat) for placement in buffer.placements)
    for placement in buffer.placements:
        if not isinstance(placement, (Replicate, Flat)):
            raise ValueError(f"a buffer placed {placement} has no DTensor that says so")
    if any(sharded) and not slot.shape:
        raise ValueError("a tensor without dims cannot be sharded as a DTensor; replicate it")
    local = _torch.rebased(buffer.local_view(index)) if local is None else local
    if inner is not None:
        if not _is_canonical(buffer, index, sharded):
            raise ValueError("a tensor-parallel parameter can be cut over one axis, with layout 'tensor', only")
        return _torch.composed_dtensor(local, buffer.mesh, sharded, slot.dim, inner)
    placements = [TorchShard(slot.dim) if cut else TorchReplicate() for cut in sharded]
    meta = torch.empty(slot.shape, device="meta")
    made = _torch.make_dtensor(local, buffer.mesh, placements, meta.shape, meta.stride())
    if _is_canonical(buffer, index, sharded):
        return made
    if not _torch.SUBCLASSES_DISPATCH:
        raise NotImplementedError(
            f"layout 'flat' and shards over two axes (HFSDP) need torch 2.13 or newer; this is {torch.__version__}. "
            "Use layout='tensor' and one sharded axis"
        )
    return RaggedDTensor.make(local, made, Cut(buffer.layout, index, buffer.mesh, sharded))


def _is_canonical(buffer: DBuffer, index: int, sharded: tuple[bool, ...]) -> bool:
    """Whether every rank holds the rows that torch.chunk would give it."""
    slot, shards = buffer.layout.slots[index], buffer.layout.num_shards
    if shards == 1 or not any(sharded):
        return True
    chunk = -(-slot.shape[slot.dim] // shards) * slot.row
    piece = buffer.layout.segments[slot.segment].piece
    return sum(sharded) == 1 and buffer.held.count == 1 and slot.offset == 0 and piece == chunk
