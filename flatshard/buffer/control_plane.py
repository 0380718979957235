"""Collectives outside of all lanes, before and during training: messages, and broadcasts of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from flatshard.buffer.collectives import as_bytes
from flatshard.buffer.groups import own_group


class Exchange:
    """Short messages among all ranks, over a Gloo group per name, so that a second thread can use another one.

    Creating the first one of a name is a collective call. Without a name, or torch.distributed, there is one rank.
    """

    def __init__(self, name: str | None) -> None:
        world = dist.group.WORLD if name is not None and dist.is_initialized() else None
        self.rank = 0 if world is None else world.rank()
        self.size = 1 if world is None else world.size()
        self._group = None
        if world is not None and self.size > 1:
            self._group = own_group(world, f"flatshard_{name}", backend="gloo", user=self)

    def gather(self, message: bytes, only_first: bool = False) -> list[bytes]:
        """The messages of all ranks, in rank order, on each of them; ``only_first``: on rank 0, and none on others."""
        if self._group is None:
            return [message]
        found = [b""] * self.size if self.rank == 0 or not only_first else []
        if only_first:
            dist.gather_object(message, found or None, dst=0, group=self._group)
        else:
            dist.all_gather_object(found, message, group=self._group)
        return found


def from_first(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Overwrite tensors with those of the first rank of a mesh. All ranks of the mesh call it."""
    found = [tensor.contiguous() for tensor in tensors]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        for tensor in found if group.size() > 1 else ():
            (whole,) = as_bytes([tensor]) if tensor.dim() else [tensor]
            dist.broadcast(whole, group=group, group_src=0)
    return found


def broadcast(group: ProcessGroup, tensor: torch.Tensor) -> Work:
    """Start to broadcast a tensor of a group's rank 0 into the tensors of its other ranks."""
    work: Work = group.broadcast(tensor, root=0)
    return work
