"""Every name of torch that is private or changes between versions. Checked on torch 2.11 and 2.13."""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
    TCPStore,
)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Spec: TypeAlias = DTensorSpec  # mesh, placements and global shape of a DTensor


@dataclass(frozen=True)
class Parallel:
    """A parameter that is a DTensor before it is sharded.

    ``cut`` and ``copied`` are the axes of its own mesh over which it is then sharded and replicated: data parallelism
    has axes of that mesh. Both are empty where it has a mesh of its own.
    ``hidden``: the parameter was a plain tensor, and is one in forward and backward.
    """

    spec: DTensorSpec
    cut: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    hidden: bool = False


def held_apart(local: torch.Tensor, mesh: DeviceMesh) -> Parallel:
    """Of a plain parameter of which each rank of ``mesh`` has another: all of them, one after another, are one."""
    shape = torch.Size((local.shape[0] * mesh.size(), *local.shape[1:]))
    meta = TensorMeta(shape, local.stride(), local.dtype)
    return Parallel(DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), hidden=True)


def largest_part(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the largest part of a tensor that any rank has, the same on all of them."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, (Shard, _StridedShard)):
                sizes[placement.dim] = -(-sizes[placement.dim] // parameter.device_mesh.size(axis))
    return tuple(sizes)


def _method(*names: str) -> Callable[..., Work]:
    """The first of these methods that ProcessGroup has, newest name first."""
    for name in names:
        if hasattr(ProcessGroup, name):
            method: Callable[..., Work] = getattr(ProcessGroup, name)
            return method
    missing = ", ProcessGroup.".join(names)
    raise ImportError(
        f"this torch ({torch.__version__}) has none of ProcessGroup.{missing}; install torch 2.11 or newer"
    )


# The coalesced forms take lists of tensors and launch once. The wrappers of torch.distributed around them cost several
# times the call in host time (argument checks, logging), so they are called on the process group itself.
all_gather_coalesced = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
reduce_scatter_coalesced = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
all_gather_one = _method("all_gather_single", "_allgather_base")
reduce_scatter_one = _method("reduce_scatter_single", "_reduce_scatter_base")
all_to_all_one = _method("all_to_all_single", "alltoall_base")


def _options(kind: type[Any], op: Any = None) -> Any:
    """Options of a collective that, on NCCL, runs on the current stream (asyncOp off) instead of one of NCCL's own."""
    options = kind()
    options.asyncOp = False
    if op is not None:
        options.reduceOp = op
    return options


ALL_GATHER = _options(AllgatherOptions)
ALL_TO_ALL = _options(AllToAllOptions)
REDUCE_SCATTER = {op: _options(ReduceScatterOptions, getattr(ReduceOp, op.upper())) for op in ("sum", "avg", "max")}
ALL_REDUCE = {op: _options(AllreduceOptions, getattr(ReduceOp, op.upper())) for op in ("sum", "avg", "max")}


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """A DTensor over ``local`` without communication, autograd or checks; ``shape`` and ``stride`` are global."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return _wrapped(local, spec)


def is_parallel(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor already, as tensor parallelism makes it."""
    return isinstance(parameter, DTensor)


def spec_of(parameter: torch.Tensor) -> DTensorSpec:
    """Mesh, placements and global shape of a DTensor."""
    assert isinstance(parameter, DTensor)
    return parameter._spec


def composed_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, sharded: Sequence[bool], dim: int, parallel: Parallel
) -> DTensor:
    """A DTensor over ``local``, the local part of a ``parallel`` one after a cut on ``dim`` over axes of ``mesh``.

    It lives on the axes of both meshes. Where tensor parallelism has cut that dim too, ours is the second cut of it.
    """
    inner = parallel.spec
    meta = inner.tensor_meta
    assert meta is not None
    if parallel.cut or parallel.copied:
        placed, placements = _within(mesh, sharded, dim, parallel)
    else:
        ours = _cut_after(inner, dim, 0)
        placements = [*(ours if cut else Replicate() for cut in sharded), *inner.placements]
        placed = DeviceMesh._concatenate([mesh, inner.mesh])
    meta = TensorMeta(meta.shape, meta.stride, local.dtype)
    return _wrapped(local, DTensorSpec(placed, tuple(placements), tensor_meta=meta))


def _within(
    mesh: DeviceMesh, sharded: Sequence[bool], dim: int, parallel: Parallel
) -> tuple[DeviceMesh, list[TorchPlacement]]:
    """Where a parameter lies that is sharded over axes of its own mesh. Several of them become one, ``mesh``'s last."""
    inner = parallel.spec
    placements = list(inner.placements)
    for axis in parallel.cut:
        placements[axis] = _cut_after(inner, dim, axis + 1) if sharded[-1] else Replicate()
    if len(parallel.cut) < 2:
        return inner.mesh, placements
    names = inner.mesh.mesh_dim_names
    assert names is not None
    parts: list[DeviceMesh] = []
    placed: list[TorchPlacement] = []
    for axis, name in enumerate(names):
        if axis == parallel.cut[0]:
            parts.append(mesh)
            placed += [Replicate()] * (mesh.ndim - 1) + [placements[axis]]
        elif axis not in parallel.cut and axis not in parallel.copied:
            parts.append(inner.mesh[name])
            placed.append(placements[axis])
    return DeviceMesh._concatenate(parts), placed


def _cut_after(inner: DTensorSpec, dim: int, first: int) -> TorchPlacement:
    """A cut of ``dim`` that comes after those of the axes from ``first``."""
    cuts = [inner.mesh.size(axis) for axis, p in enumerate(inner.placements) if axis >= first and _cuts(p, dim)]
    return _StridedShard(dim, split_factor=math.prod(cuts)) if math.prod(cuts) > 1 else Shard(dim)


def without_axis(tensor: DTensor, axis: str, mesh: DeviceMesh) -> DTensor:
    """What a DTensor is to one rank of an axis that cuts its dim 0 first; ``mesh`` has the other axes."""
    names, spec = tensor.device_mesh.mesh_dim_names or (), tensor._spec
    size = tensor.device_mesh.size(names.index(axis))
    placements: list[TorchPlacement] = []
    for name, placement in zip(names, spec.placements):
        if isinstance(placement, _StridedShard) and placement.dim == 0:
            factor = placement.split_factor // size
            placements.append(_StridedShard(0, split_factor=factor) if factor > 1 else Shard(0))
        elif name != axis:
            placements.append(placement)
    meta = torch.empty((tensor.shape[0] // size, *tensor.shape[1:]), device="meta")
    return make_dtensor(tensor._local_tensor, mesh, placements, meta.shape, meta.stride())


def _cuts(placement: TorchPlacement, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def is_strided(placement: object) -> bool:
    """Whether a sharded axis cuts after one that follows it in the mesh."""
    return isinstance(placement, _StridedShard)


def data_parallel_mesh(mesh: DeviceMesh, shard: Sequence[str], replicate: Sequence[str]) -> DeviceMesh:
    """The mesh (replicate, shard), or of one of them, made of these axes of ``mesh``; several of a kind become one."""
    parts = []
    for names in (tuple(replicate), tuple(shard)):
        if names:
            parts.append(mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names)))
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def flattened_names(mesh: DeviceMesh) -> list[str]:
    """The names of axes that were made of several axes of a mesh, or of one that it is a part of."""
    return list(mesh._get_root_mesh()._flatten_mapping)


def mesh_info(mesh: DeviceMesh, sharded: bool) -> DataParallelMeshInfo:
    """What FSDP2 says of a mesh (shard) or (replicate, shard); ``sharded``: off where all axes keep copies."""
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0) if sharded else DDPMeshInfo(mesh, replicate_mesh_dim=0)


def placement_result(given: Any) -> tuple[Any, DeviceMesh | None]:
    """What a ``shard_placement_fn`` returned: the placement, and the mesh if it names one (torch 2.13)."""
    info = getattr(given, "mesh_info", None)
    return (given, None) if info is None else (given.placement, info.mesh)


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of spec ``spec`` over another local tensor, whose dtype it takes."""
    return _wrapped(local, spec_with_dtype(spec, local.dtype))


def local_gradient(gradient: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The local part of a gradient, placed as its parameter is; tensor parallelism may have left it otherwise.

    Along data-parallel axes it stays each rank's own: those are what our reduce is for.
    """
    if parallel.hidden:
        return gradient
    if isinstance(gradient, AsyncCollectiveTensor):
        gradient = gradient.wait()
    assert isinstance(gradient, DTensor)
    placements = parallel.spec.placements
    if parallel.cut or parallel.copied:
        ours = {*parallel.cut, *parallel.copied}
        placements = tuple(gradient.placements[a] if a in ours else p for a, p in enumerate(placements))
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return gradient._local_tensor


def at_zero(local: torch.Tensor) -> torch.Tensor:
    """What to make a wrapper of ``local`` with: a twin at the start of the storage.

    A DTensor takes on the storage offset of the local tensor that it is made with, although it has no storage, and
    torch then takes it for a tensor that has one: deepcopy and data_ptr go wrong.
    """
    return local if local.storage_offset() == 0 else local.as_strided(local.shape, local.stride(), 0)


def rebased(local: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor at the start of a storage of its own, which keeps the whole one alive.

    What torch derives from a DTensor over it (detach, copies of state dicts) has no storage offset to mistake.
    """
    if local.storage_offset() == 0 or local.is_meta or not local.numel():
        return at_zero(local)
    start = local.storage_offset() * local.element_size()
    storage = local.untyped_storage()[start : start + local.nbytes]
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(storage, 0, local.shape, local.stride())


def _wrapped(local: torch.Tensor, spec: DTensorSpec, at: torch.Tensor | None = None) -> DTensor:
    # Without __init__, which does nothing but to keep compilers out, and takes longer than all the rest.
    made: DTensor = DTensor.__new__(DTensor, at_zero(local) if at is None else at, spec, requires_grad=False)
    made._local_tensor = local
    return made


def as_parameter(made: DTensor, requires_grad: bool) -> nn.Parameter:
    """A DTensor that nobody else has, as a parameter. ``nn.Parameter`` would dispatch a ``detach``: 1 ms for each."""
    parameter: Any = made
    parameter.requires_grad_(requires_grad)
    parameter._is_param = True
    assert isinstance(parameter, nn.Parameter)
    return parameter


# On torch 2.11 every operation on a DTensor, of whatever class, goes to DTensor's own dispatch: a subclass cannot say
# what its operations mean. On 2.13 it can.
SUBCLASSES_DISPATCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def bare_wrapper(cls: type[Any], local: torch.Tensor, spec: DTensorSpec) -> Any:
    """An instance of a subclass of DTensor, without what DTensor's own constructor derives from ``local``."""
    meta = spec.tensor_meta
    assert meta is not None
    made = torch.Tensor._make_wrapper_subclass(
        cls, meta.shape, strides=meta.stride, dtype=local.dtype, device=local.device, layout=local.layout
    )
    made._spec, made._local_tensor = spec, local
    return made


# A subclass of Tensor with this as its `__torch_function__` sees operations in `__torch_dispatch__` only.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def wrapper_like(cls: type[Any], tensor: torch.Tensor, device: torch.device) -> Any:
    """An instance of a subclass of Tensor that has no memory, laid out as ``tensor`` is."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=device,
    )


def writes(operation: Any) -> bool:
    """Whether an operation writes to what it is given."""
    infos = [each.alias_info for each in operation._schema.arguments]
    return any(info is not None and info.is_write for info in infos)


def like_dtensor(like: torch.Tensor, local: torch.Tensor, at: torch.Tensor | None = None) -> DTensor:
    """A DTensor over ``local`` with the mesh, placements and global shape of another one, and of its class.

    ``at``: what says at which storage offset it claims to be; else that is 0.
    """
    assert isinstance(like, DTensor)
    if type(like) is DTensor:
        return _wrapped(local, spec_with_dtype(like._spec, local.dtype), at)
    made: DTensor = like.with_local(local)  # type: ignore[attr-defined]
    return made


_SAME = ("dtype", "device", "shape", "requires_grad", "_spec")


def lie_over(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Let a DTensor be over the local tensor of another one; False where the two differ in more than that.

    The object, its hooks, its gradient and its attributes stay.
    """
    assert isinstance(tensor, DTensor)
    assert isinstance(other, DTensor)
    if type(tensor) is not type(other) or tensor.storage_offset() or tensor.is_inference():
        return False
    if any(getattr(tensor, name) != getattr(other, name) for name in _SAME):
        return False
    tensor._local_tensor = other._local_tensor
    return True


def allow_grad_of(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``tensor`` have a gradient of another dtype than its own. Drops one of a third dtype."""
    if not hasattr(tensor, "grad_dtype"):
        raise RuntimeError(
            f"this torch ({torch.__version__}) cannot have gradients of another dtype than their tensor; leave out "
            "grad_dtype, or install torch 2.11 or newer"
        )
    if tensor.grad_dtype != dtype:
        if tensor.grad is not None and tensor.grad.dtype != dtype:
            tensor.grad = None  # autograd refuses the change while a gradient is there
        tensor.grad_dtype = dtype


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a DTensor, for a local tensor of this dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def is_cut_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two DTensors of one shape hold the same rows on every rank."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    assert isinstance(one, DTensor)
    assert isinstance(other, DTensor)
    mine, theirs = (getattr(tensor, "_cut", None) for tensor in (one, other))
    return one._spec.mesh == other._spec.mesh and one._spec.placements == other._spec.placements and mine == theirs


def is_masked_fill(op: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is ``x[mask] = number`` with a mask of the shape of ``x``, which is elementwise."""
    if op._schema.name != "aten::index_put_" or any(args[3:]) or len(args[1]) != 1:
        return False
    mask = args[1][0]
    return bool(mask is not None and mask.dtype == torch.bool and mask.shape == args[0].shape and args[2].numel() == 1)


def _on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise operation in place on the shards, where the tensors of each place in its lists are cut alike."""
    if op._schema.name != "aten::index_put_":
        columns = list(zip(*[arg for arg in args if isinstance(arg, (list, tuple)) and arg]))
    elif is_masked_fill(op, args):
        columns = [(args[0], args[1][0])]
    elif args[0].numel() == 1 and all(p.is_replicate() for p in args[0].placements):
        columns = [(args[0],)]  # without dims: torch has read the mask already and made an index of it
    else:
        columns = [(None,)]
    if not all(are_cut_alike(column) for column in columns):
        return _without_ours(op, args, kwargs)
    local_args, local_kwargs = pytree.tree_map_only(DTensor, local_of, (args, kwargs))
    op(*local_args, **local_kwargs)
    return args[0] if op._schema.returns else None


def _without_ours(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor itself has for an operation, if only an error."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(op, None)  # another thread may be in here
    try:
        return op(*args, **kwargs)
    finally:
        if ours is not None:
            handlers[op] = ours


Refusal: TypeAlias = Callable[[Any, str, Sequence[torch.Tensor]], None]
# What layers compute with their weights; under inference mode, before it is decomposed.
_LAYERS = (
    *("mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "linear", "matmul", "mul.Tensor", "add.Tensor", "cat"),
    *("convolution", "conv1d", "conv2d", "conv3d", "embedding", "embedding_bag", "_embedding_bag"),
    *("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_group_norm"),
    *("batch_norm", "native_batch_norm", "_native_batch_norm_legit"),
)
_mixed: dict[Any, Any] = {}  # operations of layers for which somebody is asked first; what DTensor had for each


def on_mixed(refuse: Refusal) -> None:
    """Let ``refuse`` raise, if it wants to, where a layer is given what DTensor cannot take together.

    A plain tensor and a DTensor, or DTensors of different meshes.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for name in () if _mixed else _LAYERS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:
            _mixed[op] = handlers.get(op)
            handlers[op] = functools.partial(_unmixed, refuse, _mixed[op])


def leave_mixed() -> None:
    """Ask nobody: a model computes with DTensors now, and asking would cost every operation."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for op, known in _mixed.items():
        handlers.pop(op, None)
        if known is not None:
            handlers[op] = known
    _mixed.clear()


def _unmixed(refuse: Refusal, known: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    for given in (*args, *kwargs.values()):
        listed = given if isinstance(given, (list, tuple)) else (given,)
        tensors += [each for each in listed if isinstance(each, torch.Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    plain = any(not isinstance(tensor, DTensor) and tensor.numel() > 1 for tensor in tensors)
    if plain and not DTensor._op_dispatcher._allow_implicit_replication:
        refuse(op, "torch.Tensor and DTensor", sharded)
    if len({tensor.device_mesh for tensor in sharded if tensor.numel() > 1}) > 1:
        refuse(op, "meshes", sharded)
    return _without_ours(op, args, kwargs) if known is None else known(op, args, kwargs)


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``sharded.copy_(whole)``: every rank takes its own rows of a plain tensor of the same shape."""
    target, source = args[:2]
    plain = isinstance(target, DTensor) and not isinstance(source, DTensor) and target.shape == source.shape
    if not plain or target.numel() <= 1 or any(placement.is_partial() for placement in target.placements):
        return _without_ours(op, args, kwargs)
    op(local_of(target), part_of(source, target), *args[2:], **kwargs)
    return target


def are_cut_alike(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether the same rows of all tensors are here, none waiting for a sum. A number on every rank suits them all."""
    cut: list[Any] = [tensor for tensor in tensors if tensor is None or not _is_number_everywhere(tensor)]
    if not all(isinstance(tensor, DTensor) and is_cut_alike(cut[0], tensor) for tensor in cut):
        return False
    return not any(placement.is_partial() for tensor in cut[:1] for placement in tensor._spec.placements)


def _is_number_everywhere(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= 1 and not (
        isinstance(tensor, DTensor) and any(not p.is_replicate() for p in tensor.placements)
    )


def add_elementwise_rules() -> None:
    """Teach DTensor what torch.optim asks of it and it has no rule for: the rest of Rprop, fused SGD and Adagrad.

    And to take its rows of a whole tensor that is copied into it.
    """
    aten = torch.ops.aten
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for packet in (aten._foreach_copy_, aten._fused_sgd_, aten._fused_adagrad_, aten.index_put_):
        for overload in packet.overloads():
            if overload != "out":
                handlers.setdefault(getattr(packet, overload), _on_shards)
    handlers.setdefault(aten.copy_.default, _copy)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that holds its values in other tensors, or says itself how it is gathered."""
    return is_made_of_others(tensor) or hasattr(tensor, "fsdp_pre_all_gather")


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds its values in other tensors, and tells which (`__tensor_flatten__`)."""
    asked: Any = tensor  # mypy takes the question for an answer
    return is_traceable_wrapper_subclass(asked)


def keeping_versions(tensors: Sequence[torch.Tensor]) -> Any:
    """A context in which writing to the tensors does not count as a change that autograd must not overlook."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without autograd or dispatch."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the local one of a DTensor, all of any other."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


PlainAttributes = torch._C.DisableTorchFunctionSubclass  # within, those of DTensors cost no more than a tensor's


# What stands for the storage of a tensor, as long as that exists. A DTensor has one of no memory. After
# ``tensor.data = other`` it is another one, and nothing else need be: the local tensor stays, and so do the values.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


def have_other_locals(pairs: Sequence[tuple[Any, torch.Tensor]]) -> bool:
    """Whether one of some DTensors has another local tensor than the one beside it."""
    for tensor, local in pairs:
        if tensor._local_tensor is not local:
            return True
    return False


def storage_of(tensor: torch.Tensor) -> object:
    """The storage of a tensor, of whatever class that is."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def begin_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the storages of two plain tensors begin at the same place."""
    place = one.untyped_storage().data_ptr()
    return place != 0 and place == other.untyped_storage().data_ptr()


_GRAD: Any = torch.Tensor.grad


def grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its ``.grad`` as it is, whoever wants to know of reads."""
    with PlainAttributes():
        found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def on_grad_read(action: Callable[[], None] | None) -> None:
    """Call ``action`` before somebody reads the ``.grad`` of a DTensor; not within `PlainAttributes`. None: no longer.

    Only while there is something to do: a property in Python, in the place of the one of C++, costs every read.
    """
    if action is None:
        if "grad" in DTensor.__dict__:
            del DTensor.grad
        return

    def read(parameter: torch.Tensor) -> torch.Tensor | None:
        if torch._C._is_torch_function_enabled():
            action()
        return grad_of(parameter)

    DTensor.grad = property(read, _GRAD.__set__, _GRAD.__delete__)  # type: ignore[assignment]


def grads_and_hooks(parameters: Sequence[torch.Tensor]) -> tuple[list[bool], list[int], list[int]]:
    """Whether each has a gradient; which have tensor hooks; which have post-accumulate hooks."""
    had_grad, changed, finished = [False] * len(parameters), [], []
    with PlainAttributes():
        for index, parameter in enumerate(parameters):
            had_grad[index] = parameter.grad is not None
            if parameter._backward_hooks:
                changed.append(index)
            if parameter._post_accumulate_grad_hooks:
                finished.append(index)
    return had_grad, changed, finished


_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count")  # noqa: B009  # it has no type


def holders(tensors: Sequence[DTensor]) -> list[int]:
    """Numbers that grow when somebody takes hold of one of these DTensors, of its local part, or of its memory.

    They also change when a tensor becomes a gradient for the first time.
    """
    if not tensors:
        return []
    memory: int = torch._C._storage_Use_Count(tensors[0]._local_tensor.untyped_storage()._cdata)
    return [
        memory,
        *map(_use_count, tensors),
        *map(sys.getrefcount, tensors),
        *map(sys.getrefcount, [tensor._local_tensor for tensor in tensors]),
    ]


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """``register_hook``, before all that there are."""
    before = dict(tensor._backward_hooks or {})
    tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    if before and hooks is not None:
        for number in before:  # torch calls them in the order in which they were put in
            hooks[number] = hooks.pop(number)


def tensor_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """What was given to ``register_hook``, in that order."""
    return list((parameter._backward_hooks or {}).values())


def post_accumulate_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What was given to ``register_post_accumulate_grad_hook``, in that order."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def take_scheduler_patch(optimizer: Optimizer) -> bool:
    """Remove what a learning-rate scheduler has put around ``step`` of this instance; whether there was anything."""
    if not hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        return False
    del optimizer.__dict__["step"]
    return True


def put_scheduler_patch(optimizer: Optimizer) -> None:
    """Let a scheduler that was made before the class of the optimizer was changed see that it steps."""
    known = weakref.ref(optimizer)
    step = type(optimizer).step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        found: Any = known()
        found._opt_called = True
        return step(found, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = tracked


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """What serves tensors of this device in a process group. Calls of it pass by what counts collectives."""
    if device.type not in {served.type for served in group._device_types}:
        return group  # a group written in Python is its own backend
    return group._get_backend(device)


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves tensors of this device in a process group."""
    name: str = backend_of(group, device).name()
    return name


def will_be_executed(node: Any) -> bool:
    """Within a backward: whether it goes, or went, through a node of the graph."""
    return bool(torch._C._will_engine_execute_node(node))


# Making process groups


def new_group(
    ranks: Sequence[int],
    like: ProcessGroup,
    name: str,
    title: str,
    patience: timedelta | None = None,
    backend: str | None = None,
) -> ProcessGroup:
    """A process group of ``ranks``, with the backend and the time-out of ``like`` unless others are given.

    Collective among the ranks alone.

    ``name`` must be the same on all of them, and no other group's. ``title`` is for people.
    """
    listed = list(ranks)
    # torch 2.11 has sorted groups only, and not this argument.
    order: dict[str, Any] = {} if listed == sorted(listed) else {"sort_ranks": False}
    with _named(listed, name), _unsplit():
        made = torch.distributed.new_group(
            listed,
            timeout=timeout_of(like) if patience is None else patience,
            backend=backends_of(like) if backend is None else backend,
            use_local_synchronization=True,
            group_desc=title,
            **order,
        )
    assert isinstance(made, ProcessGroup)
    return made


def backends_of(group: ProcessGroup) -> str | None:
    """The backends that a process group was made with. None: torch did not make it."""
    known = c10d._world.pg_map.get(group)
    return None if known is None else str(known[0])


PrefixStore = c10d.PrefixStore  # public, but not to type checkers


def default_store() -> Any:
    """The store at which the ranks of the default process group met."""
    return c10d._get_default_store()


def own_store(store: Any, prefix: str) -> Any:
    """A store with a connection of its own: who waits for a key holds up all others of the same connection.

    RuntimeError if there is none any more.
    """
    if store is None:
        raise RuntimeError("the process group is gone, and its store")
    return PrefixStore(prefix, store.clone())


def kept_store(store: Any) -> Any:
    """What keeps the server of a store alive that this process may have; None if torchrun has it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def allow_events_amid_captures() -> None:
    """Let the calling thread ask for CUDA events, while another one captures a graph in the mode that forbids it."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    with suppress(OSError):  # not a GPU of NVIDIA's
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """The time-out that a process group was given: the longest of its backends'. None: their default, or unknown."""
    # A group written in Python is its own backend. Some have options, and a C++ one without raises when asked for them.
    backends: list[Any] = [group._get_backend(device) for device in group._device_types] or [group]
    given = []
    for backend in backends:
        try:
            found = backend.options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta) and found != c10d._get_default_timeout(c10d.Backend(backend.name())):
            given.append(found)
    return max(given, default=None)


def limit_of(group: ProcessGroup) -> timedelta:
    """How long collectives of a process group may take: its own time-out, or the default of its backend."""
    found = timeout_of(group)
    if found is None:
        names = [group._get_backend(device).name() for device in group._device_types]
        found = c10d._get_default_timeout(c10d.Backend(names[-1] if names else "gloo"))
    return found


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception tells that another rank is gone or does not answer.

    NCCL and the store have classes for it. Gloo raises RuntimeError, which begins with the place in its own source.
    """
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error).split("]")[0]
    )


@contextmanager
def _named(ranks: list[int], name: str) -> Iterator[None]:
    """Within, a process group of these ranks gets this name.

    Ranks find each other by the name of the group. Those that torch makes up for a group that only its members know of
    contain the number of groups which the rank is in, so that members wait for ever where one is in more than another.
    """
    theirs, thread = c10d._process_group_name, threading.get_ident()

    def ours(given: Sequence[int], use_hashed_name: bool) -> Any:
        mine = use_hashed_name and threading.get_ident() == thread and list(given) == ranks
        return name if mine else theirs(given, use_hashed_name)

    c10d._process_group_name = ours  # type: ignore[assignment]
    try:
        yield
    finally:
        c10d._process_group_name = theirs


@contextmanager
def _unsplit() -> Iterator[None]:
    """Within, communicators of new process groups are not split off the default one's.

    With ``init_process_group(device_id=...)`` torch makes them by ncclCommSplit, which waits for all ranks of the
    default group, members or not. A group that is made when the first gradients of a pipeline stage arrive would wait
    for stages that wait for this one. Without a device, NCCL makes a communicator of the members alone, at first use.
    """
    default = torch.distributed.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


graph_task: Callable[[], int] = torch._C._current_graph_task_id  # what autograd runs on this thread, by number


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward called now is a recompute."""
    return graph_task() != -1


def leaves_weights_to_another(parameter: torch.Tensor) -> bool:
    """Within a backward: whether it is a pipeline's for inputs alone, of which a later one computes the weights'."""
    split = "torch.distributed.pipelining" in sys.modules
    return split and not will_be_executed(torch.autograd.graph.get_gradient_edge(parameter).node)


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward that is running on this thread has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def is_wanted(ctx: Any, index: int) -> bool:
    """Inside a function's backward: whether the running backward takes a gradient to its tensor input ``index``."""
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> None:
    """Write the matrix product of two matrices of one dtype into ``out``, or add it; computed in the dtype of ``out``.

    On CUDA the product of half-precision matrices can be written in float32; elsewhere they are cast first.
    """
    if left.dtype != out.dtype and left.is_cuda and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    left, right = left.to(out.dtype), right.to(out.dtype)
    out.addmm_(left, right) if accumulate else torch.mm(left, right, out=out)


@contextmanager
def lasting() -> Iterator[None]:
    """Where tensors are made that outlive the running pass: made under inference mode, training could never use them.

    Gradients are off: nothing of it belongs to a graph.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Let torch.compile leave a function alone, with all that it calls: one graph ends before it, another begins after.

    torch.compiler.disable does the same with a wrapper, which costs microseconds a call and imports the compiler.
    """
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, "hooks of flatshard are not compiled"
    set_code_exec_strategy(marks.__code__, _SKIP)
    return function


def assert_on_device(condition: torch.Tensor) -> None:
    """Let the device fail where a condition does not hold, without waiting for it, also in a graph."""
    torch._assert_async(condition)


def transforming() -> bool:
    """Whether a transform of torch.func (jvp, vmap ...) or forward-mode differentiation is going on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


Untransformed = torch._C._DisableFuncTorch  # within, operations are outside of the transforms of torch.func


def profiling() -> bool:
    """Whether the torch profiler is recording."""
    return torch.autograd.profiler._is_profiler_enabled


tree_flatten, tree_unflatten = pytree.tree_flatten, pytree.tree_unflatten


def pytree_leaves(value: Any) -> list[Any]:
    """The leaves of a value of a registered pytree type; a value of any other type is a leaf itself."""
    return pytree.tree_leaves(value)


def map_leaves(kind: type[Any], change: Callable[[Any], Any], value: Any) -> Any:
    """A tree with every leaf of type ``kind`` changed."""
    return pytree.tree_map_only(kind, change, value)


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """A box of a tensor, as torch.distributed.checkpoint describes it."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def local_rows(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of a whole tensor, as a DTensor of spec ``spec`` would hold it. Nothing is communicated."""
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, spec.mesh, spec.placements)
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))].contiguous()


