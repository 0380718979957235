"""Features whose gain has not been measured on suitable hardware. They work, but may change or be removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from flatshard import _arguments, _torch
from flatshard.buffer import Lane, Pool
from flatshard.experimental.peers import see_peers
from flatshard.policy import SchedulePolicy

__all__ = ["WirePolicy"]


@dataclass(frozen=True)
class WirePolicy(SchedulePolicy):
    """A `SchedulePolicy` that also chooses how gathers and reduces are sent. At most one of:

    ``registered``: the outputs of gathers and the inputs of reduces are in memory that is registered with NCCL for all
    process groups that use it, and allocated by NCCL if possible, so that NCCL does not copy it. Gradients are then
    always copied into that memory.
    ``peers``: if all ranks of a group are on one node, gathers and reduces are copies between the ranks' memory (CUDA
    symmetric memory), which leave the multiprocessors free for compute. It needs memory for the largest input of a
    reduce and for the largest shard.
    """

    registered: bool = False
    peers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("registered", "peers"):
            _arguments.flag(name, getattr(self, name))
        if self.registered and self.peers:
            raise ValueError("WirePolicy(registered=True, peers=True): use only one of the two")

    def check(self, mesh: DeviceMesh) -> None:
        if mesh.device_type != "cuda" and (self.registered or self.peers):
            which = "registered" if self.registered else "peers"
            raise ValueError(f"WirePolicy({which}=True) needs a mesh on CUDA, not {mesh}; leave it out")

    def connect(self, lane: Lane, pool: Pool, meshes: Sequence[DeviceMesh]) -> None:
        if not (self.registered or self.peers):
            return
        groups = [lane.group(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]
        if self.peers and not see_peers(lane, groups):
            raise ValueError("WirePolicy(peers=True): no axis of the mesh is within one node; leave it out")
        if self.registered:
            names = {_torch.backend_name(group, lane.device) for group in groups}
            if names != {"nccl"}:
                raise ValueError(
                    f"WirePolicy(registered=True) needs the NCCL backend, not {', '.join(names)}; leave it out"
                )
            lane.init_communicators(groups)
            pool.register(groups)
