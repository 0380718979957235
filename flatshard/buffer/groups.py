"""Process groups that no mesh has: created at first use by their members, shared, and destroyed when unused.

A group is identified by its ranks and its purpose, so consecutive models on different meshes share groups. Destroying a
group is collective (NCCL waits for the other ranks). So it does not happen in Python's garbage collection, but only
where all of its ranks take part: before the first forward of a model on another mesh, and in `destroy_groups` (decision
002).
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch

# Backends of a single process.
WITHOUT_PEERS = frozenset({"rehearsal", "fake"})


class _Made:
    """A process group and its users between calls."""

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None  # before it is made, and after it was destroyed
        self.destroyed = 0  # how often: a new group needs a new name, because the store keeps the old one
        self.votes = 0  # of all its ranks on whether it is unused
        self._users: list[weakref.ref[object]] = []

    @property
    def is_used(self) -> bool:
        return any(user() is not None for user in self._users)

    def add_user(self, user: object) -> None:
        if user is not None:
            self._users = [known for known in self._users if known() is not None] + [weakref.ref(user)]


# The groups created under one default process group, by name.
_registries: WeakKeyDictionary[ProcessGroup, dict[str, _Made]] = WeakKeyDictionary()


def joint_group(mesh: DeviceMesh, axes: Sequence[int], user: object = None) -> ProcessGroup:
    """The process group of all ranks that differ from this one along these axes of a mesh only.

    It is the group of the axis, or the default group, if that has the same ranks. Otherwise the first call creates it,
    which is collective among its ranks, and later calls return it. ``user``: the object that keeps it between calls.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    place = mesh.get_coordinate()
    assert place is not None
    ranks = mesh.mesh[tuple(slice(None) if axis in axes else place[axis] for axis in range(mesh.ndim))]
    return group_among(ranks.flatten().tolist(), [mesh.get_group(axis) for axis in axes], user)


def group_among(ranks: Sequence[int], beside: Sequence[ProcessGroup], user: object = None) -> ProcessGroup:
    """The process group of these ranks: the default group if it has no others, else one that the first call creates.

    Its timeout is the longest of the groups ``beside`` it, and its backend is that group's. The first call is
    collective among these ranks only: the rest of the world may be busy. ``user``: as of `joint_group`.
    """
    members, world = sorted(ranks), dist.group.WORLD
    assert world is not None
    if len(members) == world.size():
        return world
    like = max(beside, key=lambda group: _torch.timeout_of(group) or timedelta())
    patience = _torch.timeout_of(like) or _torch.timeout_of(world)  # meshes make groups without asking for one
    return _group("flatshard_joint", members, like, patience, None, user, ())


def own_group(
    like: ProcessGroup, title: str, patience: timedelta | None = None, backend: str | None = None, user: object = None
) -> ProcessGroup:
    """Another process group of the same ranks, backend and timeout, unless others are given.

    There is one for each ``title``. ``user``: as of `joint_group`.
    """
    # Only the ranks along one axis of a mesh call this, so the creation must not wait for all ranks.
    ranks = dist.get_process_group_ranks(like)
    differs = patience or _torch.timeout_of(like), backend or _torch.backends_of(like)
    return _group(title, ranks, like, patience, backend, user, differs)


def _group(
    title: str,
    ranks: list[int],
    like: ProcessGroup,
    patience: timedelta | None,
    backend: str | None,
    user: object,
    differs: tuple[object, ...],
) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    name = f"{title}_{hashlib.sha256(repr((ranks, differs)).encode()).hexdigest()[:20]}"
    made = _registries.setdefault(world, {}).setdefault(name, _Made())
    if made.group is None:
        made.group = _torch.new_group(ranks, like, f"{name}_{made.destroyed}", title, patience, backend)
    made.add_user(user)
    return made.group


def destroy_groups() -> None:
    """Destroy the process groups that flatshard has made and that no model uses any more. All ranks call it.

    It waits for the other ranks of such groups. A group that is in use on one of them stays on all. Those of meshes
    are the user's, and ``torch.distributed.destroy_process_group()`` ends all of them.
    """
    gc.collect()
    _destroy_unused(None)


def destroy_unused_within(mesh: DeviceMesh) -> None:
    """Destroy unused groups within a mesh that no model on it could use. All ranks of the mesh call it.

    A model on the mesh could use groups with the ranks of one of its axes. Creating a group again takes half a second.
    """
    useful = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    _destroy_unused(set(mesh.mesh.flatten().tolist()), useful)


def _destroy_unused(within: set[int] | None, useful: Sequence[Sequence[int]] = ()) -> None:
    world = dist.group.WORLD if dist.is_initialized() else None
    known = {} if world is None else _registries.get(world, {})
    for _, made in sorted(known.items()):  # in one order on all ranks
        group = made.group
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        if group is None or (within is not None and not within.issuperset(ranks)) or ranks in useful:
            continue
        if _is_unused_everywhere(made, group):
            made.group, made.destroyed = None, made.destroyed + 1
            dist.destroy_process_group(group)


def _is_unused_everywhere(made: _Made, group: ProcessGroup) -> bool:
    """Whether no rank of a process group uses it. Ranks compare over the store: another thread may use the group."""
    if group.name() in WITHOUT_PEERS:
        return not made.is_used
    if group.name() == "threaded":
        return False  # torch cannot destroy a part of the groups of ranks that are threads
    made.votes += 1
    store = _torch.PrefixStore(f"flatshard/{group.group_name}/{made.votes}", _torch.default_store())
    store.add("unused", int(not made.is_used))
    if store.add("came", 1) == group.size():
        store.set("all", str(int(store.add("unused", 0) == group.size())))
    patience = _torch.timeout_of(group)
    store.wait(["all"], *([] if patience is None else [patience]))
    return bool(store.get("all") == b"1")
