"""All-to-alls of pieces of matrices between the ranks that hold them and the ranks that own them.

For each bucket of matrices the ranks that share them run one all-to-all in, which sends gradients and weights to the
owners, and one out, which sends new weights to all ranks that hold them. The pieces from one rank to another are packed
into one run of bytes, in the order of the matrices, so that both ranks know the place of each piece.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from flatshard import _torch
from flatshard.buffer import DONE, Lane, Ticket
from flatshard.buffer.groups import joint_group
from flatshard.buffer.ragged import RaggedDTensor
from flatshard.layout import holding
from flatshard.optim.assignment import Box, Holders
from flatshard.optim.clip import gathered_rows

Role: TypeAlias = Literal["gradient", "weight"]
_ALIGN = 16  # bytes: a piece begins where vectorised copies can


class OwnerGroup:
    """The ranks that share matrices, each of which one of them owns: ranks along some axes of a mesh, or one rank.

    ``mesh`` is None for matrices that are not sharded: every rank has them, and owns them.
    """

    def __init__(self, mesh: DeviceMesh | None, axes: tuple[int, ...], device: torch.device) -> None:
        self.mesh, self.axes, self.device = mesh, axes, device
        own = () if mesh is None else tuple(mesh.get_coordinate() or ())
        self.places, self.rank = [own], 0
        if mesh is not None and axes:
            reach = [range(mesh.size(axis)) if axis in axes else (at,) for axis, at in enumerate(own)]
            self.places = sorted(itertools.product(*reach), key=lambda place: int(mesh.mesh[place]))
            self.rank = self.places.index(own)

    @property
    def size(self) -> int:
        return len(self.places)

    @functools.cached_property
    def group(self) -> ProcessGroup:
        """Its process group. The first call may be collective among its ranks."""
        assert self.mesh is not None
        group = joint_group(self.mesh, self.axes, user=self)
        assert sorted(dist.get_process_group_ranks(group)) == [int(self.mesh.mesh[place]) for place in self.places]
        return group

    def holders(self, parameter: torch.Tensor) -> Holders:
        """What each of its ranks holds of a parameter."""
        if not isinstance(parameter, DTensor):
            return Holders((Box((0,) * parameter.dim(), tuple(parameter.shape)),), (0,))
        cut = cut_axes(parameter)
        loose = [axis for axis in self.axes if axis not in cut]
        copies = [tuple(place[axis] for axis in loose) for place in self.places]
        numbers = {copy: number for number, copy in enumerate(sorted(set(copies)))}
        boxes = tuple(_box_at(parameter, place) for place in self.places)
        return Holders(boxes, tuple(numbers[copy] for copy in copies))

    def messages(self, lane: Lane, message: bytes) -> list[bytes]:
        """The messages of all its ranks. All of them call it."""
        if self.size == 1:
            return [message]
        length = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        lengths = gathered_rows(lane, self.group, length, "lengths").flatten()
        longest = max(int(lengths.max()), 1)
        padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(self.device)
        found = gathered_rows(lane, self.group, padded, "messages").cpu().numpy()
        return [row.tobytes()[:count] for row, count in zip(found, lengths.tolist())]


def cut_axes(parameter: DTensor) -> tuple[int, ...]:
    """The axes of its mesh that shard a tensor."""
    mesh = parameter.device_mesh
    return tuple(
        axis for axis, p in enumerate(parameter.placements) if not isinstance(p, Replicate) and mesh.size(axis) > 1
    )


def _box_at(parameter: DTensor, place: tuple[int, ...]) -> Box:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, RaggedDTensor):
        mesh = tuple(parameter.device_mesh.shape)
        return Box(*_torch.box_at(shape, mesh, place, tuple(parameter.placements)))
    cut = parameter._cut
    first, count = cut.rows(holding(cut.layout.num_shards, cut.mesh.shape, place, cut.sharded))
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[cut.dim], sizes[cut.dim] = first, count
    return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class Piece:
    """A box of matrix ``number`` in packed bytes, and where it lies in the tensor it is taken from or put into.

    ``where`` is None for all of that tensor. Equal boxes of consecutive rows that lie at equal distances, as those of
    all ranks do where rows divide evenly, are one piece: ``times`` of them.
    """

    number: int
    role: Role
    where: tuple[slice, ...] | None
    times: int
    place: torch.Tensor  # in the packed bytes

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the tensor, in the shape of ``place``: a view, whatever its strides are, since it may be written to."""
        part = tensor if self.where is None else tensor[self.where]
        return part if self.times == 1 else part.unflatten(0, (self.times, -1))


