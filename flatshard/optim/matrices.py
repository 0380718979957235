"""Matrices as the optimizer of their owner sees them, and buckets of them that travel together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.engine.gradients.main_grads import MAIN_GRAD
from flatshard.engine.groups.registry import group_of
from flatshard.optim.all_to_all import AllToAll, OwnerGroup
from flatshard.optim.assignment import Matrix
from flatshard.optim.flat_params import set_grad, sharding_of


class MatrixParam:
    """One matrix as this rank's optimizer sees it: a plain parameter, which has its values during the step only."""

    def __init__(
        self, name: str, parameter: nn.Parameter, matrix: Matrix, number: int, owner_group: OwnerGroup
    ) -> None:
        self.name, self.parameter, self.matrix = f"{name}{matrix.label}", parameter, matrix
        self.number: int | None = number  # of its parameter group; None if it is in none any more
        self.owner_group, self.owner = owner_group, 0
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

    def set_values(self, gradient: torch.Tensor, weight: torch.Tensor, uncast: bool) -> None:
        """Give the tensor its values. A parameter without a gradient on this rank has been used on none."""
        self.tensor.data = weight.view(self.matrix.shape)
        if self.parameter.grad is not None:
            set_grad(self.tensor, gradient.view(self.matrix.shape), uncast)

    def clear(self) -> None:
        self.tensor.grad = None
        self.tensor.data = self._nothing


@dataclass
class Bucket:
    """Matrices that travel together; the numbers of pieces are places in ``matrices``."""

    matrices: list[MatrixParam]
    to_owners: AllToAll
    from_owners: AllToAll

    def __post_init__(self) -> None:
        self.mine = [number for number, each in enumerate(self.matrices) if each.is_mine]
        self._weights: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}  # what this rank holds of the weights, from `send_in` to `receive_out`

    def send_in(self, lane: Lane) -> None:
        """Send gradients and weights to their owners."""
        with _torch.PlainAttributes():
            grads = [each.parameter.grad for each in self.matrices]
        self._held = {number: _torch.held_of(each.parameter) for number, each in enumerate(self.matrices)}
        gradients = {number: _held_gradient(each.parameter, grads[number]) for number, each in enumerate(self.matrices)}
        self.to_owners.launch(lane, {"gradient": gradients, "weight": self._held})

    def receive_in(self, uncast: bool) -> None:
        """Let the matrices of this rank have the values that have come."""
        gradients: dict[int, torch.Tensor] = {}
        for number in self.mine:
            each = self.matrices[number]
            sizes, device = each.matrix.box.sizes, _torch.held_of(each.parameter).device
            gradient, weight = each.dtypes
            gradients[number] = torch.empty(sizes, dtype=gradient, device=device)
            self._weights[number] = torch.empty(sizes, dtype=weight, device=device)
        self.to_owners.receive({"gradient": gradients, "weight": self._weights})
        for number in self.mine:
            self.matrices[number].set_values(gradients.pop(number), self._weights[number], uncast)

    def send_out(self, lane: Lane) -> None:
        """Send the new weights to all who hold them."""
        for number in self.mine:
            each = self.matrices[number]
            self._weights[number] = each.tensor.data.reshape(each.matrix.box.sizes)  # it may be another tensor
        self.from_owners.launch(lane, {"weight": self._weights})
        self.clear()

    def receive_out(self) -> None:
        """Put the new weights into the shards."""
        self.from_owners.receive({"weight": self._held})
        self._held = {}

    def clear(self) -> None:
        for number in self.mine:
            self.matrices[number].clear()
        self._weights.clear()

    def drop(self) -> None:
        self.clear()
        self._held = {}
        self.to_owners.drop()
        self.from_owners.drop()


def _held_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a gradient, cut as the parameter is. Collective for one that lies in another way."""
    if grad is None or not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if not hasattr(grad, MAIN_GRAD) and sharding_of(grad) != sharding_of(parameter):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return _torch.held_of(grad)
