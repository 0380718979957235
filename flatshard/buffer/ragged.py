"""DTensors whose shards are not those of torch.chunk.

DTensor derives the rows of a rank from mesh and placements, and assumes those of torch.chunk. Under layout ``flat``,
and if two axes shard a buffer, the rows differ. A `RaggedDTensor` stores its actual rows: it gathers itself, describes
itself to torch.distributed.checkpoint, supports elementwise operations and norms, and raises for every operation that
would assume torch.chunk's rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _torch
from flatshard.buffer.groups import joint_group
from flatshard.buffer.lanes import Lane
from flatshard.buffer.rules import are_cut_alike, is_masked_fill
from flatshard.layout import Holding, Layout, Segment, Slot, holding


@dataclass(frozen=True, eq=False)
class Cut:
    """How one tensor of a layout is sharded over a mesh. Equal for tensors of the same place in the same layout."""

    layout: Layout
    index: int
    mesh: DeviceMesh
    sharded: tuple[bool, ...]  # per axis

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Cut)
            and (self.index, self.sharded, self.mesh) == (other.index, other.sharded, other.mesh)
            and (self.layout is other.layout or self.layout == other.layout)
        )

    def __deepcopy__(self, memo: Any) -> Cut:
        """Itself: it is immutable, and a mesh cannot be copied."""
        return self

    @property
    def held(self) -> Holding:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return self.held_at(coordinate)

    def held_at(self, place: Sequence[int]) -> Holding:
        """The pieces of the rank at a place in the mesh. Axes that do not shard the tensor may be anywhere."""
        sizes, at = (list(itertools.compress(each, self.sharded)) for each in (self.mesh.shape, place))
        return holding(self.layout.num_shards, sizes, at, [True] * len(sizes))

    @property
    def axes(self) -> list[int]:
        """The axes that shard it."""
        return [axis for axis, sharded in enumerate(self.sharded) if sharded]

    @property
    def dim(self) -> int:
        """Rows are slices of this dim."""
        return self.layout.slots[self.index].dim

    def rows(self, held: Holding) -> tuple[int, int]:
        """The first row, and how many, of what ``held`` pieces hold of the tensor."""
        return self.layout.rows(self.layout.slots[self.index], held.first, held.count)


class RaggedShard(Shard):
    """``Shard(dim)`` with the actual rows of this rank, from which torch computes correct offsets.

    torch.distributed.checkpoint's functions for full state dicts read from placements where to copy from. Sharding
    another tensor by it raises, because it has the rows of one rank only.
    """

    rows: tuple[int, int] | None  # first and count; None on all but the last sharded axis

    @classmethod
    def of(cls, dim: int, rows: tuple[int, int] | None) -> RaggedShard:
        made = cls(dim)
        made.rows = rows
        return made

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, int]:
        return (curr_local_size, 0) if self.rows is None else (self.rows[1], self.rows[0])

    def _split_tensor(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_refusal("distribute_tensor"))


class RaggedDTensor(_torch.DispatchingDTensor):
    """A DTensor that holds the rows of its `Cut`."""

    _cut: Cut

    @staticmethod
    def make(local: torch.Tensor, like: DTensor, cut: Cut) -> RaggedDTensor:
        """Over ``local``, with mesh, placements and global shape of ``like``."""
        spec = _torch.spec_with_dtype(like._spec, local.dtype)
        made = _torch.bare_wrapper(RaggedDTensor, local, spec)
        made._cut = cut
        assert isinstance(made, RaggedDTensor)
        return made

    def with_local(self, local: torch.Tensor) -> RaggedDTensor:
        """The same rows of another tensor."""
        return RaggedDTensor.make(local, self, self._cut)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The rows of this rank. Their gradient is that of the same rows."""
        local = _torch.local_of(self)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return local
        made: torch.Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return made

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on every rank. A collective call. The gradient of a rank's rows is this rank's own."""
        if grad_placements is not None and not all(isinstance(p, Replicate) for p in grad_placements):
            raise NotImplementedError(_refusal(f"full_tensor(grad_placements={grad_placements})", self))
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._whole()
        made: torch.Tensor = _ToWhole.apply(self)  # type: ignore[no-untyped-call]
        return made

    def _whole(self) -> torch.Tensor:
        cut = self._cut
        offsets = [cut.rows(cut.held)[0] if dim == cut.dim else 0 for dim in range(self.dim())]
        return joined(_torch.local_of(self).detach(), offsets, self.shape, cut.mesh, cut.axes)

    @property
    def placements(self) -> tuple[Any, ...]:
        """``Replicate()`` or a `RaggedShard` per axis."""
        sharded = self._cut.sharded
        last = max(axis for axis, cut in enumerate(sharded) if cut)
        dim, rows = self._cut.dim, self._cut.rows(self._cut.held)
        return tuple(
            RaggedShard.of(dim, rows if a == last else None) if cut else Replicate() for a, cut in enumerate(sharded)
        )

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        """To a copy on every rank, which `full_tensor` is too. Any other placement is refused."""
        same_mesh = device_mesh is None or device_mesh == self._cut.mesh
        if not same_mesh or placements is None or not all(isinstance(p, Replicate) for p in placements):
            raise NotImplementedError(_refusal("redistribute"))
        return DTensor.from_local(self.full_tensor(), self._cut.mesh, placements, run_check=False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by far the most frequent
            return args[0].with_local(_torch.local_of(args[0]).detach())
        kwargs = kwargs or {}
        ragged = [leaf for leaf in _torch.pytree_leaves((args, kwargs)) if isinstance(leaf, RaggedDTensor)]
        reduction = _REDUCTIONS.get(func._schema.name)
        if reduction is not None:
            return reduction(func, ragged, args, kwargs)
        if func._schema.name == "aten::copy_" and (isinstance(args[1], DTensor) or args[1].shape == args[0].shape):
            return _copy(args[0], args[1])
        if func._schema.name == "aten::new_empty" and torch.Size(args[1]) == args[0].shape:
            local = _torch.local_of(args[0])
            return args[0].with_local(local.new_empty(local.shape, **kwargs))
        if not _is_elementwise(func) and not is_masked_fill(func, args):
            raise NotImplementedError(_refusal(str(func), ragged[0]))
        if _torch.in_backward():
            args = _cut_whole(func, ragged[0], args)
        _require_same_rows(func, args, kwargs)
        local_args, local_kwargs = _torch.map_leaves(DTensor, _torch.local_of, (args, kwargs))
        result = func(*local_args, **local_kwargs)
        if not func._schema.returns:
            torch.autograd.graph.increment_version(args[0])  # a list, which autograd leaves to the kernels
            return None
        if func._schema.name.endswith("_"):
            return args[0]
        if isinstance(result, torch.Tensor):
            return ragged[0].with_local(result)
        first = next(arg for arg in args if isinstance(arg, (list, tuple)))
        return [
            _torch.like_dtensor(template, part) if isinstance(template, DTensor) else part
            for part, template in zip(result, first)
        ]

    def __tensor_flatten__(self) -> Any:
        """Refused: compilers would make DTensors of the parts, with torch.chunk's rows."""
        raise NotImplementedError(_refusal("torch.compile of operations", self))

    # torch.distributed.checkpoint

    def __create_chunk_list__(self) -> list[Any]:
        """The rows of this rank; none where it has none, which DCP could take for those that begin at the same row."""
        dim, (first, count) = self._cut.dim, self._cut.rows(self._cut.held)
        if not count and self.shape[dim]:
            return []
        offsets = [first if d == dim else 0 for d in range(self.dim())]
        return [chunk(offsets, _torch.local_of(self).shape)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        local = _torch.local_of(self)
        return [write_item(fqn, box, self.shape, local) for box in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return _torch.local_of(self)


@functools.cache
def allow_loading() -> None:
    """Let ``torch.load(weights_only=True)`` load ragged shards, as it does DTensors."""
    torch.serialization.add_safe_globals([RaggedDTensor, Cut, Layout, Segment, Slot])


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ragged: RaggedDTensor) -> torch.Tensor:
        ctx.ragged, local = ragged, _torch.local_of(ragged)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _torch.require_backward(RaggedDTensor)
        return ctx.ragged.with_local(grad)


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ragged: RaggedDTensor) -> torch.Tensor:
        ctx.ragged = ragged
        return ragged._whole()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _torch.require_backward(RaggedDTensor)
        return ctx.ragged.with_local(_torch.part_of(grad, ctx.ragged).contiguous())


