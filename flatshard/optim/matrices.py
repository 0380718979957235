"""Matrices as seen by the optimizer of their owner, and buckets of matrices that are sent together.

For each bucket the ranks that share its matrices run one all-to-all in, which sends gradients and weights to the
owners, and one out, which sends new weights to all ranks that hold them. The pieces from one rank to another are packed
into one run of bytes, in the order of the matrices, so that both ranks know the place of each piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from flatshard import _torch
from flatshard.buffer import DONE, Lane, Ticket
from flatshard.engine.groups.registry import group_of
from flatshard.optim.assignment import Box, Holders, Matrix
from flatshard.optim.flat_params import cut_as, set_grad
from flatshard.optim.owners import OwnerGroup

Role: TypeAlias = Literal["gradient", "weight"]
_ALIGN = 16  # bytes: a piece begins where vectorised copies can


class MatrixParam:
    """One matrix as this rank's optimizer sees it: a plain parameter, which has values only during the step."""

    def __init__(
        self, name: str, parameter: nn.Parameter, matrix: Matrix, number: int, owner_group: OwnerGroup
    ) -> None:
        self.name, self.parameter, self.matrix = f"{name}{matrix.label}", parameter, matrix
        self.number: int | None = number  # of its parameter group; None if it is in none any more
        self.owner_group, self.owner = owner_group, 0
        self.holders = Holders((), ())  # of the parameter
        local = _torch.held_of(parameter)
        one = torch.zeros((), dtype=local.dtype, device=local.device)
        self._placeholder = one.expand(matrix.shape)  # takes no memory
        self.tensor = nn.Parameter(self._placeholder, parameter.requires_grad)
        marks = {key: value for key, value in parameter.__dict__.items() if not key.startswith("_")}  # of users
        self.tensor.__dict__.update(marks, matrix_name=self.name)

    @property
    def is_owned(self) -> bool:
        return self.owner == self.owner_group.rank

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of its gradient and its weight, the same on all ranks."""
        group = group_of(self.parameter)
        return self.parameter.dtype if group is None else group.gradients.grad_dtype, self.parameter.dtype

    @property
    def width(self) -> int:
        """Bytes of an element and of its gradient."""
        return sum(dtype.itemsize for dtype in self.dtypes)

    def clear(self) -> None:
        self.tensor.grad = None
        self.tensor.data = self._placeholder


def in_buckets(matrices: Sequence[MatrixParam], limit: int) -> list[list[MatrixParam]]:
    """Split a list of matrices into buckets, in its order.

    With B the larger of ``limit`` and the largest matrix, an owner has at most B bytes of a bucket, and no rank holds
    more than 2 B of it in pieces per copy: twice, because pieces are not all equal.
    """
    buckets: list[list[MatrixParam]] = []
    world = len(matrices[0].holders.boxes)
    owned, held = torch.zeros(world, dtype=torch.int64), torch.zeros(world, dtype=torch.int64)
    bound = max([limit, *(each.matrix.box.numel * each.width for each in matrices)])
    for each in matrices:
        size, pieces = each.matrix.box.numel * each.width, each.holders.counts(each.matrix.box) * each.width
        most = 2 * bound * (max(each.holders.copies) + 1)
        if not buckets or owned[each.owner] + size > bound or bool((held + pieces > most).any()):
            buckets.append([])
            owned, held = torch.zeros_like(owned), torch.zeros_like(held)
        buckets[-1].append(each)
        owned[each.owner] += size
        held += pieces
    return buckets


class Bucket:
    """Matrices that are sent together; the numbers of pieces are indices in ``matrices``."""

    def __init__(self, matrices: Sequence[MatrixParam], lane: Lane, name: str) -> None:
        self.matrices, self.lane = matrices, lane
        self.owned = {number: each for number, each in enumerate(matrices) if each.is_owned}
        self._weights: dict[int, torch.Tensor] = {}
        self._shards: dict[int, torch.Tensor] = {}  # this rank's, of the weights, from `send_in` to `receive_out`
        owner_group = matrices[0].owner_group
        me = owner_group.rank
        packings = [Packing() for _ in range(4)]
        send_in, receive_in, send_out, receive_out = packings
        for rank in range(owner_group.size):
            for number, each in enumerate(matrices):
                whole, held, copies = each.matrix.box, each.holders.boxes, each.holders.copies
                # What this rank exchanges with `rank` if that one is the owner, and if this one is.
                for owner, holder, inward, outward, within in (
                    (rank, me, send_in, receive_out, held[me]),
                    (me, rank, receive_in, send_out, whole),
                ):
                    box = whole.intersect(held[holder]) if each.owner == owner else None
                    if box is None:
                        continue
                    gradient, weight = each.dtypes
                    if copies[me] == copies[rank]:
                        inward.add(number, "gradient", box, within, gradient)
                        inward.add(number, "weight", box, within, weight)
                    outward.add(number, "weight", box, within, weight)
            for packing in packings:
                packing.close()
        self.to_owners = AllToAll(owner_group, send_in, receive_in, f"{name} in")
        self.from_owners = AllToAll(owner_group, send_out, receive_out, f"{name} out")

    def send_in(self) -> None:
        """Send gradients and weights to their owners."""
        with _torch.PlainAttributes():
            grads = [each.parameter.grad for each in self.matrices]
        self._shards = {number: _torch.held_of(each.parameter) for number, each in enumerate(self.matrices)}
        gradients = {
            number: None if grad is None else _torch.held_of(cut_as(each.parameter, grad))
            for number, (each, grad) in enumerate(zip(self.matrices, grads))
        }
        self.to_owners.launch(self.lane, {"gradient": gradients, "weight": self._shards})

    def receive_in(self, keep_dtype: bool) -> None:
        """Set the received values of this rank's matrices."""
        gradients: dict[int, torch.Tensor] = {}
        for number, each in self.owned.items():
            sizes, device = each.matrix.box.sizes, _torch.held_of(each.parameter).device
            gradient, weight = each.dtypes
            gradients[number] = torch.empty(sizes, dtype=gradient, device=device)
            self._weights[number] = torch.empty(sizes, dtype=weight, device=device)
        self.to_owners.receive({"gradient": gradients, "weight": self._weights})
        for number, each in self.owned.items():
            each.tensor.data = self._weights[number].view(each.matrix.shape)
            received = gradients.pop(number)
            if each.parameter.grad is not None:  # else no rank has used the parameter
                set_grad(each.tensor, received.view(each.matrix.shape), keep_dtype)

    def send_out(self) -> None:
        """Send the new weights to all ranks that hold them."""
        for number, each in self.owned.items():
            self._weights[number] = each.tensor.data.reshape(each.matrix.box.sizes)  # it may be another tensor
        self.from_owners.launch(self.lane, {"weight": self._weights})
        self.clear()

    def receive_out(self) -> None:
        """Write the new weights into the shards."""
        self.from_owners.receive({"weight": self._shards})
        self._shards = {}

    def clear(self) -> None:
        for each in self.owned.values():
            each.clear()
        self._weights.clear()

    def drop(self) -> None:
        self.clear()
        self._shards = {}
        self.to_owners.drop()
        self.from_owners.drop()


