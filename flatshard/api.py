"""`fully_shard`, `no_shard` and `microbatch`: check the arguments, build the unit, attach it to its modules."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard import _arguments, _torch
from flatshard.buffer.ragged import allow_loading
from flatshard.buffer.rules import add_rules
from flatshard.copying import copy_module
from flatshard.engine.gradients.gradients import GradientScale
from flatshard.engine.groups.changes import share_data
from flatshard.engine.groups.registry import OWNER
from flatshard.engine.schedule.root import root_of
from flatshard.engine.tree.build import build_unit, units_below
from flatshard.engine.tree.parameters import NO_SHARD, Choices, Values, Where, owned_modules
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import Unit, unit_of
from flatshard.hf import methods_for
from flatshard.layout.planner import LayoutName
from flatshard.module import unit_class
from flatshard.optim.clip import mesh_device
from flatshard.optim.step_hook import watch_steps
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
    """Settings of `fully_shard` that `install` changes."""

    values: Values = "same"  # default of ``values``, unless FLATSHARD_VALUES is set
    refuses_meta: bool = False  # a forward with parameters on the meta device raises, as in FSDP2
    after: Callable[[], None] = lambda: None  # called after each unit has been made


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
    then the model. A list of modules becomes one unit: it is gathered when the first of them runs and resharded when
    the last one has run. If several units share a parameter, the first one shards it and all of them gather it. The
    module keeps its identity and its parameter names; its class becomes ``FSDP<Name>``, a subclass of its own class and
    of `FSDPModule`. Its parameters become DTensors that hold this rank's shard; build the optimizer after this call, on
    ``model.parameters()``. After backward, gradients are the mean over all ranks. All ranks of the mesh must call this.

    ``mesh``: one axis (shard), or two (outer, inner). Default: one axis of all ranks, on the current accelerator or
    else the CPU. Parameters and buffers are moved to the mesh's device.
    ``reshard_after_forward``: True frees the full parameters after forward and gathers them again in backward. False
    keeps them until the end of backward. An int that divides the shard axis reshards them to groups of that many
    neighbouring ranks, which gather them among themselves in backward. ``"auto"`` keeps them if they fit in the budget
    of the root, ``SchedulePolicy(keep_for_backward=bytes)``. Default: True, and False for the outermost unit.
    ``shard_placement_fn``: a function of a parameter that returns ``Shard(dim)`` to shard it on that dim as torch.chunk
    does, or None for dim 0. Dims other than 0 cost a copy in each gather and reduce, and need layout ``"tensor"``. It
    may also return a `Sharding`, to shard the parameter over another mesh (experts) or on a dim with little padding, or
    PyTorch's ``ShardPlacementResult``: then the gradient is the mean over the parameter's own mesh.
    ``mp_policy``: the dtypes of compute, reduction, gradients and main weights.
    ``offload_policy``: `CPUOffloadPolicy` keeps main weights, gradients and optimizer state in host memory.
    ``ignored_params``: parameters that are neither sharded nor moved.
    ``dp_mesh_dims``: the data-parallel axes of ``mesh``, including those of context parallelism. ``mesh`` is then the
    mesh of all parallelism; parameters that are DTensors must be on that mesh, and replicated on the named axes.
    ``strategy``: what is sharded over the last axis: ``"no_shard"`` or 0, nothing; ``"optim"`` or 1, main weights and
    optimizer state; ``"optim_grads"`` or 2, gradients too; ``"optim_grads_params"`` or 3, everything (the default). Or
    `Placements`, for every axis.
    ``outer_strategy``: what is sharded over the first of two axes: ``"no_shard"`` (replicate: HSDP, the default) or
    ``"optim"`` (main weights and optimizer state are sharded over both axes: HFSDP).
    ``layout``: how parameters are packed into buffers. ``"tensor"`` shards each parameter as torch.chunk does;
    ``"flat"`` packs parameters first, with little padding; ``"auto"`` packs small parameters, and shards large ones on
    a dim with little padding. Training results are the same.
    ``gradient_scale``: how the gradients of the ranks are combined: ``"mean"``, ``"sum"``, or a number that multiplies
    the sum. Use ``"sum"`` if the loss is a sum over tokens that is divided by the number of tokens of all ranks.
    ``data_mesh``: the ranks with different data, over which the mean is taken; default: ``mesh``. For experts, which
    are sharded over fewer ranks than send tokens to them.
    ``schedule``: how far communication runs ahead; only that of the root is used.
    ``optional``: some ranks may skip this unit, or units below it, in a step (a vision encoder, an adapter). Those
    ranks take part in its gathers and reduces with zeros, so call units in the order in which they are registered. A
    parameter that no rank has used gets no gradient. One backward must go through only one forward of such a model,
    and parameters of optional units must not be tied to those of other units (decision 020).
    ``rows``: for an embedding that is not tied to a head: exchange the rows that batches read, and their gradients,
    instead of gathering and reducing the table (docs/rows.md). All ranks must call the embedding at the same time.
    ``values``: what the parameters of the ranks hold before they are sharded. ``"same"``: the same values; the first
    forward checks this, except for parameters that were loaded or written since. ``"warn"``: the same, but a difference
    is only a warning. ``"first"``: use the values of the first rank of the mesh (a collective call). ``"own"``: each
    rank shards its own values. Default: the environment variable FLATSHARD_VALUES, else ``"same"``, or ``"warn"`` after
    `install`, because FSDP2 does not check.
    """
    given = dict(locals())
    del given["module"]
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    make_unit(modules, checked_choices(**given))
    return module


