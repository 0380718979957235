"""The public functions: validate, build, attach."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from flatshard import _torch
from flatshard.engine.build import NO_SHARD, OWNER, Choices, Where, build_unit, owned_modules, units_below
from flatshard.engine.gradients import GradientScale
from flatshard.engine.unit import Unit, scope_of, unit_of
from flatshard.layout.planner import LayoutName
from flatshard.policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    SchedulePolicy,
    Strategy,
    placements_for,
)

M = TypeVar("M", nn.Module, list[nn.Module])


class FSDPModule(TorchFSDPModule):
    """What `fully_shard` adds to the class of a module.

    It is a subclass of PyTorch's own class of that name for those who ask for it by `isinstance` (pipelining, the
    compiler). It shares no code with it: methods of PyTorch's that are missing here refuse.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers make new instances of their own class when they are sliced; those are not units."""
        original = next(base for base in cls.__mro__ if not issubclass(base, TorchFSDPModule))
        made: Any = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to`, `.float`, `to_empty` and their like replace parameters; the buffers take the new ones over."""
        assert isinstance(self, nn.Module)
        unit = unit_of(self)
        assert unit is not None
        for below in _units(self, True):
            below.check_change(fn)
        own: Any = super(TorchFSDPModule, self)  # the module's own class
        with unit.applying(fn):
            return own._apply(fn, recurse)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this unit's parameters and show them in full. With ``async_op`` the handle's ``wait`` shows them."""
        unit, scope = _unit_and_scope(self)
        scope.refresh_order()
        for group in unit.groups:
            if unit.is_first and not group.is_full:
                group.mark_stale()
        scope.gather(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show this unit's sharded parameters and free the full ones."""
        _unit_and_scope(self)[0].release()

    def reset(self) -> None:
        """Give up a step that an exception interrupted: the next one starts clean. Unreduced gradients are lost."""
        _unit_and_scope(self)[1].reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; also where full parameters are shown, as between a forward and its backward.

        Gradients of micro-batches that wait for the last one are forgotten too. `Optimizer.zero_grad` cannot do that.
        """
        assert isinstance(self, nn.Module)
        nn.Module.zero_grad(self, set_to_none)
        for unit in _units(self, True):
            for group in unit.groups:
                group.gradients.drop_partial()
            for parameter in (member.sharded for group in unit.groups if group.is_full for member in group.members):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this one's forward starts, instead of those that the recorded order says."""
        refs = [weakref.ref(_unit_and_scope(module)[0]) for module in modules]
        _unit_and_scope(self)[0].prefetch_in_forward = refs

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this one's backward starts, instead of those that the recorded order says."""
        refs = [weakref.ref(_unit_and_scope(module)[0]) for module in modules]
        _unit_and_scope(self)[0].prefetch_in_backward = refs

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Off: gradients stay on their rank, whole and unreduced, until a backward with it on reduces them all."""
        for unit in _units(self, recurse):
            unit.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Off: gradients go no further than they rest between micro-batches; under HSDP, the outer axis waits."""
        for unit in _units(self, recurse):
            unit.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the backwards that follow are the last of their optimizer step; `microbatch` says it for a body."""
        for unit in _units(self, True):
            unit.is_last = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by ``factor``, in this unit, instead of taking their mean."""
        if not _is_number(factor) or factor == 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): the factor must be a finite number, and not 0")
        for group in _unit_and_scope(self)[0].groups:
            group.gradients.scale = 1.0 / factor

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` of this unit and, with ``recurse``, of those below it."""
        for unit in _units(self, recurse):
            unit.reshard_after_forward = reshard_after_forward


def _refuse(name: str) -> Callable[..., None]:
    def refusal(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: flatshard does not offer this method of PyTorch's FSDPModule")

    refusal.__name__ = name
    refusal.__doc__ = "Not offered; raises NotImplementedError."
    return refusal


for _name in set(vars(TorchFSDPModule)) - set(vars(FSDPModule)):
    if not _name.startswith("__") and callable(getattr(TorchFSDPModule, _name)):
        setattr(FSDPModule, _name, _refuse(_name))


class UnshardHandle:
    """A gather on its way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Order what follows after the gather, and show the full parameters to the modules."""
        if self._unit is not None:
            for group in self._unit.groups:
                group.swap_in()
            self._unit = None


def _units(module: FSDPModule, recurse: bool) -> list[Unit]:
    assert isinstance(module, nn.Module)
    own = unit_of(module)
    return [unit for _, unit in units_below(module) if recurse or unit is own]


def _unit_and_scope(module: TorchFSDPModule) -> tuple[Unit, Any]:
    assert isinstance(module, nn.Module)
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"{type(module).__name__} is not a unit: fully_shard was not called on it")
    return unit, scope_of(unit, module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    strategy: Strategy | int | Placements | None = None,
    outer_strategy: Strategy | int | None = None,
    layout: LayoutName = "tensor",
    gradient_scale: GradientScale = "mean",
    schedule: SchedulePolicy | None = None,
) -> M:
    """Make a unit of ``module``: shard its parameters over ``mesh``, and gather them only while they are needed.

    The unit owns every parameter below the module that no nested unit owns, so shard from the inside out: blocks first,
    then the model. A list of modules becomes one unit, gathered when the first of them runs and released when the last
    has. The module keeps its identity and its parameter names; its class becomes ``FSDP<Name>``, a subclass of its own
    class and of `FSDPModule`. Its parameters become DTensors that hold this rank's rows; build the optimizer after this
    call, on ``model.parameters()``. After backward, their gradients are the means over all ranks.

    ``mesh``: one axis (shard), or two (outer, inner). Default: one axis of all ranks, on the current accelerator or
    else the CPU. Parameters and buffers are moved to the mesh's device.
    ``reshard_after_forward``: True frees the full parameters after forward and gathers them again in backward; False
    keeps them until the end of backward; a number that divides the shard axis keeps them sharded over groups of so many
    neighbours, which gather them in backward among themselves. Default: True, and False for the outermost unit.
    ``shard_placement_fn``: given a parameter, returns ``Shard(dim)`` to cut it on that dim as torch.chunk does, or None
    for dim 0. Other dims than 0 cost a copy in each gather and reduce, and need layout ``"tensor"``. It may also return
    PyTorch's ``ShardPlacementResult``, to shard the parameter over another mesh than the unit's.
    ``mp_policy``: the dtypes of compute, reduction, gradients and main weights.
    ``offload_policy``: `CPUOffloadPolicy` keeps main weights, gradients and optimizer state in host memory.
    ``ignored_params``: parameters that are left alone.
    ``dp_mesh_dims``: which axes of ``mesh`` are data-parallel. ``mesh`` is then the mesh of all parallelism, and all
    parameters are DTensors on it, replicated along those axes.
    ``strategy``: what is sharded over the last axis: ``"no_shard"`` or 0, nothing; ``"optim"`` or 1, main weights and
    optimizer state; ``"optim_grads"`` or 2, gradients too; ``"optim_grads_params"`` or 3, everything (the default). Or
    `Placements`, for every axis.
    ``outer_strategy``: of the first of two axes: ``"no_shard"`` (replicate: HSDP, the default) or ``"optim"`` (main
    weights and optimizer state sharded over both axes: HFSDP).
    ``layout``: how the parameters lie in the buffers: ``"tensor"``, each cut as torch.chunk cuts it; ``"flat"``, packed
    into as few runs as pad little; ``"auto"``, flat where tensors are small. All train alike.
    ``gradient_scale``: what gradients are of the ranks' gradients: their ``"mean"``, their ``"sum"``, or a number times
    their sum. A loss per token is a sum that the caller divides once, by all tokens: ``"sum"``.
    ``schedule``: how far communication runs ahead; that of the root counts.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    if layout not in get_args(LayoutName):
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(get_args(LayoutName))}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn={shard_placement_fn!r}: must be a function of a parameter")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy={offload_policy!r}: must be a flatshard.OffloadPolicy or CPUOffloadPolicy")
    if gradient_scale not in ("mean", "sum") and not _is_number(gradient_scale):
        raise ValueError(f"gradient_scale={gradient_scale!r}: must be 'mean', 'sum' or a finite number")
    for name, given, kind in (("mp_policy", mp_policy, MixedPrecisionPolicy), ("schedule", schedule, SchedulePolicy)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{name}={given!r}: must be a flatshard.{kind.__name__}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: must be a DeviceMesh")
    mesh = _default_mesh() if mesh is None else mesh
    where = Where(shard_placement_fn)
    if dp_mesh_dims is not None:
        where = Where(shard_placement_fn, mesh, _axes_of(mesh, dp_mesh_dims))
        mesh = _torch.data_parallel_mesh(mesh, dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names)
        if not where.axes[0]:
            if strategy not in (None, 0, "no_shard"):
                raise ValueError(f"strategy={strategy!r}: dp_mesh_dims names no axis to shard over")
            strategy = "no_shard"
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} axes; it must have one (shard) or two (outer, inner)")
    choices = Choices(
        mesh=mesh,
        device=_device_of(mesh),
        placements=placements_for(strategy, outer_strategy, mesh.ndim),
        precision=mp_policy,
        layout=layout,
        reshard_after_forward=_checked_reshard(reshard_after_forward, mesh),
        gradient_scale=gradient_scale if isinstance(gradient_scale, str) else float(gradient_scale),
        schedule=schedule,
        ignored=frozenset(ignored_params or ()),
        where=where,
        offload=offload_policy,
        strategy=(strategy, outer_strategy),
    )
    build_unit(modules, choices)
    for each in modules:
        each.__class__ = _unit_class(type(each))
    return module


