"""Matrices as seen by the optimizer of their owner, and buckets of matrices that are sent together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.engine.gradients.main_grads import MAIN_GRAD
from flatshard.engine.groups.registry import group_of
from flatshard.optim.all_to_all import AllToAll, OwnerGroup, Packing
from flatshard.optim.assignment import Holders, Matrix
from flatshard.optim.flat_params import set_grad, sharding_of


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
        self._nothing = torch.zeros((), dtype=local.dtype, device=local.device).expand(matrix.shape)  # takes no memory
        self.tensor = nn.Parameter(self._nothing, parameter.requires_grad)
        marks = {key: value for key, value in parameter.__dict__.items() if not key.startswith("_")}  # of users
        self.tensor.__dict__.update(marks, matrix_name=self.name)

    @property
    def is_mine(self) -> bool:
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

    def set_values(self, gradient: torch.Tensor, weight: torch.Tensor, uncast: bool) -> None:
        """Set the values of the tensor. If a parameter has no gradient on this rank, no rank has used it."""
        self.tensor.data = weight.view(self.matrix.shape)
        if self.parameter.grad is not None:
            set_grad(self.tensor, gradient.view(self.matrix.shape), uncast)

    def clear(self) -> None:
        self.tensor.grad = None
        self.tensor.data = self._nothing


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
        self.mine = {number: each for number, each in enumerate(matrices) if each.is_mine}
        self._weights: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}  # what this rank holds of the weights, from `send_in` to `receive_out`
        owner_group = matrices[0].owner_group
        me = owner_group.rank
        packings = [Packing() for _ in range(4)]
        to_owner, at_owner, from_owner, at_holder = packings
        for rank in range(owner_group.size):
            for number, each in enumerate(matrices):
                whole, held, copies = each.matrix.box, each.holders.boxes, each.holders.copies
                for owner, holder, inward, outward, within in (
                    (rank, me, to_owner, at_holder, held[me]),
                    (me, rank, at_owner, from_owner, whole),
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
        self.to_owners = AllToAll(owner_group, to_owner, at_owner, f"{name} in")
        self.from_owners = AllToAll(owner_group, from_owner, at_holder, f"{name} out")

    def send_in(self) -> None:
        """Send gradients and weights to their owners."""
        with _torch.PlainAttributes():
            grads = [each.parameter.grad for each in self.matrices]
        self._held = {number: _torch.held_of(each.parameter) for number, each in enumerate(self.matrices)}
        gradients = {number: _held_gradient(each.parameter, grads[number]) for number, each in enumerate(self.matrices)}
        self.to_owners.launch(self.lane, {"gradient": gradients, "weight": self._held})

    def receive_in(self, uncast: bool) -> None:
        """Set the received values of this rank's matrices."""
        gradients: dict[int, torch.Tensor] = {}
        for number, each in self.mine.items():
            sizes, device = each.matrix.box.sizes, _torch.held_of(each.parameter).device
            gradient, weight = each.dtypes
            gradients[number] = torch.empty(sizes, dtype=gradient, device=device)
            self._weights[number] = torch.empty(sizes, dtype=weight, device=device)
        self.to_owners.receive({"gradient": gradients, "weight": self._weights})
        for number, each in self.mine.items():
            each.set_values(gradients.pop(number), self._weights[number], uncast)

    def send_out(self) -> None:
        """Send the new weights to all ranks that hold them."""
        for number, each in self.mine.items():
            self._weights[number] = each.tensor.data.reshape(each.matrix.box.sizes)  # it may be another tensor
        self.from_owners.launch(self.lane, {"weight": self._weights})
        self.clear()

    def receive_out(self) -> None:
        """Write the new weights into the shards."""
        self.from_owners.receive({"weight": self._held})
        self._held = {}

    def clear(self) -> None:
        for each in self.mine.values():
            each.clear()
        self._weights.clear()

    def drop(self) -> None:
        self.clear()
        self._held = {}
        self.to_owners.drop()
        self.from_owners.drop()


def _held_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a gradient, sharded as the parameter. Collective if the gradient is sharded otherwise."""
    if grad is None or not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if not hasattr(grad, MAIN_GRAD) and sharding_of(grad) != sharding_of(parameter):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return _torch.held_of(grad)
