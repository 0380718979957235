"""Process groups that no mesh has: made once, by those who are in them, for as long as the default group lives."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch

# By the default process group and their ranks.
_made: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def joint_group(mesh: DeviceMesh, axes: Sequence[int]) -> ProcessGroup:
    """The process group of all ranks that differ from this one along these axes of a mesh only.

    It is the axis's own or the default one if that has the same ranks. Otherwise the first call makes it, is collective
    among its ranks, and later ones find it.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    place = mesh.get_coordinate()
    assert place is not None
    ranks = mesh.mesh[tuple(slice(None) if axis in axes else place[axis] for axis in range(mesh.ndim))]
    return group_among(ranks.flatten().tolist(), [mesh.get_group(axis) for axis in axes])


def group_among(ranks: Sequence[int], beside: Sequence[ProcessGroup]) -> ProcessGroup:
    """The process group of these ranks: the default one if it has no others, else one that the first call makes.

    It waits as long as the most patient of the groups ``beside`` it, and has the backend of that. The first call is
    collective among the ranks, and only them: the rest of the world may be busy with something else.
    """
    members, world = tuple(sorted(ranks)), dist.group.WORLD
    assert world is not None
    if len(members) == world.size():
        return world
    known = _made.setdefault(world, {})
    if members not in known:
        like = max(beside, key=lambda group: _torch.timeout_of(group) or timedelta())
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:20]
        patience = _torch.timeout_of(like) or _torch.timeout_of(world)  # meshes make groups without asking for one
        known[members] = _torch.new_group(members, like, f"flatshard_joint_{digest}", "flatshard_joint", patience)
    return known[members]


_own_groups: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = WeakKeyDictionary()


def own_group(like: ProcessGroup, title: str, patience: timedelta | None = None) -> ProcessGroup:
    """Another process group of the same ranks, backend and time-out. Or, with ``patience``, of Gloo with that one."""
    known = _own_groups.setdefault(like, {})
    if title not in known:
        # Only the members of one line of a mesh meet here, so the group must not wait for all ranks.
        ranks = dist.get_process_group_ranks(like)
        backend = None if patience is None else "gloo"
        known[title] = _torch.new_group(ranks, like, f"{title}_{like.group_name}", title, patience, backend)
    return known[title]