_SIGNATURE = inspect.signature(fully_shard)


def make_unit(modules: Sequence[nn.Module], choices: Choices) -> Unit:
    """Make a unit of modules, and change their classes to `FSDPModule` subclasses."""
    add_rules()
    share_data()
    allow_loading()
    watch_steps()
    unit = build_unit(modules, choices, find_root)
    unit.configure(refuses_meta=installed.refuses_meta)
    unit.copier = functools.partial(copy_module, make_unit)
    for each in modules:
        each.__class__ = unit_class(type(each), methods_for, bool(choices.rows))
        show_state(each, unit)
    installed.after()
    return unit


# The classes of some arguments, and the values of others.
_CLASSES: dict[str, tuple[type, str]] = {
    "mp_policy": (MixedPrecisionPolicy, "a flatshard.MixedPrecisionPolicy"),
    "offload_policy": (OffloadPolicy, "a flatshard.OffloadPolicy or CPUOffloadPolicy"),
    "dp_mesh_dims": (DataParallelMeshDims, "a flatshard.DataParallelMeshDims"),
    "schedule": (SchedulePolicy, "a flatshard.SchedulePolicy"),
    "mesh": (DeviceMesh, "a DeviceMesh"),
    "data_mesh": (DeviceMesh, "a DeviceMesh"),
}
_NAMES = {"layout": get_args(LayoutName), "values": get_args(Values)}


def _checked(**given: Any) -> SimpleNamespace:
    """Arguments of `fully_shard`, each checked by itself, with its defaults for those that are not given."""
    bound = _SIGNATURE.bind([], **given)
    bound.apply_defaults()
    said = SimpleNamespace(**{name: own_policy(value) for name, value in bound.arguments.items()})
    said.mp_policy = MixedPrecisionPolicy() if said.mp_policy is None else said.mp_policy  # None: the default
    said.offload_policy = OffloadPolicy() if said.offload_policy is None else said.offload_policy
    if said.values is None:
        said.values = os.environ.get("FLATSHARD_VALUES", installed.values)
    for name, (kind, called) in _CLASSES.items():
        value = getattr(said, name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}: must be {called}")
    for name, names in _NAMES.items():
        if getattr(said, name) not in names:
            raise ValueError(f"{name}={getattr(said, name)!r}: must be one of {', '.join(names)}")
    if said.shard_placement_fn is not None and not callable(said.shard_placement_fn):
        raise TypeError(f"shard_placement_fn={said.shard_placement_fn!r}: must be a function of a parameter")
    scale = said.gradient_scale
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and math.isfinite(scale)
    if scale not in ("mean", "sum") and not is_number:
        raise ValueError(f"gradient_scale={scale!r}: must be 'mean', 'sum' or a finite number")
    said.gradient_scale = scale if isinstance(scale, str) else float(scale)
    return said


def checked_choices(**given: Any) -> Choices:
    """The `Choices` that these arguments of `fully_shard` make. Raises if they are wrong; changes nothing."""
    said = _checked(**given)
    mesh, dims, strategy = said.mesh, said.dp_mesh_dims, said.strategy
    if mesh is not None and not dist.is_initialized():
        raise RuntimeError(
            f"the process group of {mesh} was destroyed: call torch.distributed.init_process_group() again, and create "
            "a new mesh"
        )
    mesh = default_mesh() if mesh is None else mesh
    where = Where(said.shard_placement_fn, by_waste=said.layout == "auto")
    if dims is not None:
        kinds, names = (dims.shard_names, dims.replicate_names), mesh.mesh_dim_names or ()
        missing = [name for kind in kinds for name in kind if name not in names]
        if missing:
            raise ValueError(f"dp_mesh_dims: Mesh dim name {missing[0]!r} not found in mesh.mesh_dim_names {names}")
        shard, replicate = (tuple(names.index(name) for name in kind) for kind in kinds)
        where = replace(where, mesh=mesh, axes=(shard, replicate))
        mesh = _torch.data_parallel_mesh(mesh, *kinds)
        if not shard:
            if strategy not in (None, 0, "no_shard"):
                raise ValueError(f"strategy={strategy!r}: dp_mesh_dims has no `shard` axis; use strategy='no_shard'")
            strategy = "no_shard"
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh} with {mesh.ndim} axes: it must have one (shard) "
            "or two (outer, inner); select them by name, for example mesh['dp']"
        )
    if said.schedule is not None:
        said.schedule.check(mesh)
    return Choices(
        mesh=mesh,
        device=mesh_device(mesh),
        placements=placements_for(strategy, said.outer_strategy, mesh.ndim),
        precision=said.mp_policy,
        layout=said.layout,
        reshard_after_forward=_checked_reshard(said.reshard_after_forward, mesh),
        gradient_scale=said.gradient_scale,
        schedule=said.schedule,
        ignored=_ignored(said.ignored_params),
        where=where,
        offload=said.offload_policy,
        optional=_arguments.flag("optional", said.optional),
        rows=_arguments.flag("rows", said.rows),
        values=said.values,
        strategy=(strategy, said.outer_strategy),
        data_mesh=said.data_mesh,
    )


