"""Process groups and stores: uses `torch.distributed.distributed_c10d` and the backends of a process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import ProcessGroup

PrefixStore = c10d.PrefixStore  # public, but not to type checkers


def default_store() -> Any:
    """The store of the default process group."""
    return c10d._get_default_store()


def exists(group: ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    return group in c10d._world.pg_map


def backends_of(group: ProcessGroup) -> str | None:
    """The backends that a process group was created with; None if torch did not create it."""
    known = c10d._world.pg_map.get(group)
    return None if known is None else str(known[0])


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend of a process group for tensors of this device. Calls of it are not counted as collectives."""
    if device.type not in {served.type for served in group._device_types}:
        return group  # a group written in Python has no separate backend
    return group._get_backend(device)


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The name of the backend of a process group for tensors of this device."""
    name: str = backend_of(group, device).name()
    return name


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """The longest timeout of the backends of a process group; None if it is their default, or unknown."""
    # A group written in Python has no separate backend. Some have options; a C++ one without options raises.
    backends: list[Any] = [group._get_backend(device) for device in group._device_types] or [group]
    given = []
    for backend in backends:
        try:
            found = backend.options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta) and found != c10d._get_default_timeout(c10d.Backend(backend.name())):
            given.append(found)
    return max(given, default=None)


def limit_of(group: ProcessGroup) -> timedelta:
    """How long collectives of a process group may take: its own timeout, or the default of its backend."""
    found, names = timeout_of(group), [group._get_backend(device).name() for device in group._device_types]
    return c10d._get_default_timeout(c10d.Backend((names or ["gloo"])[-1])) if found is None else found


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception means that another rank has ended or does not respond.

    NCCL and the store have classes for it. Gloo raises RuntimeError with a path in its source at the start.
    """
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error).split("]")[0]
    )


def new_group(
    ranks: Sequence[int],
    like: ProcessGroup,
    name: str,
    title: str,
    patience: timedelta | None = None,
    backend: str | None = None,
) -> ProcessGroup:
    """A process group of ``ranks``, with the backend and the timeout of ``like`` unless others are given.

    Only these ranks call it, all of them. ``name`` must be the same on all of them, and unique. ``title`` is the
    description of the group.
    """
    listed = list(ranks)
    # torch 2.11 has only sorted groups, and lacks this argument.
    order: dict[str, Any] = {} if listed == sorted(listed) else {"sort_ranks": False}
    with _named(listed, name), _unsplit():
        made = torch.distributed.new_group(
            listed,
            timeout=timeout_of(like) if patience is None else patience,
            backend=backends_of(like) if backend is None else backend,
            use_local_synchronization=True,
            group_desc=title,
            **order,
        )
    assert isinstance(made, ProcessGroup)
    return made


@contextmanager
def _named(ranks: list[int], name: str) -> Iterator[None]:
    """A context in which a new process group of these ranks gets this name.

    Ranks find each other by the name of the group. torch's own name for a group that only its members create contains
    the number of groups of the rank: members with different numbers would wait forever.
    """
    theirs, thread = c10d._process_group_name, threading.get_ident()

    def ours(given: Sequence[int], use_hashed_name: bool) -> Any:
        mine = use_hashed_name and threading.get_ident() == thread and list(given) == ranks
        return name if mine else theirs(given, use_hashed_name)

    with patch.object(c10d, "_process_group_name", ours):
        yield


@contextmanager
def _unsplit() -> Iterator[None]:
    """A context in which communicators of new process groups are not split from the default one.

    With ``init_process_group(device_id=...)`` torch uses ncclCommSplit, which waits for all ranks of the default group.
    A group that is created when the first gradients of a pipeline stage arrive would wait for stages that wait for this
    one. Without a device, NCCL creates a communicator of the members alone, at first use.
    """
    default = torch.distributed.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