def boxes_of(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a DTensor that this rank holds, as (offsets, sizes): one, or none."""
    assert isinstance(tensor, DTensor)
    chunks: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()
    return [(tuple(found.offsets), tuple(found.sizes)) for found in chunks]


@functools.lru_cache(maxsize=1 << 16)  # a rank asks for all others, parameter after parameter
def box_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], placements: tuple[TorchPlacement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of what the rank at ``place`` of a mesh of this shape holds of a DTensor."""
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
    return tuple(offsets), tuple(sizes)


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, cut as the DTensor ``like`` is: a view of it. Nothing is communicated."""
    for offsets, sizes in boxes_of(like):
        return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))]
    return whole.new_empty(local_of(like).shape)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, in memory of its own. A collective call."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().clone()


def write_item(fqn: str, box: ChunkStorageMetadata, shape: torch.Size, local: torch.Tensor) -> WriteItem:
    """What torch.distributed.checkpoint writes of one box of a tensor."""
    properties = TensorProperties.create_from_tensor(local)
    data = TensorWriteData(chunk=box, properties=properties, size=shape)
    return WriteItem(index=MetadataIndex(fqn, box.offsets), type=WriteItemType.SHARD, tensor_data=data)


def pytree_map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A value of a registered pytree type with its tensors changed; the value itself where none changes."""
    leaves, spec = pytree.tree_flatten(value)
    mapped = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves)):
        return value
    return pytree.tree_unflatten(mapped, spec)


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(index: int) -> torch.cuda.Stream:
    """The current stream of a CUDA device. torch's own accessor takes ten times as long."""
    found: tuple[int, int, int] = torch._C._cuda_getCurrentStream(index)
    stream = _streams.get(found)
    if stream is None:
        number, device, kind = found
        stream = _streams[found] = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
    return stream