def _ignored(given: Any) -> frozenset[nn.Parameter]:
    try:
        found = frozenset(() if given is None else given)
    except TypeError as error:
        raise TypeError(f"ignored_params={given!r}: must be a set of parameters") from error
    for each in found:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"ignored_params contains {each!r}; it must contain parameters, not their names")
    return found


def _checked_reshard(value: Any, mesh: DeviceMesh) -> Any:
    """``reshard_after_forward``, checked. A group size of 1 becomes False, the size of the whole axis True."""
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
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {value}; {size} is "
            "the size of the shard axis"
        )
    return value != 1 if value in (1, size) else value


def no_shard(target: nn.Module | nn.Parameter) -> None:
    """Mark a parameter, or all parameters of a module, to stay replicated. Call it before `fully_shard`.

    Frozen parameters that are marked stay plain parameters of their modules, in the compute dtype of their unit and on
    its device. They are not gathered and have no hooks. Trainable ones are replicated too: their gradients are averaged
    and their optimizer state is sharded by the strategy; then their weights are gathered once per optimizer step.
    """
    if not isinstance(target, (nn.Module, nn.Parameter)):
        raise TypeError(f"no_shard takes a module or a parameter, not {type(target).__name__}")
    marked: list[Any] = [target] if isinstance(target, nn.Parameter) else list(target.modules())
    for each in marked:
        parameters = [each] if isinstance(each, nn.Parameter) else each.parameters(recurse=False)
        if unit_of(each) is not None or any(OWNER in parameter.__dict__ for parameter in parameters):
            what = "this parameter" if isinstance(each, nn.Parameter) else type(each).__name__
            raise ValueError(f"{what} is already sharded; call no_shard before fully_shard")
    for each in marked:
        each.__dict__[NO_SHARD] = True


@contextmanager
def microbatch(module: nn.Module, *, is_first: bool = True, is_last: bool = True) -> Iterator[None]:
    """Run one micro-batch of an optimizer step in the body, for all units at and below ``module``.

    Compute weights that are kept between steps are updated from the main weights only if ``is_first``. Gradients that
    the strategy keeps unreduced between micro-batches are reduced only if ``is_last``, and only that backward waits for
    all reduces; reading a ``.grad`` earlier waits for them. Can be nested; the exit restores the outer values.
    """
    _arguments.module("microbatch", module)
    units = [unit for _, unit in units_below(module)]
    if not units:
        raise ValueError(f"microbatch: no parameter of {type(module).__name__} is sharded; call fully_shard first")
    before = [(unit.is_first, unit.is_last) for unit in units]
    for unit in units:
        unit.set_batch(is_first, is_last)
        for group in unit.groups if is_first else ():
            if not group.is_full:
                group.renew()  # a later micro-batch may be the first that uses them
    try:
        yield
        if is_last:
            # The last micro-batch may use no trained parameter of these units, and so have no backward here.
            for root in dict.fromkeys(map(root_of, units)):
                if root is not None:
                    root.reduces.flush(units)
    finally:
        for unit, (first, last) in zip(units, before):
            unit.set_batch(first, last)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard was given an empty list of modules; give at least one")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, not {type(module).__name__}")
        name = type(module).__name__
        if unit_of(module) is not None:
            raise Refusal(
                f"fully_shard was already called on this {name}; call it once per module. Each distinct composable "
                "distributed API can only be applied to a module once."
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {name} is never called, so "
                "its parameters would never be gathered; call fully_shard on each of its modules, or on a list of them "
                "to make one unit"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"fully_shard was given a {name}, which takes no hooks; shard the module around it")
    if len(set(modules)) != len(modules):
        raise ValueError("fully_shard was given a list with the same module twice; list each module once")
    for module in modules:
        below = set(module.modules()) - {module}
        if below & set(modules):
            raise ValueError("fully_shard was given a module and one that it contains; leave out the inner one")
    for _, owned in owned_modules(modules):
        for child in owned.children():
            unit = unit_of(child)
            if unit is not None and any(group.is_full for group in unit.groups):
                raise RuntimeError(f"unit '{unit.name}' is unsharded; call reshard() on it before you shard its parent")


def default_mesh(names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh with all ranks on its first axis. The axes of further ``names`` have one rank each."""
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs torch.distributed: start the script with torchrun and call "
            "torch.distributed.init_process_group(), or pass a mesh"
        )
    sizes = (dist.get_world_size(), *(1 for _ in (names or ())[1:]))
    return init_device_mesh(default_device_type(), sizes, mesh_dim_names=names)


def default_device_type() -> str:
    """The device type of default meshes: that of the accelerator if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


fully_shard.state = state_of  # type: ignore[attr-defined]  # an attribute of PyTorch's fully_shard, too
