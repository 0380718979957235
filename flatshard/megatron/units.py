"""What Megatron's marks say of a model: which modules are units, which are experts, what is tensor parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from flatshard.api import no_shard
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