def set_stream(stream: torch.cuda.Stream) -> None:
    """Make a stream of the current device the current one."""
    torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)


class AllocatingFrom:
    """Within, this thread's CUDA allocations come from a memory pool. Can be entered again and again."""

    def __init__(self, pool: torch.cuda.MemPool, index: int, owner: object) -> None:
        self._where = index, pool.id
        self._owner = owner  # keeps the pool

    def __enter__(self) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._where)

    def __exit__(self, *error: object) -> None:
        torch._C._cuda_endAllocateToPool(*self._where)
        torch._C._cuda_releasePool(*self._where)


class _Registered:
    """A memory pool whose memory NCCL registers with the communicators of some process groups, as it comes.

    It goes with this object, unless a group has been destroyed by then: torch ends the process when registered memory
    is freed after its communicator. Then it stays to the end.
    """

    def __init__(self, groups: Sequence[ProcessGroup], device: torch.device) -> None:
        self._backends = [backend_of(group, device) for group in groups]
        self._groups = groups
        first = self._backends[0]
        # What NCCL has allocated it can do most with; but ordinary memory can be registered, too.
        self.pool = torch.cuda.MemPool(first.mem_allocator if first.supports_tensor_alloc(device) else None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pool))
        for backend in self._backends:
            backend.register_mem_pool(self.pool)

    def __del__(self) -> None:
        if sys.is_finalizing() or any(group not in c10d._world.pg_map for group in self._groups):
            return
        for backend in self._backends:
            backend.deregister_mem_pool(self.pool)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.pool))