def _axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of ``mesh`` that shard, and those that replicate."""
    names = mesh.mesh_dim_names or ()
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"dp_mesh_dims names axis {name!r}, which was not found in mesh.mesh_dim_names {names}")
    shard, replicate = (tuple(names.index(n) for n in given) for given in (dims.shard_names, dims.replicate_names))
    return shard, replicate


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _checked_reshard(value: bool | int | None, mesh: DeviceMesh) -> bool | int | None:
    """A group size of 1 keeps everything, one of the whole axis nothing."""
    if value is None or isinstance(value, bool):
        return value
    size = mesh.size(mesh.ndim - 1)
    if not isinstance(value, int) or value < 1 or size % value:
        raise ValueError(
            f"reshard_after_forward={value!r}: must be True, False, or a number of ranks that divides {size}, the "
            "size of the shard axis"
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
    unreduced are reduced only if ``is_last``. Nests; what held before holds again afterwards, also after an exception.
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
                group.mark_stale()  # the first forward to use them may be one of a later micro-batch
    try:
        yield
        if is_last:
            # The last micro-batch may have used nothing that is trained here, and so have had no backward.
            for scope in dict.fromkeys(unit.scope for unit in units if unit.scope is not None):
                scope.flush(units)
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
            raise ValueError(f"fully_shard was already called on this {name}; a module can be one unit only")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{name} is a container that is never called, so its unit would never be gathered; call fully_shard on "
                "each of its modules, or pass them as a list to make one unit of them"
            )
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
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


_CLASSES: dict[type, type] = {}


def _unit_class(cls: type) -> type:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _CLASSES[cls]
