"""What only hardware that flatshard has not run on could show to be worth it: it works, and may change or go."""

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
    """A `SchedulePolicy` that also says by what gathers and reduces travel. At most one of:

    ``registered``: what is gathered into, and what reduces read, is memory that NCCL has registered with all process
    groups that use it, and allocated if it can, so that NCCL need not copy. Gradients are then staged, never sent from
    where autograd has left them.
    ``peers``: where all ranks of a group are on one node, gathers and reduces are copies out of and into memory that
    they see of each other (symmetric memory of CUDA), which leave the multiprocessors to compute. It takes as much
    memory as the largest input of a reduce and the largest shard.
    """

    registered: bool = False
    peers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("registered", "peers"):
            _arguments.flag(name, getattr(self, name))
        if self.registered and self.peers:
            raise ValueError("WirePolicy(registered=True, peers=True): what peers copy needs no registration")

    def check(self, mesh: DeviceMesh) -> None:
        if mesh.device_type != "cuda" and (self.registered or self.peers):
            which = "registered=True): NCCL registers" if self.registered else "peers=True): peers share"
            raise ValueError(f"WirePolicy({which} memory of GPUs; {mesh} is on others")

    def connect(self, lane: Lane, pool: Pool, meshes: Sequence[DeviceMesh]) -> None:
        if not (self.registered or self.peers):
            return
        groups = [lane.group(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]
        if self.peers and not see_peers(lane, groups):
            raise ValueError("WirePolicy(peers=True): no axis of the mesh lies within one node; leave it out")
        if self.registered:
            names = {_torch.backend_name(group, lane.device) for group in groups}
            if names != {"nccl"}:
                raise ValueError(
                    f"WirePolicy(registered=True): only NCCL registers memory, not {', '.join(names)}; leave it out"
                )
            lane.greet(groups)
            pool.register(groups)