def memory(device: torch.device, groups: Sequence[ProcessGroup] = ()) -> AllocatingFrom:
    """CUDA memory apart from all other; with ``groups``, registered with their communicators, which must exist."""
    owner = _Registered(groups, device) if groups else torch.cuda.MemPool()
    return AllocatingFrom(owner.pool if isinstance(owner, _Registered) else owner, device.index, owner)


# What torch.cuda.Event is a Python shell of; the shell costs as much again as the event. Not in builds without CUDA.
Event: Any = getattr(torch._C, "_CudaEventBase", None)


# Captures


class _Epochs:
    """Counts the times when everything that had been launched was over. Events of earlier ones need no waiting.

    A capture begins and ends such a time: within it, and after it, events of another epoch must not be waited for.
    """

    now = 0

    def begin(self) -> None:
        """Everything launched so far has ended, or is in a graph whose replays are in order by themselves."""
        self.now += 1


epochs = _Epochs()


class RandomState:
    """Of the current GPU, as it is now. A capture that fails leaves torch's generator as if it went on."""

    def __init__(self) -> None:
        self._generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        self._state = self._generator.clone_state()

    def restore(self) -> None:
        self._generator.graphsafe_set_state(self._state)


def clear_workspaces() -> None:
    """Free what matrix products have as scratch: a small block keeps all of the cached segment that it lies in."""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(index: int, pool: Any) -> None:
    """After a capture that failed: let the allocator know that nothing is captured into this pool any more.

    torch leaves that out where the end of a capture raises, and ends the process when it frees memory later.
    """
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)


