"""Names in state dicts: experts by their numbers among all ranks', so that any number of ranks can share them out."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer.dtensor import without_axis
from flatshard.megatron.utils import FSDPDistributedIndex, is_expert


class Names:
    """What parameters of a sharded model are called where those of all ranks come together.

    An expert is counted by the list it is in (``experts.local_experts.3.weight``), or by the end of its name
    (``experts.weight3``): rank r of expert parallelism has those from r times as many as it has. What has no number is
    a stack of experts, which is one tensor with those of all ranks.

    Parts of a parameter with a ``partition_stride``, gate and up of a gated layer, alternate between tensor-parallel
    ranks. Its name says so: it can be loaded on as many of them only, and is missing elsewhere.
    """

    def __init__(self, model: nn.Module, index: FSDPDistributedIndex) -> None:
        self._axis, self._index = index.ep_dim, index
        self._parameters = dict(model.named_parameters())
        self._numbered: dict[str, str] = {}  # names of experts that have a number
        self._outward: dict[str, str] = {}
        for name, parameter in self._parameters.items():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            axes = () if mesh is None else mesh.mesh_dim_names or ()
            if mesh is not None and is_expert(parameter) and self._axis in axes:
                numbered = _numbered(model, name, mesh.get_local_rank(self._axis))
                if numbered is not None:
                    self._numbered[name] = numbered
            stride, outward = getattr(parameter, "partition_stride", 1), self._numbered.get(name, name)
            if mesh is not None and stride > 1 and index.tp_dim in axes:
                outward += f".stride_{stride}_of_{mesh.size(axes.index(index.tp_dim))}"
            self._outward[name] = outward
        self._inward = {outward: name for name, outward in self._outward.items()}

    def outward(self, name: str) -> str:
        """The name among all ranks'."""
        return self._outward.get(name, name)

    def inward(self, name: str) -> str:
        """The name in this rank's model."""
        return self._inward.get(name, name)

    def alone(self, name: str, value: Any) -> Any:
        """A tensor of the shape of parameter ``name`` that is of all ranks' experts, as that of this rank's alone."""
        known = name in self._numbered and isinstance(value, DTensor)
        if not known or value.shape != self._parameters[name].shape:
            return value
        root = self._index.get_root_mesh(is_expert_parallel=True)
        assert root is not None
        assert self._axis is not None
        names = tuple(each for each in value.device_mesh.mesh_dim_names or () if each != self._axis)
        mine = self._index.mesh_of(is_expert_parallel=True)
        return without_axis(value, self._axis, mine if names == mine.mesh_dim_names else root[names])

    def together(self, name: str, value: Any) -> Any:
        """The way back, of a tensor that is cut as `alone` cuts it, or whole."""
        if name not in self._numbered or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        parameter = self._parameters[name]
        local = (
            _torch.local_of(value) if isinstance(value, DTensor) else _torch.part_of(value, self.alone(name, parameter))
        )
        return _torch.like_dtensor(parameter, local)


def _numbered(model: nn.Module, name: str, rank: int) -> str | None:
    """The name of an expert's parameter with its number among all ranks', if it has one."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        container = model.get_submodule(".".join(parts[:place]))
        if part.isdecimal() and all(is_expert(parameter) for parameter in container.parameters()):
            parts[place] = str(int(part) + rank * len(list(container.children())))
            return ".".join(parts)
    found = re.fullmatch(r"(.*?)(\d+)", parts[-1])
    if found is None:
        return None
    siblings = model.get_submodule(".".join(parts[:-1]))._parameters
    count = sum(re.fullmatch(re.escape(found[1]) + r"\d+", other) is not None for other in siblings)
    return ".".join([*parts[:-1], f"{found[1]}{int(found[2]) + rank * count}"])
