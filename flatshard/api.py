"""The public functions: validate, build, attach."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard import _arguments, _torch
from flatshard.buffer.rules import add_rules
from flatshard.copying import copy_module
from flatshard.engine.gradients.gradients import GradientScale
from flatshard.engine.groups.registry import OWNER
from flatshard.engine.schedule.root import root_of
from flatshard.engine.tree.build import NO_SHARD, Choices, Values, Where, build_unit, owned_modules, units_below
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import Unit, unit_of
from flatshard.hf import methods_for
from flatshard.layout.planner import LayoutName
from flatshard.module import unit_class
from flatshard.optim.step import watch_steps
from flatshard.policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    Refusal,
    SchedulePolicy,
    Strategy,
    own_policy,
    placements_for,
)
from flatshard.state import show_state, state_of

M = TypeVar("M", nn.Module, list[nn.Module])


@dataclass
class Installed:
    """What `install` changes of `fully_shard` itself."""

    values: Values = "same"  # what None means there, unless the environment says
    refuses_meta: bool = False  # a forward of what is on the meta device is an error, as with PyTorch's
    after: Callable[[], None] = lambda: None  # called whenever a unit has been made


installed = Installed()


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    strategy: Strategy | int | Placements | None = None,
    outer_strategy: Strategy | int | None = None,
    layout: LayoutName = "tensor",
    gradient_scale: GradientScale = "mean",
    data_mesh: DeviceMesh | None = None,
    schedule: SchedulePolicy | None = None,
    optional: bool = False,
    rows: bool = False,
    values: Values | None = None,
) -> M:
    """Make a unit of ``module``: shard its parameters over ``mesh``, and gather them only while they are needed.

    The unit owns every parameter below the module that no nested unit owns, so shard from the inside out: blocks first,
    then the model. A list of modules becomes one unit, gathered when the first of them runs and released when the last
    has. Of weights that several units share, the first one shards them, and all gather them. The module keeps its
    identity and its parameter names; its class becomes ``FSDP<Name>``, a subclass of its own class and of `FSDPModule`.
    Its parameters become DTensors that hold this rank's rows; build the optimizer after this call, on
    ``model.parameters()``. After backward, their gradients are the means over all ranks.

    ``mesh``: one axis (shard), or two (outer, inner). Default: one axis of all ranks, on the current accelerator or
    else the CPU. Parameters and buffers are moved to the mesh's device.
    ``reshard_after_forward``: True frees the full parameters after forward and gathers them again in backward; False
    keeps them until the end of backward; a number that divides the shard axis keeps them sharded over groups of so many
    neighbours, which gather them in backward among themselves; ``"auto"`` keeps them if they fit in the budget of the
    root, ``SchedulePolicy(keep_for_backward=bytes)``. Default: True, and False for the outermost unit.
    ``shard_placement_fn``: given a parameter, returns ``Shard(dim)`` to cut it on that dim as torch.chunk does, or None
    for dim 0. Other dims than 0 cost a copy in each gather and reduce, and need layout ``"tensor"``. It may also return
    a `Sharding`, for a mesh of the parameter's own, as experts have, or a dim that pads little; or PyTorch's
    ``ShardPlacementResult``, whose parameters have the mean over their own mesh as gradients.
    ``mp_policy``: the dtypes of compute, reduction, gradients and main weights.
    ``offload_policy``: `CPUOffloadPolicy` keeps main weights, gradients and optimizer state in host memory.
    ``ignored_params``: parameters that are left alone.
    ``dp_mesh_dims``: which axes of ``mesh`` are data-parallel, context parallelism's among them. ``mesh`` is then the
    mesh of all parallelism. Parameters that are DTensors are so on all of it, replicated along those axes.
    ``strategy``: what is sharded over the last axis: ``"no_shard"`` or 0, nothing; ``"optim"`` or 1, main weights and
    optimizer state; ``"optim_grads"`` or 2, gradients too; ``"optim_grads_params"`` or 3, everything (the default). Or
    `Placements`, for every axis.
    ``outer_strategy``: of the first of two axes: ``"no_shard"`` (replicate: HSDP, the default) or ``"optim"`` (main
    weights and optimizer state sharded over both axes: HFSDP).
    ``layout``: how the parameters lie in the buffers: ``"tensor"``, each cut as torch.chunk cuts it; ``"flat"``, packed
    into as few runs as pad little; ``"auto"``, flat where tensors are small, and large ones cut on a dim that pads
    little. All train alike.
    ``gradient_scale``: what gradients are of the ranks' gradients: their ``"mean"``, their ``"sum"``, or a number times
    their sum. A loss per token is a sum that the caller divides once, by all tokens: ``"sum"``.
    ``data_mesh``: the ranks that have data of their own, over which the mean is; default: ``mesh``. For experts, which
    are sharded over fewer ranks than send them tokens.
    ``schedule``: how far communication runs ahead; that of the root counts.
    ``optional``: the batches of some ranks may not use this unit, or units below it (a vision encoder, an adapter).
    Those ranks take part in its gathers and reduces with zeros, at the place where it is registered: after the units
    before it, and before those after it, which is the order to call them in. What no rank has used has no gradient. One
    backward goes through one forward of such a model, and its parameters are not tied to others (decision 020).
    ``rows``: of an embedding that is not tied to a head, exchange the rows that batches read, and their gradients,
    instead of gathering and reducing the table (docs/rows.md). All ranks look up at the same time.
    ``values``: what the ranks' parameters hold when they are cut. ``"same"``: the same, which the first forward
    checks, apart from those that have been loaded or written since; ``"warn"``: a difference is a warning;
    ``"first"``: keep those of the first rank of the mesh (all ranks of it call this at the same time then);
    ``"own"``: what each rank has, so that the model is a mixture. Default: the environment variable
    FLATSHARD_VALUES, or ``"same"``, or ``"warn"`` after `install`: PyTorch's trains.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    choices = checked_choices(
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        strategy=strategy,
        outer_strategy=outer_strategy,
        layout=layout,
        gradient_scale=gradient_scale,
        data_mesh=data_mesh,
        schedule=schedule,
        optional=optional,
        rows=rows,
        values=values,
    )
    make_unit(modules, choices)
    return module


