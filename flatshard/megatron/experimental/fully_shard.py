"""`fully_shard`, `fully_shard_context` and `microbatch` of Megatron-FSDP's second version."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import api
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.parameters import owned_modules
from flatshard.megatron.experimental.module import FsdpContext, FsdpModule
from flatshard.megatron.experimental.placement import Placements
from flatshard.megatron.mixed_precision import engine_policy
from flatshard.megatron.utils import initial_values, register_memory
from flatshard.policy import SchedulePolicy

_open: ContextVar[FsdpContext | None] = ContextVar("fully_shard_context", default=None)


@functools.cache
def _class_of(cls: Any) -> type:
    return type(cls.__name__, (FsdpModule, cls), {})


@contextmanager
def fully_shard_context(
    device: torch.device | None = None, *, use_symmetric_memory: bool = False, unify_communication_stream: bool = False
) -> Iterator[FsdpContext]:
    """Units that `fully_shard` makes in the body share lanes and micro-batches. They can run after the body.

    ``device`` must be of the type of the meshes. With ``unify_communication_stream``, reduces use the process groups of
    the gathers, so that all collectives have one order.
    """
    if _open.get() is not None:
        raise RuntimeError("fully_shard_context does not support nesting: exit the outer one first")
    context = FsdpContext(use_symmetric_memory, unify_communication_stream, device and torch.device(device))
    token = _open.set(context)
    try:
        yield context
    finally:
        _open.reset(token)
        context.close()


def fully_shard(
    module: nn.Module, mesh: DeviceMesh, placements: Placements, mixed_precision_policy: Any = None,
    use_symm_mem: bool = False, grad_divisor: float = 1, *, fine_grained: bool = False, layout: Any = "tensor",
) -> None:  # fmt: skip
    """Make a unit of ``module``, in place, inside or outside a `fully_shard_context`.

    Gradients are the mean over the data-parallel ranks (the sum, if ``placements.gradient`` has a ``Partial`` sum),
    divided by ``grad_divisor``. Parameters on the meta device are allocated, without values. ``fine_grained`` makes a
    unit of every module below that has parameters, too.
    """
    context = _open.get()
    below = [each for each in module.modules() if isinstance(each, FsdpModule) and each is not module]
    if any(each.context is not context for each in below) and context is not None:
        raise ValueError("a unit below this module was made in another fully_shard_context; make all of them in one")
    if grad_divisor <= 0:
        raise ValueError(f"grad_divisor={grad_divisor}: must be positive")
    mesh = placements.mesh_of(mesh)
    alone, context = context is None, FsdpContext() if context is None else context
    if context.device is not None and context.device.type != mesh.device_type:
        raise ValueError(f"fully_shard_context(device={context.device}): the mesh is on {mesh.device_type}")
    symmetric = use_symm_mem or context.use_symmetric_memory
    if symmetric:
        register_memory(None, mesh)
    units = [each for _, each in owned_modules([module]) if each is module or (fine_grained and each._parameters)]
    scale = (1.0 if placements.sums else 1.0 / mesh.size()) / grad_divisor
    choices: dict[str, Any] = {
        "mesh": mesh, "reshard_after_forward": True, "strategy": placements.engine(), "layout": layout,
        "mp_policy": engine_policy(mixed_precision_policy), "values": initial_values(),
        "gradient_scale": "mean" if grad_divisor == 1 and not placements.sums else scale,
        "schedule": SchedulePolicy(separate_groups=not context.unify_communication_stream),
    }  # fmt: skip
    place = torch.device(mesh.device_type)
    for each in reversed(units):
        api.fully_shard(each, **choices)
        kind: Any = type(each)
        each.__class__ = _class_of(kind)
        context.add(each, is_open=not alone)
        if any(parameter.is_meta for parameter in each.parameters()):
            each._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)
        if symmetric:
            register_memory(each, mesh)  # type: ignore[arg-type]
    for each in below if alone else ():  # outside a context, the outermost unit shares its own with all units below
        context.add(each, is_open=False)


@contextmanager
def microbatch(
    module: nn.Module | FsdpContext | None = None, is_last: bool = True, *, is_first: bool = True,
    context: FsdpContext | None = None,
) -> Iterator[None]:  # fmt: skip
    """`flatshard.microbatch` for the units of ``context``, or of the contexts that units below ``module`` belong to."""
    target = module if context is None else context
    if (module is None) == (context is None) or not isinstance(target, (nn.Module, FsdpContext)):
        raise TypeError("microbatch takes a module or a context: give exactly one of them")
    if isinstance(target, FsdpContext):
        roots = target.roots
    else:
        contexts = dict.fromkeys(each.context for each in target.modules() if isinstance(each, FsdpModule))
        roots = [root for each in contexts for root in each.roots] or ([target] if units_below(target) else [])
    with ExitStack() as stack:
        for root in roots:
            stack.enter_context(api.microbatch(root, is_first=is_first, is_last=is_last))
        yield
