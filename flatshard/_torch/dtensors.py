"""DTensors and meshes: uses spec, local tensor and constructor of a DTensor, and methods that join meshes.

A DTensor copies the storage offset of the local tensor that it is created with, although it has no storage. torch then
treats it as a tensor with storage: deepcopy and data_ptr fail. So it is created with a view at offset 0.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard._torch.autograd import uncompiled
from flatshard._torch.tensors import pytree_leaves

Spec: TypeAlias = DTensorSpec  # mesh, placements and global shape of a DTensor
StridedShard = _StridedShard  # sharded after the axes that follow it in the mesh

# Before torch 2.13, every operation on a DTensor of any class used DTensor's own dispatch, unless a mode handled it.
_SUBCLASSES_DISPATCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


class DispatchingDTensor(DTensor):
    """A DTensor whose subclasses can define ``__torch_dispatch__``."""

    if not _SUBCLASSES_DISPATCH:

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            with _Dispatching(cls), torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if torch.is_grad_enabled() and any(map(_is_derived, pytree_leaves(result))):
                    leaves = pytree_leaves((args, kwargs, result))
                    _refuse_backward([leaf for leaf in leaves if isinstance(leaf, cls) and leaf.requires_grad])
            return result


def require_backward(cls: type[DTensor]) -> None:
    """Raise if a backward would make DTensors of the gradients of this class: it starts its operations in C++."""
    if not _SUBCLASSES_DISPATCH:
        raise NotImplementedError(
            f"a backward through a {cls.__name__} needs torch 2.13 or newer; this is {torch.__version__}"
        )


def _is_derived(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _refuse_backward(tensors: Sequence[DTensor]) -> None:
    """Make a backward raise that reaches one of these."""
    for tensor in tensors:
        made_by: Any = tensor.grad_fn
        if made_by is None:
            made_by = torch.ops.aten.alias(tensor).grad_fn.next_functions[0][0]  # what accumulates its gradient
        made_by.register_prehook(functools.partial(_refuse, type(tensor)))


def _refuse(cls: type[DTensor], gradients: Any) -> None:
    require_backward(cls)


class _Dispatching(TorchDispatchMode):
    """Hands operations on tensors of a subclass to the subclass."""

    def __init__(self, cls: type[DTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cls = cls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, self._cls) for leaf in pytree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with torch._C._EnableTorchFunction():
            return self._cls.__torch_dispatch__(func, types, args, kwargs)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Spec:
    """A spec; ``shape`` and ``stride`` are global."""
    return Spec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """A DTensor over ``local`` without communication, autograd or checks.

    ``shape`` and ``stride`` are global; without ``stride`` the whole tensor is contiguous.
    """
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return _wrapped(local, make_spec(mesh, placements, shape, stride, local.dtype))


def dtensor_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """A DTensor of spec ``spec`` over another local tensor, with the dtype of that tensor."""
    return _wrapped(local, spec_with_dtype(spec, local.dtype))


def like_dtensor(like: torch.Tensor, local: torch.Tensor) -> DTensor:
    """A DTensor over ``local`` with the mesh, placements and global shape of another one, and of its class."""
    assert isinstance(like, DTensor)
    if type(like) is DTensor:
        return _wrapped(local, spec_with_dtype(like._spec, local.dtype))
    made: DTensor = like.with_local(local)  # type: ignore[attr-defined]
    return made


_bare: Callable[[torch.Tensor, Spec], DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)


def dtensors_over(
    flat: torch.Tensor, specs: Sequence[Spec], shapes: Sequence[Any], strides: Sequence[Any], offsets: Sequence[int]
) -> list[DTensor]:
    """DTensors of these specs, over parts of a tensor. The loops run in C, because this is called in every step."""
    # They have the offset of their local part: compilers copy them, and reject another offset.
    locals_ = list(map(flat.as_strided, shapes, strides, offsets))
    found = list(map(_bare, locals_, specs))
    for made, local in zip(found, locals_):
        made._local_tensor = local
    return found


def _wrapped(local: torch.Tensor, spec: Spec) -> DTensor:
    # Without __init__, which only disables compilers and takes longer than all the rest.
    made: DTensor = DTensor.__new__(DTensor, _at_zero(local), spec, requires_grad=False)
    made._local_tensor = local
    return made


def bare_wrapper(cls: type[Any], local: torch.Tensor, spec: Spec) -> Any:
    """An instance of a subclass of DTensor, without what DTensor's own constructor derives from ``local``."""
    meta = spec.tensor_meta
    assert meta is not None
    made = torch.Tensor._make_wrapper_subclass(
        cls, meta.shape, strides=meta.stride, dtype=local.dtype, device=local.device, layout=local.layout
    )
    made._spec, made._local_tensor = spec, local
    return made