def joined(
    local: torch.Tensor, offsets: Sequence[int], shape: torch.Size, mesh: DeviceMesh, axes: Sequence[int]
) -> torch.Tensor:
    """The whole tensor, of which each rank along ``axes`` has a part. All of them call it.

    A sum of bytes, which are zero where other ranks have values: it takes no memory beyond the result.
    """
    whole = local.new_zeros(shape)
    _torch.in_box(whole, offsets, local.shape).copy_(local)
    if whole.numel():
        lane, bits = Lane("full_tensor", local.device), whole.view(-1).view(torch.uint8)
        lane.all_reduce(joint_group(mesh, axes), [bits], after=(lane.mark(),), name="full_tensor").wait()
    return whole


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """A box of a tensor, as torch.distributed.checkpoint describes it."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def write_item(fqn: str, box: ChunkStorageMetadata, shape: torch.Size, local: torch.Tensor) -> WriteItem:
    """What torch.distributed.checkpoint writes of one box of a tensor."""
    data = TensorWriteData(chunk=box, properties=TensorProperties.create_from_tensor(local), size=shape)
    return WriteItem(index=MetadataIndex(fqn, box.offsets), type=WriteItemType.SHARD, tensor_data=data)


_KEEPING = {
    *("detach", "alias", "clone", "_to_copy", "copy_", "lift_fresh"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "zero_", "fill_", "masked_fill_"),
}


def _is_elementwise(func: Any) -> bool:
    """Whether each element of the result depends only on the same element of the arguments."""
    name = func._schema.name.removeprefix("aten::")
    if name == "equal":  # has the tag, and returns a bool
        return False
    return name in _KEEPING or name.startswith(("_foreach_", "_fused_")) or torch.Tag.pointwise in func.tags


def _cut_whole(func: Any, ragged: RaggedDTensor, args: Any) -> Any:
    """In a backward, gradients of sums are whole: replace whole tensors that are only read by this rank's rows."""

    def cut(value: Any) -> Any:
        is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == ragged.shape
        if not is_whole or value.numel() == 1 or value.requires_grad:
            return value
        return ragged.with_local(_torch.part_of(value, ragged).contiguous())

    writes = func._schema.name.endswith("_")
    return (*args[:writes], *map(cut, args[writes:]))