class Packing:
    """The pieces between this rank and each other one, and their places in the packed bytes."""

    def __init__(self) -> None:
        self.splits: list[int] = []
        self.numbytes = 0
        self._boxes: dict[tuple[int, Role, Box, torch.dtype], list[tuple[Box, int]]] = {}

    def add(self, number: int, role: Role, box: Box, within: Box, dtype: torch.dtype) -> None:
        self._boxes.setdefault((number, role, within, dtype), []).append((box, self.numbytes // dtype.itemsize))
        self.numbytes += -(-box.numel * dtype.itemsize // _ALIGN) * _ALIGN

    def close(self) -> None:
        """All pieces for one rank have been added."""
        self.splits.append(self.numbytes - sum(self.splits))

    def pieces(self, packed: torch.Tensor) -> list[Piece]:
        """All pieces, as views of the packed bytes."""
        found = []
        for (number, role, within, dtype), boxes in self._boxes.items():
            elements = packed.view(dtype)
            for stack in _stacks(boxes, within):
                (box, start), times = stack[0], len(stack)
                sizes, strides = box.sizes, tuple(math.prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes)))
                rows = box
                if times > 1:
                    rows = Box(box.offsets, (times * box.sizes[0], *box.sizes[1:]))
                    sizes, strides = (times, *sizes), (stack[1][1] - start, *strides)
                where = None if rows == within else rows.inside(within)
                found.append(Piece(number, role, where, times, elements.as_strided(sizes, strides, start)))
        return found


def _stacks(boxes: Sequence[tuple[Box, int]], within: Box) -> list[list[tuple[Box, int]]]:
    """Boxes and where they start, in the same order, with those in one list that are one piece."""
    found: list[list[tuple[Box, int]]] = []
    for box, start in boxes:
        if found and box.sizes and box.sizes[1:] == within.sizes[1:]:
            before, at = found[-1][-1]
            follows = box.sizes == before.sizes and box.offsets[0] == before.offsets[0] + box.sizes[0]
            if follows and (len(found[-1]) == 1 or start - at == at - found[-1][-2][1]):
                found[-1].append((box, start))
                continue
        found.append([(box, start)])
    return found


class AllToAll:
    """An all-to-all of a bucket that can be launched many times. ``name`` identifies it in the flight record.

    The storage of the packed bytes is allocated for each launch; the views of the pieces stay.
    """

    def __init__(self, owner_group: OwnerGroup, sent: Packing, received: Packing, name: str) -> None:
        self._owner_group, self._name = owner_group, name
        self._packings = sent, received
        self._bytes: list[torch.Tensor] = []  # to send and to receive, the same ones if no other rank takes part
        self._pieces: list[list[Piece]] = []
        self._ticket: Ticket | None = None

    def launch(self, lane: Lane, tensors: Mapping[Role, Mapping[int, torch.Tensor | None]]) -> None:
        """Pack and send pieces of tensors, by role and number; None counts as zeros."""
        is_alone, device = self._owner_group.size == 1, self._owner_group.device
        if not self._bytes:
            sizes = [packing.numbytes for packing in self._packings[: 1 if is_alone else 2]]
            made = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            self._bytes = [made[0], made[-1]]
            self._pieces = [packing.pieces(packed) for packing, packed in zip(self._packings, self._bytes)]
        sent, received = self._bytes
        sent.untyped_storage().resize_(sent.numel())
        pairs = []
        for piece in self._pieces[0]:
            found = tensors[piece.role][piece.number]
            if found is None:
                piece.place.zero_()
            else:
                pairs.append((piece.place, piece.within(found)))
        _copy(pairs)
        if is_alone:
            self._ticket = DONE
            return
        received.untyped_storage().resize_(received.numel())
        group, after, splits = self._owner_group.group, (lane.mark(),), [each.splits for each in self._packings]
        self._ticket = lane.all_to_all(group, received, sent, splits[1], splits[0], after=after, name=self._name)

    def receive(self, tensors: Mapping[Role, Mapping[int, torch.Tensor]]) -> None:
        """Put what has come into tensors, by role and number, and free the bytes."""
        assert self._ticket is not None
        self._ticket.wait()
        _copy([(piece.within(tensors[piece.role][piece.number]), piece.place) for piece in self._pieces[1]])
        self._ticket = None
        for packed in self._bytes:
            packed.untyped_storage().resize_(0)

    def drop(self) -> None:
        """Forget what is on its way, after an exception. On a device its memory is used again after it; on CPU who is
        still writing there keeps it.
        """
        if self._ticket is not None and self._ticket.is_on_device:
            self._ticket.wait()
        self._bytes, self._pieces, self._ticket = [], [], None


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to the first of each pair from the second, with few kernels: one for all pairs with equal strides."""
    alike = [(target, source) for target, source in pairs if target.stride() == source.stride()]
    if alike:
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
    for target, source in pairs:
        if target.stride() != source.stride():
            target.copy_(source)