def as_parameter(made: DTensor, requires_grad: bool) -> nn.Parameter:
    """Make a new DTensor a parameter. ``nn.Parameter`` would dispatch a ``detach``, which takes 1 ms."""
    parameter: Any = made
    parameter.requires_grad_(requires_grad)
    parameter._is_param = True
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _at_zero(local: torch.Tensor) -> torch.Tensor:
    return local if local.storage_offset() == 0 else local.as_strided(local.shape, local.stride(), 0)


def rebased(local: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor at the start of a separate storage, which keeps the original one alive.

    Tensors that torch derives from a DTensor over it (detach, copies of state dicts) have no storage offset.
    """
    if local.storage_offset() == 0 or local.is_meta or not local.numel():
        return _at_zero(local)
    start = local.storage_offset() * local.element_size()
    storage = local.untyped_storage()[start : start + local.nbytes]
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(storage, 0, local.shape, local.stride())


_SAME = ("dtype", "device", "shape", "requires_grad", "_spec")


def replace_local(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Give a DTensor the local tensor of another one. Returns False if the two differ in anything else.

    The object, its hooks, its gradient and its attributes stay the same.
    """
    assert isinstance(tensor, DTensor)
    assert isinstance(other, DTensor)
    if type(tensor) is not type(other) or tensor.storage_offset() or tensor.is_inference():
        return False
    if any(getattr(tensor, name) != getattr(other, name) for name in _SAME):
        return False
    tensor._local_tensor = other._local_tensor
    return True


_DATA: Any = torch.Tensor.data


def share_data(is_ours: Callable[[torch.Tensor], bool], assigned: Callable[[Any, Any], None]) -> None:
    """Let ``.data`` of these DTensors share their version counters, and assignments to it call ``assigned``.

    In torch, what `.data` returns has a separate version counter, so that writes to it go unnoticed, and an assignment
    to it changes nothing but the metadata of a DTensor.
    """

    @uncompiled  # the code that torch.compile would make of it calls the property again
    def read(parameter: DTensor) -> torch.Tensor:
        if not is_ours(parameter):
            found: torch.Tensor = _DATA.__get__(parameter)
            return found
        with torch.inference_mode(False):  # it raises on a DTensor otherwise
            data = parameter.detach()
        if isinstance(data, DTensor):  # not in a transform of torch.func
            data._local_tensor = parameter._local_tensor  # for the version counter of the local tensor
        return data

    @uncompiled
    def assign(parameter: DTensor, other: torch.Tensor) -> None:
        (assigned if is_ours(parameter) else _DATA.__set__)(parameter, other)

    DTensor.data = property(read, assign)  # type: ignore[assignment]


def keep_values(known: weakref.ref[DTensor]) -> None:
    """If a DTensor still exists, copy its values to separate memory, because its memory is overwritten next."""
    held = known()
    if held is not None:
        held._local_tensor = held._local_tensor.clone()


# The parts of a DTensor


def spec_of(tensor: torch.Tensor) -> Spec:
    """Mesh, placements and global shape of a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor._spec


def spec_with_dtype(spec: Spec, dtype: torch.dtype) -> Spec:
    """The spec of a DTensor, for a local tensor of this dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return spec if meta.dtype == dtype else make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without autograd or dispatch."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


# The same as a function for loops that run in C.
local_part: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor on this rank: the local tensor of a DTensor, or the whole of any other tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# Which rows a rank holds


def boxes_of(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a DTensor that this rank holds, as (offsets, sizes): one, or none."""
    assert isinstance(tensor, DTensor)
    return [(tuple(found.offsets), tuple(found.sizes)) for found in tensor.__create_chunk_list__()]


@functools.lru_cache(maxsize=1 << 16)  # every rank computes the boxes of all others, for each parameter
def box_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the part of a DTensor on the rank at ``place`` in a mesh of this shape."""
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
    return tuple(offsets), tuple(sizes)


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, sharded like the DTensor ``like``: a view of it. Does not communicate."""
    for box in boxes_of(like):
        return in_box(whole, *box)
    return whole.new_empty(local_of(like).shape)


def local_rows(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of a whole tensor, as in a DTensor of spec ``spec``. Does not communicate."""
    place = spec.mesh.get_coordinate()
    assert place is not None
    return in_box(whole, *box_at(whole.shape, spec.mesh.shape, tuple(place), spec.placements)).contiguous()


def in_box(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of ``sizes`` elements from ``offsets``: a view of the whole tensor."""
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))]


# Meshes


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh with the axes of all of these, which are submeshes of one mesh."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))


def flattened_names(mesh: DeviceMesh) -> list[str]:
    """The names of the flattened axes of a mesh, or of the mesh that it is a submesh of."""
    return list(mesh._get_root_mesh()._flatten_mapping)


def data_parallel_mesh(mesh: DeviceMesh, shard: Sequence[str], replicate: Sequence[str]) -> DeviceMesh:
    """The mesh (replicate, shard), or one of the two, from axes of ``mesh``; several axes of a kind are flattened."""
    kinds = [tuple(names) for names in (replicate, shard) if names]
    return join_meshes([mesh[k[0]] if len(k) == 1 else mesh[k]._flatten("_".join(k)) for k in kinds])