def make_unit(modules: Sequence[nn.Module], choices: Choices) -> Unit:
    """Make a unit of modules, and let them be of a class that knows of it."""
    add_rules()
    watch_steps()
    unit = build_unit(modules, choices, find_root)
    unit.ask(refuses_meta=installed.refuses_meta)
    unit.copier = functools.partial(copy_module, make_unit)
    for each in modules:
        each.__class__ = unit_class(type(each), methods_for, bool(choices.rows))
        show_state(each)
    installed.after()
    return unit


def checked_choices(
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    strategy: Strategy | int | Placements | None = None,
    outer_strategy: Strategy | int | None = None,
    layout: LayoutName = "tensor",
    gradient_scale: GradientScale = "mean",
    data_mesh: DeviceMesh | None = None,
    schedule: SchedulePolicy | None = None,
    optional: bool = False,
    rows: bool = False,
    values: Values | None = None,
) -> Choices:
    """What these arguments of `fully_shard` say, checked; nothing is done."""
    mp_policy, offload_policy, dp_mesh_dims = map(own_policy, (mp_policy, offload_policy, dp_mesh_dims))
    mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy  # callers pass None for no choice
    offload_policy = OffloadPolicy() if offload_policy is None else offload_policy
    if layout not in get_args(LayoutName):
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(get_args(LayoutName))}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn={shard_placement_fn!r}: must be a function of a parameter")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy={offload_policy!r}: must be a flatshard.OffloadPolicy or CPUOffloadPolicy")
    kept: Any = os.environ.get("FLATSHARD_VALUES", installed.values) if values is None else values
    if kept not in get_args(Values):
        raise ValueError(f"values={kept!r}: must be one of {', '.join(get_args(Values))}")
    if gradient_scale not in ("mean", "sum") and not _is_number(gradient_scale):
        raise ValueError(f"gradient_scale={gradient_scale!r}: must be 'mean', 'sum' or a finite number")
    for name, policy, kind in (("mp_policy", mp_policy, MixedPrecisionPolicy), ("schedule", schedule, SchedulePolicy)):
        if policy is not None and not isinstance(policy, kind):
            raise TypeError(f"{name}={policy!r}: must be a flatshard.{kind.__name__}")
    for name, given in (("mesh", mesh), ("data_mesh", data_mesh)):
        if given is not None and not isinstance(given, DeviceMesh):
            raise TypeError(f"{name}={given!r}: must be a DeviceMesh")
    if dp_mesh_dims is not None and not isinstance(dp_mesh_dims, DataParallelMeshDims):
        raise TypeError(f"dp_mesh_dims={dp_mesh_dims!r}: must be a flatshard.DataParallelMeshDims")
    if mesh is not None and not dist.is_initialized():
        raise RuntimeError(
            f"the process group of {mesh} was destroyed: call torch.distributed.init_process_group() again, and make a "
            "new mesh"
        )
    mesh = _default_mesh() if mesh is None else mesh
    where = Where(shard_placement_fn, by_waste=layout == "auto")
    if dp_mesh_dims is not None:
        where = replace(where, mesh=mesh, axes=_axes_of(mesh, dp_mesh_dims))
        mesh = _torch.data_parallel_mesh(mesh, dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names)
        if not where.axes[0]:
            if strategy not in (None, 0, "no_shard"):
                raise ValueError(f"strategy={strategy!r}: dp_mesh_dims names no axis to shard over")
            strategy = "no_shard"
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}, of {mesh.ndim} axes: it must have one (shard) "
            "or two (outer, inner)"
        )
    if schedule is not None:
        schedule.check(mesh)
    return Choices(
        mesh=mesh,
        device=_device_of(mesh),
        placements=placements_for(strategy, outer_strategy, mesh.ndim),
        precision=mp_policy,
        layout=layout,
        reshard_after_forward=_checked_reshard(reshard_after_forward, mesh),
        gradient_scale=gradient_scale if isinstance(gradient_scale, str) else float(gradient_scale),
        schedule=schedule,
        ignored=_ignored(ignored_params),
        where=where,
        offload=offload_policy,
        optional=_arguments.flag("optional", optional),
        rows=_arguments.flag("rows", rows),
        values=kept,
        strategy=(strategy, outer_strategy),
        data_mesh=data_mesh,
    )