def _require_same_rows(func: Any, args: Any, kwargs: Any) -> None:
    """Raise unless all tensors of an elementwise operation, index by index in lists, are sharded alike or are scalars.

    Ordinary DTensors and plain tensors may be at other indices: an optimizer's list holds all its parameters, and that
    of an average the buffers too.
    """
    columns = max([len(arg) for arg in args if isinstance(arg, (list, tuple))], default=0)
    for column in range(max(columns, 1)):
        place = [
            arg[column] if isinstance(arg, (list, tuple)) and column < len(arg) else arg
            for arg in (*args, *kwargs.values())
        ]
        tensors = [value for value in place if isinstance(value, torch.Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors) and not are_cut_alike(tensors):
            first = next((tensor for tensor in tensors if isinstance(tensor, RaggedDTensor)), None)
            raise NotImplementedError(_refusal(f"{func} of tensors that are sharded differently", first))


@torch.no_grad()
def _copy(target: torch.Tensor, source: torch.Tensor) -> DTensor:
    """``target.copy_(source)``. A collective call where they are cut differently; a plain tensor is whole."""
    if target.shape != source.shape:
        raise ValueError(f"cannot copy a tensor of shape {tuple(source.shape)} into one of {tuple(target.shape)}")
    if not isinstance(target, DTensor):
        raise NotImplementedError(_refusal("aten.copy_ into a plain tensor", source))
    local = _torch.local_of(target)
    if isinstance(target, RaggedDTensor) and isinstance(source, RaggedDTensor) and target._cut == source._cut:
        local.copy_(_torch.local_of(source))
        return target
    local.copy_(_torch.part_of(source.full_tensor() if isinstance(source, DTensor) else source, target))
    return target


owner: Callable[[torch.Tensor], str | None] | None = None  # tells whose a tensor is; the engine sets it


def _refusal(what: str, tensor: torch.Tensor | None = None) -> str:
    whose = None if owner is None or tensor is None else owner(tensor)
    remedy = "call full_tensor() first, or shard with layout='tensor'"
    if whose is not None:
        remedy = f"use `with flatshard.gathered(module):`, {remedy}"
    return f"{what}: not supported for {whose or 'a DTensor'}, whose shards are not those of torch.chunk; {remedy}"


# Reductions: each rank reduces its rows, then the ranks of every sharded axis reduce the results.


def _all_reduced(cut: Cut, local: torch.Tensor, how: Literal["sum", "amax", "amin"]) -> torch.Tensor:
    lane, group = Lane("norm", local.device), joint_group(cut.mesh, cut.axes)
    if how == "sum":
        lane.all_reduce(group, [local], after=(lane.mark(),), name="norm").wait()
        return local
    parts = local.new_empty(group.size() * local.numel())
    lane.all_gather(group, [parts], [local.reshape(-1)], after=(lane.mark(),), name="norm").wait()
    parts = parts.view(group.size(), *local.shape)
    return parts.amax(0) if how == "amax" else parts.amin(0)


def _norms(tensors: Sequence[DTensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The norms of whole tensors. One collective for all ragged ones that are cut over the same mesh."""
    if order not in (math.inf, 0.0) and order < 1:
        raise NotImplementedError(_refusal(f"a norm of order {order}"))
    results: dict[int, torch.Tensor] = {}
    by_mesh: dict[tuple[int, tuple[bool, ...]], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, RaggedDTensor):
            by_mesh.setdefault((id(tensor._cut.mesh), tensor._cut.sharded), []).append(number)
        else:
            results[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype).full_tensor()
    for numbers in by_mesh.values():
        locals_ = [_torch.local_of(tensors[number]).detach() for number in numbers]
        wide = [part.to(dtype) if dtype is not None else part for part in locals_]
        zero = wide[0].new_zeros(())
        norms = torch.stack([torch.linalg.vector_norm(part, order) if part.numel() else zero for part in wide])
        power = 1.0 if order in (math.inf, 0.0) else order
        first = tensors[numbers[0]]
        assert isinstance(first, RaggedDTensor)
        total = _all_reduced(first._cut, norms.pow(power), "amax" if order == math.inf else "sum").pow(1 / power)
        results.update(zip(numbers, total.unbind()))
    return [results[number] for number in range(len(tensors))]


def _vector_norm(func: Any, ragged: Sequence[RaggedDTensor], args: Any, kwargs: Any) -> torch.Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if (len(args) > 2 and args[2] is not None) or (len(args) > 3 and args[3]):
        raise NotImplementedError(_refusal(f"{func} along a dim"))
    return _norms(ragged[:1], float(order), kwargs.get("dtype"))[0]


def _foreach_norm(func: Any, ragged: Sequence[RaggedDTensor], args: Any, kwargs: Any) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _norms(args[0], float(order), args[2] if len(args) > 2 else kwargs.get("dtype"))


def _of_all(func: Any, ragged: Sequence[RaggedDTensor], args: Any, kwargs: Any) -> torch.Tensor:
    """A sum, mean, maximum or minimum of all elements, and whether any or all of them are true."""
    if len(args) > 1:
        raise NotImplementedError(_refusal(f"{func} of more than one tensor, or along a dim"))
    name, cut, local = func._schema.name.removeprefix("aten::"), ragged[0]._cut, _torch.local_of(ragged[0])
    if name in ("sum", "mean"):
        total = _all_reduced(cut, local.sum(**kwargs), "sum")
        return total / ragged[0].numel() if name == "mean" else total
    if name in ("max", "min") and not local.numel():
        local = local.new_full((1,), -math.inf if name == "max" else math.inf)
    return _all_reduced(cut, func(local, **kwargs), "amax" if name in ("max", "any") else "amin")


def _unscale(func: Any, ragged: Sequence[RaggedDTensor], args: Any, kwargs: Any) -> None:
    """GradScaler's unscale; ``found_inf`` becomes 1 on every rank if one rank finds an infinity."""
    grads, found_inf, scale = args
    canonical = [grad for grad in grads if not isinstance(grad, RaggedDTensor)]
    if canonical:
        func(canonical, found_inf, scale)
    func([_torch.local_of(grad) for grad in ragged], found_inf, scale)
    for cut in {(id(grad._cut.mesh), grad._cut.sharded): grad._cut for grad in ragged}.values():
        found_inf.copy_(_all_reduced(cut, found_inf.clone(), "amax"))


_REDUCTIONS: dict[str, Callable[[Any, Sequence[RaggedDTensor], Any, Any], Any]] = {
    "aten::linalg_vector_norm": _vector_norm,
    "aten::_foreach_norm": _foreach_norm,
    **{f"aten::{name}": _of_all for name in ("sum", "mean", "max", "min", "any", "all")},
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
