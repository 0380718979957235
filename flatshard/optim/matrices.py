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
from flatshard.optim.owners import Matrix
from flatshard.optim.routes import Meeting, Route, held_of
from flatshard.optim.runs import cut_of


class Seen:
    """One matrix as this rank's optimizer sees it: a plain parameter, which has its values during the step only."""

    def __init__(self, name: str, parameter: nn.Parameter, matrix: Matrix, number: int, meeting: Meeting) -> None:
        self.name, self.parameter, self.matrix = f"{name}{matrix.label}", parameter, matrix
        self.number: int | None = number  # of its parameter group; None if it is in none any more
        self.meeting, self.owner = meeting, 0
        local = held_of(parameter)
        self._nothing = torch.zeros((), dtype=local.dtype, device=local.device).expand(matrix.shape)  # takes no memory
        self.tensor = nn.Parameter(self._nothing, parameter.requires_grad)
        self.tensor.__dict__.update({k: v for k, v in parameter.__dict__.items() if k in _marks(parameter)})
        self.tensor.__dict__["matrix_name"] = self.name

    @property
    def is_mine(self) -> bool:
        return self.owner == self.meeting.rank

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of its gradient and its weight, the same on all ranks."""
        group = group_of(self.parameter)
        return self.parameter.dtype if group is None else group.gradients.grad_dtype, self.parameter.dtype

    def arrive(self, gradient: torch.Tensor, weight: torch.Tensor, uncast: bool) -> None:
        """Have values. Without a gradient here, the parameter has been used nowhere."""
        tensor, shape = self.tensor, self.matrix.shape
        tensor.data = weight.view(shape)
        if self.parameter.grad is None:
            return
        if gradient.dtype != weight.dtype:
            if uncast:
                _torch.allow_grad_of(tensor, gradient.dtype)
            else:
                gradient = gradient.to(weight.dtype)
        tensor.grad = gradient.view(shape)

    def leave(self) -> None:
        self.tensor.grad = None
        self.tensor.data = self._nothing


def _marks(parameter: nn.Parameter) -> set[str]:
    """The names of what users have put on a parameter."""
    return {name for name in parameter.__dict__ if not name.startswith("_")}


@dataclass
class Bucket:
    """Matrices that travel together; the numbers of routes' pieces are places in ``seen``."""

    seen: list[Seen]
    inward: Route
    outward: Route

    def __post_init__(self) -> None:
        self.mine = [number for number, each in enumerate(self.seen) if each.is_mine]
        self._gradients: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}  # what this rank holds of the weights, from `come` to `land`

    def come(self, lane: Lane) -> None:
        """Send gradients and weights to their owners."""
        with _torch.PlainAttributes():
            grads = [each.parameter.grad for each in self.seen]
        self._held = {number: held_of(each.parameter) for number, each in enumerate(self.seen)}
        gradients = {number: _held_gradient(each.parameter, grads[number]) for number, each in enumerate(self.seen)}
        self.inward.launch(lane, {"gradient": gradients, "weight": self._held})

    def arrive(self, uncast: bool) -> None:
        """Let the matrices of this rank have the values that have come."""
        for number in self.mine:
            sizes, device = self.seen[number].matrix.box.sizes, held_of(self.seen[number].parameter).device
            gradient, weight = self.seen[number].dtypes
            self._gradients[number] = torch.empty(sizes, dtype=gradient, device=device)
            self._weights[number] = torch.empty(sizes, dtype=weight, device=device)
        self.inward.land({"gradient": self._gradients, "weight": self._weights})
        for number in self.mine:
            self.seen[number].arrive(self._gradients.pop(number), self._weights[number], uncast)

    def go(self, lane: Lane) -> None:
        """Send the new weights to all who hold them."""
        for number in self.mine:
            seen = self.seen[number]
            self._weights[number] = seen.tensor.data.reshape(seen.matrix.box.sizes)  # it may be another tensor
        self.outward.launch(lane, {"weight": self._weights})
        self.leave()

    def land(self) -> None:
        """Put the new weights into the shards."""
        self.outward.land({"weight": self._held})
        self._held = {}

    def leave(self) -> None:
        for number in self.mine:
            self.seen[number].leave()
        self._weights.clear()
        self._gradients.clear()

    def drop(self) -> None:
        self.leave()
        self._held = {}
        self.inward.drop()
        self.outward.drop()


def _held_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a gradient, cut as the parameter is. Collective for one that lies in another way."""
    if grad is None or not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if not hasattr(grad, MAIN_GRAD) and cut_of(grad) != cut_of(parameter):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return held_of(grad)