def _axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of ``mesh`` that shard, and those that replicate."""
    names = mesh.mesh_dim_names or ()
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"dp_mesh_dims: Mesh dim name {name!r} not found in mesh.mesh_dim_names {names}")
    shard, replicate = (tuple(names.index(n) for n in given) for given in (dims.shard_names, dims.replicate_names))
    return shard, replicate


def _ignored(given: Any) -> frozenset[nn.Parameter]:
    try:
        found = frozenset(() if given is None else given)
    except TypeError as error:
        raise TypeError(f"ignored_params={given!r}: must be a set of parameters") from error
    for each in found:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"ignored_params holds {each!r}, and must hold parameters, not their names")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _checked_reshard(
    value: bool | int | Literal["auto"] | None, mesh: DeviceMesh
) -> bool | int | Literal["auto"] | None:
    """A group size of 1 keeps everything, one of the whole axis nothing."""
    if value is None or isinstance(value, bool) or value == "auto":
        return value
    size = mesh.size(mesh.ndim - 1)
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, or 'auto', "
            f"not {value!r}"
        )
    if value < 1 or size % value:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {value}: a number of "
            "ranks that divides the shard axis"
        )
    return value != 1 if value in (1, size) else value


def no_shard(target: nn.Module | nn.Parameter) -> None:
    """Mark a module, with all below it, or a parameter, before `fully_shard`: it stays whole on every rank.

    Frozen parameters that are marked are left in their modules as they are, on the device and in the compute dtype of
    their unit: nothing of them is gathered and nothing hooked. Trainable ones rest whole too; their gradients are
    averaged and their optimizer state follows the strategy, so that they are refreshed once per optimizer step.
    """
    if isinstance(target, nn.Parameter):
        _refuse_sharded("this parameter", [target])
        target.__dict__[NO_SHARD] = True
        return
    if not isinstance(target, nn.Module):
        raise TypeError(f"no_shard takes a module or a parameter, not {type(target).__name__}")
    for module in target.modules():
        _refuse_sharded(type(module).__name__, module.parameters(recurse=False), unit_of(module))
    for module in target.modules():
        module.__dict__[NO_SHARD] = True


def _refuse_sharded(what: str, parameters: Iterable[nn.Parameter], unit: Unit | None = None) -> None:
    if unit is not None or any(OWNER in parameter.__dict__ for parameter in parameters):
        raise ValueError(f"{what} is sharded already; call no_shard before fully_shard")


@contextmanager
def microbatch(module: nn.Module, *, is_first: bool = True, is_last: bool = True) -> Iterator[None]:
    """Say which micro-batch of an optimizer step runs in the body, for all units at and below ``module``.

    Compute weights that rest on this rank are refreshed from main only if ``is_first``. Axes over which gradients rest
    unreduced are reduced only if ``is_last``, and only such a backward ends with all reduces done; whoever reads a
    ``.grad`` before it waits for them. Nests; what held before holds again afterwards, also after an exception.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"microbatch takes a module, not {type(module).__name__}")
    units = [unit for _, unit in units_below(module)]
    if not units:
        raise ValueError(f"no unit at or below {type(module).__name__}: fully_shard was not called on it")
    before = [(unit.is_first, unit.is_last) for unit in units]
    for unit in units:
        unit.is_first, unit.is_last = is_first, is_last
        for group in unit.groups if is_first else ():
            if not group.is_full:
                group.renew()  # the first forward to use them may be one of a later micro-batch
    try:
        yield
        if is_last:
            # The last micro-batch may have used nothing that is trained here, and so have had no backward.
            for root in dict.fromkeys(map(root_of, units)):
                if root is not None:
                    root.reduces.flush(units)
    finally:
        for unit, (first, last) in zip(units, before):
            unit.is_first, unit.is_last = first, last


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard was given an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, not {type(module).__name__}")
        name = type(module).__name__
        if unit_of(module) is not None:
            raise Refusal(
                f"fully_shard was already called on this {name}, and a module can be one unit only. Each distinct "
                "composable distributed API can only be applied to a module once."
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {name} is never called, so "
                "its unit would never be gathered; call fully_shard on each of its modules, or pass them as a list to "
                "make one unit of them"
            )
    if len(set(modules)) != len(modules):
        raise ValueError("one of the modules is given twice; name each once")
    for module in modules:
        below = set(module.modules()) - {module}
        if below & set(modules):
            raise ValueError("one of the modules contains another; a unit cannot overlap itself")
    for _, owned in owned_modules(modules):
        for child in owned.children():
            unit = unit_of(child)
            if unit is not None and any(group.is_full for group in unit.groups):
                raise RuntimeError(f"unit '{unit.name}' is unsharded; call reshard() on it before sharding its parent")


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs torch.distributed: start the script with torchrun and call "
            "torch.distributed.init_process_group(), or pass a mesh"
        )
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


fully_shard.state = state_of  # type: ignore[attr-defined]  # as of PyTorch's function: what it made of a module
