"""The public functions: validate, build, attach."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard.engine.build import build_unit, owned_modules
from flatshard.engine.unit import Unit, scope_of, unit_of
from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, OffloadPolicy, SchedulePolicy

M = TypeVar("M", nn.Module, list[nn.Module])


class FSDPModule:
    """What `fully_shard` adds to the class of a module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers make new instances of their own class when they are sliced; those are not units."""
        original = cls.__mro__[2]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to`, `.float`, `to_empty` and their like replace parameters; the buffers take the new ones over."""
        assert isinstance(self, nn.Module)
        unit = unit_of(self)
        assert unit is not None
        unit.release()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit.absorb()
        return result

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and show them in full. With ``async_op`` the handle's ``wait`` shows them."""
        unit, scope = _unit_and_scope(self)
        scope.refresh_order()
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

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's forward starts, instead of those that the recorded order says."""
        refs = [weakref.ref(_unit_and_scope(module)[0]) for module in modules]
        _unit_and_scope(self)[0].prefetch_in_forward = refs

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's backward starts, instead of those that the recorded order says."""
        refs = [weakref.ref(_unit_and_scope(module)[0]) for module in modules]
        _unit_and_scope(self)[0].prefetch_in_backward = refs

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` of this unit and, with ``recurse``, of those below it."""
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else (self,):
            unit = unit_of(module)
            if unit is not None:
                unit.reshard_after_forward = reshard_after_forward


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


def _unit_and_scope(module: FSDPModule) -> tuple[Unit, Any]:
    assert isinstance(module, nn.Module)
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"{type(module).__name__} is not a unit: fully_shard was not called on it")
    return unit, scope_of(unit, module)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    layout: LayoutName = "tensor",
    schedule: SchedulePolicy | None = None,
) -> M:
    """Make a unit of ``module``: shard its parameters over ``mesh``, and gather them only while they are needed.

    The unit owns every parameter below the module that no nested unit owns, so shard from the inside out: blocks first,
    then the model. A list of modules becomes one unit, gathered when the first of them runs and released when the last
    has. The module keeps its identity and its parameter names; its class becomes ``FSDP<Name>``, a subclass of its own
    class and of `FSDPModule`. Its parameters become DTensors that hold this rank's rows; build the optimizer after this
    call, on ``model.parameters()``. After backward, their gradients are the means over all ranks.

    ``mesh``: one axis: shard over it. Two axes: replicate over the first, shard over the second. Default: one axis of
    all ranks, on the current accelerator or else the CPU. Parameters and buffers are moved to the mesh's device.
    ``reshard_after_forward``: True frees the full parameters after forward and gathers them again in backward; False
    keeps them until the end of backward. Default: True, and False for the outermost unit.
    ``mp_policy``: the dtypes of compute, reduction, gradients and main weights.
    ``ignored_params``: parameters that are left alone.
    ``layout``: how the parameters lie in the buffers; only ``"tensor"`` so far.
    ``schedule``: how far communication runs ahead; that of the root counts.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    if layout != "tensor":
        raise ValueError(f"layout={layout!r}: fully_shard supports only 'tensor' in this version")
    if shard_placement_fn is not None:
        raise ValueError("shard_placement_fn: this version shards every parameter on dim 0; leave it out")
    if type(offload_policy) is not OffloadPolicy:
        raise ValueError(f"offload_policy={offload_policy}: this version keeps everything on the device of the mesh")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: must be True, False or None in this version"
        )
    mesh = _default_mesh() if mesh is None else mesh
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} axes; it must have one (shard) or two (replicate, shard)")
    device = _device_of(mesh)
    ignored = set(ignored_params or ())
    build_unit(modules, mesh, device, mp_policy, layout, reshard_after_forward, ignored, schedule)
    for each in modules:
        each.__class__ = _unit_class(type(each))
    return module


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