# Composable APIs of torch know by this registry what has been applied to a module.


def mark_sharded(module: nn.Module) -> None:
    """Let torch's `replicate` see that `fully_shard` was called on a module: it leaves the parameters alone."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def mark_managed(module: nn.Module) -> None:
    """Say, as torch's `fully_shard` does, that a unit holds the parameters of a module.

    By this, transformers knows that ranks must generate equally many tokens; compilers treat the parameters with care.
    """
    managed: Any = module
    managed._is_fsdp_managed_module = managed._fsdp_use_orig_params = True


def let_torch_find(state: Any, module: nn.Module) -> None:
    """Make ``state`` what torch's own `fully_shard.state(module)`, and those who look for units, find."""
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, {})
    states[inspect.unwrap(fully_shard)] = state
    _module_state_mapping.setdefault(module, weakref.ref(state))


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's `replicate` was called on a module."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


# Where torch exports the names of its FSDP2, and by which modules it implements it.

FSDP_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
FSDP_INTERNALS = ("torch.distributed.fsdp.", "torch.distributed._composable.")
FSDP_BODY = "torch.distributed.fsdp._fully_shard._fully_shard"  # its own functions look up its classes there
FSDP_NAMES: dict[str, Any] = {
    name: getattr(torch.distributed.fsdp._fully_shard, name) for name in torch.distributed.fsdp._fully_shard.__all__
}


