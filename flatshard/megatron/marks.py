"""What Megatron's marks say of a model: its units, its experts, what is tensor parallel; and names that follow from it.

Experts have their numbers among all ranks' in state dicts, so that any number of ranks can share them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from flatshard import _torch
from flatshard.api import no_shard
from flatshard.buffer.dtensor import without_axis
from flatshard.engine.parameters.sharded_param import PLAIN
from flatshard.megatron.utils import FSDPDistributedIndex, get_mcore_tensor_parallel_partition_dim, is_expert
from flatshard.wrapping import unit_modules


def fsdp_no_shard(target: nn.Module | nn.Parameter) -> None:
    """Mark what stays whole on every rank, before sharding: `flatshard.no_shard`, and ``_fsdp_no_shard`` on it."""
    no_shard(target)
    for parameter in [target] if isinstance(target, nn.Parameter) else target.parameters():
        parameter._fsdp_no_shard = True  # type: ignore[attr-defined]


def plan_units(
    model: nn.Module, classes: Sequence[type[nn.Module] | str] | None, *, fine_grained: bool, single: bool
) -> list[tuple[list[nn.Module], bool]]:
    """The modules of each unit, and whether they are experts; inner ones first, and without ``model`` itself.

    ``fine_grained``: so is every module below that has parameters of its own. ``single``: without classes, there are
    none; otherwise repeated blocks are found.
    """
    found = unit_modules(model, classes)[:-1] if classes else [] if single else unit_modules(model, "auto")[:-1]
    chosen = [modules for modules in found if any(True for module in modules for _ in module.parameters())]
    experts = list(_expert_modules(model, ""))
    inside = {below for modules in experts for module in modules for below in module.modules()}
    chosen = [modules for modules in chosen if not set(modules) & inside]
    taken = {id(module) for modules in (*chosen, *experts) for module in modules}
    for module in [below for modules in chosen for each in modules for below in each.modules()] if fine_grained else []:
        if id(module) not in taken and module not in inside and module._parameters:
            taken.add(id(module))
            chosen.append([module])
    place = {module: number for number, module in enumerate(model.modules())}
    units = [*((modules, False) for modules in chosen), *((modules, True) for modules in experts)]
    return sorted(units, key=lambda unit: -place[unit[0][0]])


def _expert_modules(module: nn.Module, name: str) -> Iterator[list[nn.Module]]:
    """Outermost modules that hold nothing but experts' parameters. Those of a list are one unit: any may be idle."""
    marks = [is_expert(parameter) for parameter in module.parameters()]
    if not any(marks):
        return
    if all(marks):
        called = type(module).forward is not nn.Module.forward
        yield [module] if called else [child for child in module.children() if any(True for _ in child.parameters())]
        return
    if any(is_expert(parameter) for parameter in module.parameters(recurse=False)):
        raise ValueError(
            f"'{name or type(module).__name__}' holds parameters of experts (allreduce=False) and others; give the "
            "experts a module of their own"
        )
    for child_name, child in module.named_children():
        yield from _expert_modules(child, f"{name}.{child_name}" if name else child_name)


def distribute_marked(model: nn.Module, index: FSDPDistributedIndex) -> None:
    """Make parameters that tensor parallelism has cut, or of which each rank has its own experts, DTensors that say so.

    Their modules go on computing with the plain local parts; norms, optimizers and checkpoints see global shapes. All
    experts of one name are one tensor, one after another on dim 0.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                replaced = _distributed(parameter, index)
                if replaced is None:
                    continue
                made[parameter] = replaced
            module._parameters[name] = made[parameter]


def _distributed(parameter: nn.Parameter, index: FSDPDistributedIndex) -> nn.Parameter | None:
    dim, root = get_mcore_tensor_parallel_partition_dim(parameter), index.get_root_mesh(is_expert(parameter))
    if root is None:
        return None
    cuts = [(index.ep_dim, 0 if parameter.dim() and is_expert(parameter) else None), (index.tp_dim, dim)]
    axes = {name: Shard(at) for name, at in cuts if at is not None and name in (root.mesh_dim_names or ())}
    axes = {name: cut for name, cut in axes.items() if root[name].size() > 1}
    if not axes:
        return None
    if index.hsdp_outer_dp_shard:
        raise NotImplementedError(
            f"outer_dp_sharding_strategy='optim': a parameter of {tuple(parameter.shape)} is marked as cut along "
            f"{', '.join(axes)}, and such are sharded over one data-parallel axis; use 'no_shard'"
        )
    whole: Any = DTensor.from_local(parameter.detach(), root[tuple(axes)], list(axes.values()), run_check=False)
    replaced = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    replaced.__dict__.update({key: value for key, value in parameter.__dict__.items() if key not in replaced.__dict__})
    replaced.__dict__[PLAIN] = True
    return replaced


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
