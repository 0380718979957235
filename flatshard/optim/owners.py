"""The ranks that share whole matrices, and the public state of these matrices.

One rank has each tensor of the state. In a state dict it is a DTensor of which that rank holds all rows and the others
none, so that it is saved, gathered and distributed like any other. The owner sends the other ranks its dtype and shape.
The state is by parameter, with the same entries on all ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.buffer.groups import joint_group
from flatshard.buffer.ragged import Cut, RaggedDTensor
from flatshard.layout import Layout, Segment, Slot, holding
from flatshard.optim.assignment import Box, Holders
from flatshard.optim.clip import cut_axes, gathered_rows
from flatshard.optim.flat_params import State


class OwnerGroup:
    """The ranks that share matrices, each of which one of them owns: ranks along some axes of a mesh, or one rank.

    ``mesh`` is None for matrices that are not sharded: every rank has them, and owns them.
    """

    def __init__(self, mesh: DeviceMesh | None, axes: tuple[int, ...], device: torch.device) -> None:
        self.mesh, self.axes, self.device = mesh, axes, device
        own = () if mesh is None else tuple(mesh.get_coordinate() or ())
        self.coordinates, self.rank = [own], 0
        if mesh is not None and axes:
            reach = [range(mesh.size(axis)) if axis in axes else (at,) for axis, at in enumerate(own)]
            self.coordinates = sorted(itertools.product(*reach), key=lambda coordinate: int(mesh.mesh[coordinate]))
            self.rank = self.coordinates.index(own)

    @property
    def size(self) -> int:
        return len(self.coordinates)

    @functools.cached_property
    def group(self) -> ProcessGroup:
        """Its process group. The first call may be collective among its ranks."""
        assert self.mesh is not None
        group = joint_group(self.mesh, self.axes, user=self)
        assert sorted(dist.get_process_group_ranks(group)) == [int(self.mesh.mesh[each]) for each in self.coordinates]
        return group

    def holders(self, parameter: torch.Tensor) -> Holders:
        """What each of its ranks holds of a parameter."""
        if not isinstance(parameter, DTensor):
            return Holders((Box((0,) * parameter.dim(), tuple(parameter.shape)),), (0,))
        cut = cut_axes(parameter)
        loose = [axis for axis in self.axes if axis not in cut]
        copies = [tuple(coordinate[axis] for axis in loose) for coordinate in self.coordinates]
        numbers = {copy: number for number, copy in enumerate(sorted(set(copies)))}
        boxes = tuple(_box_at(parameter, coordinate) for coordinate in self.coordinates)
        return Holders(boxes, tuple(numbers[copy] for copy in copies))

    def all_gather_bytes(self, lane: Lane, message: bytes) -> list[bytes]:
        """The messages of all its ranks. All of them call it."""
        if self.size == 1:
            return [message]
        length = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        lengths = gathered_rows(lane, self.group, length, "lengths").flatten()
        longest = max(int(lengths.max()), 1)
        padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(self.device)
        rows = gathered_rows(lane, self.group, padded, "messages").cpu().numpy()
        return [row.tobytes()[:count] for row, count in zip(rows, lengths.tolist())]


def _box_at(parameter: DTensor, coordinate: tuple[int, ...]) -> Box:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, RaggedDTensor):
        mesh = tuple(parameter.device_mesh.shape)
        return Box(*_torch.box_at(shape, mesh, coordinate, tuple(parameter.placements)))
    cut = parameter._cut
    first, count = cut.rows(cut.held_at(coordinate))
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[cut.dim], sizes[cut.dim] = first, count
    return Box(tuple(offsets), tuple(sizes))


# State


def owner_dtensor(owner_group: OwnerGroup, owner: int, shape: torch.Size, local: torch.Tensor) -> torch.Tensor:
    """A DTensor of this shape of which rank ``owner`` of a group has all; ``local`` itself in a group of one rank."""
    if owner_group.size == 1:
        return local
    mesh, axes, coordinate = owner_group.mesh, owner_group.axes, owner_group.coordinates[owner]
    assert mesh is not None
    sharded = tuple(axis in axes for axis in range(mesh.ndim))
    numel = math.prod(shape)
    sizes, at = [mesh.size(axis) for axis in axes], [coordinate[axis] for axis in axes]
    number = holding(owner_group.size, sizes, at, [True] * len(axes)).first
    slot = Slot(0, number * numel, tuple(shape), numel // shape[0])
    layout = Layout((slot,), (Segment(numel),), owner_group.size)
    placements = [Shard(0) if cut else Replicate() for cut in sharded]
    dtensor = _torch.make_dtensor(local, mesh, placements, shape)
    return RaggedDTensor.make(local, dtensor, Cut(layout, 0, mesh, sharded))


@dataclass(frozen=True)
class _Leaf:
    """The description of a state tensor for ranks that do not have it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether all ranks can have a copy: a step counter, for example."""
    return tensor.dim() == 0 or tensor.numel() == 0


def state_on_all_ranks(
    owner_group: OwnerGroup, lane: Lane, owned: Mapping[int, Any], owners: Sequence[int]
) -> dict[int, Any]:
    """The state of all numbered matrices, from the matrices that this rank owns. All ranks of the group call it."""

    def describe(value: Any) -> Any:
        if _is_shared(value):
            return value.detach().cpu()
        return _Leaf(value.dtype, tuple(value.shape), value.device.type == "cpu")

    own = {number: _torch.map_leaves(torch.Tensor, describe, state) for number, state in owned.items()}
    states: dict[int, Any] = {}
    for message in owner_group.all_gather_bytes(lane, pickle.dumps(own)):
        states.update(pickle.loads(message))
    states.update(owned)

    def as_dtensor(owner: int, value: torch.Tensor | _Leaf) -> torch.Tensor:
        if isinstance(value, _Leaf):
            device = torch.device("cpu") if value.on_host else owner_group.device
            local = torch.empty((0, *value.shape[1:]), dtype=value.dtype, device=device)
        elif _is_shared(value):
            return value
        else:
            local = value
        return owner_dtensor(owner_group, owner, torch.Size(value.shape), local)

    kinds = (torch.Tensor, _Leaf)
    return {n: _torch.map_leaves(kinds, functools.partial(as_dtensor, owners[n]), state) for n, state in states.items()}


def state_of_owner(owner_group: OwnerGroup, owner: int, state: Any) -> Any:
    """Loaded state of a matrix in the owner's form. Collective if it is sharded in another way."""
    is_owner = owner == owner_group.rank

    def take(value: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(value, DTensor):
            # Where numbers belong, only the optimizer knows.
            return value if _is_shared(value) or not is_owner else value.to(owner_group.device)
        like = owner_dtensor(owner_group, owner, value.shape, _torch.local_of(value))
        if isinstance(value, RaggedDTensor) and isinstance(like, RaggedDTensor) and value._cut == like._cut:
            return _torch.local_of(value)
        return value.full_tensor()

    taken = _torch.map_leaves(torch.Tensor, take, state)
    return taken if is_owner else None


# Entries of the state of a parameter that is several matrices: key and label together.


def join_entries(entries: Sequence[tuple[str, State]]) -> State:
    if len(entries) == 1 and not entries[0][0]:
        return entries[0][1]
    return {f"{key}{label}": value for label, state in entries for key, value in state.items()}


def entries_of(entries: Mapping[Any, Any], label: str) -> State:
    if not label:
        return dict(entries)
    return {key[: -len(label)]: value for key, value in entries.items() if str(key).endswith(label)}