# Implementations of FSDP's communication protocols that torch ships.


def allocating_comms(group: ProcessGroup) -> tuple[Any, Any]:
    """An ``AllGather`` and a ``ReduceScatter`` with buffers from the process group's allocator, where it has one."""
    return _comm("ProcessGroupAllocAllGather")(group), _comm("ProcessGroupAllocReduceScatter")(group)


def symmetric_memory(numbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that other ranks of the node can be shown. It goes back to the device with its tensor.

    Waits for the device, which not every version of torch does by itself: the words by which ranks signal each other
    are cleared on the default stream, and `rendezvous` writes their addresses there. A rank that signals too soon is
    not heard, and a lane, which is not ordered after that stream, reads addresses that are none.
    """
    import torch.distributed._symmetric_memory as symmetric

    made = symmetric.empty(numbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return made


def rendezvous(tensor: torch.Tensor, group: ProcessGroup) -> Any:
    """Let the ranks of a group know of each other's symmetric memory: ``get_buffer`` of what it gives shows it."""
    import torch.distributed._symmetric_memory as symmetric

    seen = symmetric.rendezvous(tensor, group=group.group_name)
    torch.cuda.synchronize(tensor.device)  # see `symmetric_memory`
    return seen


def is_symmetric(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that other ranks can be shown, as far as this torch can say (2.12)."""
    import torch.distributed._symmetric_memory as symmetric

    asked = getattr(symmetric, "is_symm_mem_tensor", None)
    return tensor.is_cuda and asked is not None and bool(asked(tensor))


def symmetric_comms(group: ProcessGroup) -> tuple[Any, Any]:
    """An ``AllGather`` and a ``ReduceScatter`` with buffers in symmetric memory. A collective call."""
    return _comm("SymmMemAllGather")(group), _comm("SymmMemReduceScatter")(group)


def is_shipped_comm(comm: Any) -> bool:
    """Whether torch ships the implementation of this object."""
    return type(comm).__module__ == _fsdp_collectives.__name__


def _comm(name: str) -> Any:
    found = getattr(_fsdp_collectives, name, None)
    if found is None:
        raise RuntimeError(f"this torch ({torch.__version__}) has no {name}; set_symm_mem_for_comm needs it")
    return found