# All-to-alls


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
    packed: torch.Tensor  # its packed bytes

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece as a view of the tensor, in the shape of ``packed``."""
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
        pieces = []
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
                pieces.append(Piece(number, role, where, times, elements.as_strided(sizes, strides, start)))
        return pieces


def _stacks(boxes: Sequence[tuple[Box, int]], within: Box) -> list[list[tuple[Box, int]]]:
    """Boxes and where they start, in the same order; a list for each piece."""
    stacks: list[list[tuple[Box, int]]] = []
    for box, start in boxes:
        if stacks and box.sizes and box.sizes[1:] == within.sizes[1:]:
            before, at = stacks[-1][-1]
            follows = box.sizes == before.sizes and box.offsets[0] == before.offsets[0] + box.sizes[0]
            if follows and (len(stacks[-1]) == 1 or start - at == at - stacks[-1][-2][1]):
                stacks[-1].append((box, start))
                continue
        stacks.append([(box, start)])
    return stacks


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
            buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            self._bytes = [buffers[0], buffers[-1]]
            self._pieces = [packing.pieces(packed) for packing, packed in zip(self._packings, self._bytes)]
        sent, received = self._bytes
        sent.untyped_storage().resize_(sent.numel())
        pairs = []
        for piece in self._pieces[0]:
            tensor = tensors[piece.role][piece.number]
            if tensor is None:
                piece.packed.zero_()
            else:
                pairs.append((piece.packed, piece.within(tensor)))
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
        _copy([(piece.within(tensors[piece.role][piece.number]), piece.packed) for piece in self._pieces[1]])
        self._ticket = None
        for packed in self._bytes:
            packed.untyped_storage().resize_(0)

    def drop(self) -> None:
        """Forget a running all-to-all after an exception.

        On a device, its memory may be reused at once, so this waits. On the CPU, its work keeps the memory alive.
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
