"""Placements of Megatron-FSDP's second version: its own classes, and torch's, which 0.7 uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from flatshard import layout, policy

Placement = Any  # Flat, Replicate, Partial or BlockAtomic of this module, or torch's Shard(0) or Partial
Replicate = TorchReplicate


class Flat(TorchShard):
    """``Shard(0)`` of the tensors of a flat buffer."""

    def __init__(self) -> None:
        super().__init__(0)


RowAtomic = Flat  # the name in 0.7


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend; ``reduce_op`` (SUM or AVG) is the reduction that gives the value."""

    reduce_op: Any = dist.ReduceOp.SUM


@dataclass(frozen=True)
class BlockAtomic:
    """Sharded on dim 0 in blocks of ``rows`` consecutive rows."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"BlockAtomic(rows={self.rows}): rows must be at least 1")


def to_engine(placement: Placement) -> layout.Placement:
    """The engine's placement for any placement of this surface. Layouts keep the blocks of `BlockAtomic` whole."""
    if isinstance(placement, TorchReplicate):
        return layout.Replicate()
    if isinstance(placement, BlockAtomic) or (isinstance(placement, TorchShard) and not placement.dim):
        return layout.Flat()
    op = str(getattr(placement, "reduce_op", None)).rpartition(".")[2].lower()
    if op in ("sum", "avg"):
        return layout.Partial("avg" if op == "avg" else "sum")
    kind = ValueError if isinstance(placement, (TorchShard, Partial, TorchPartial)) else TypeError
    raise kind(f"{placement!r}: the placement must be Flat(), Shard(0), Replicate(), or Partial of a sum or an average")


def to_torch(placement: Placement) -> Any:
    """torch's placement for any placement of this surface."""
    engine = to_engine(placement)
    if isinstance(engine, layout.Partial):
        return TorchPartial(engine.op)
    return TorchShard(0) if layout.is_sharded(engine) else Replicate()


@dataclass(frozen=True)
class Placements:
    """Placements of compute weights, gradients and optimizer state: one for each axis of the mesh in ``dp_axes``."""

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def engine(self) -> policy.Placements:
        """The engine's `Placements`. Unreduced gradients are Partial of a mean there; ``gradient_scale`` scales it."""
        given = self.parameter, self.gradient, self.optimizer
        for block in (p for each in given for p in each if isinstance(p, BlockAtomic)):
            raise ValueError(f"Placements: {block} is not supported here; use Flat() or Replicate()")
        parts = [[to_engine(p) for p in each] for each in given]
        mean = [layout.Partial("avg") if isinstance(p, layout.Partial) else p for p in parts[1]]
        return policy.Placements(tuple(parts[0]), tuple(mean), tuple(parts[2]))

    @property
    def sums(self) -> bool:
        """Whether gradients are sums over ranks instead of means."""
        return any(to_engine(p) == layout.Partial("sum") for p in self.gradient)

    def mesh_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The submesh of the axes ``dp_axes``."""
        names: tuple[Any, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        known = range(-mesh.ndim, mesh.ndim)
        wanted = tuple(names[axis] if isinstance(axis, int) and axis in known else axis for axis in self.dp_axes)
        if wanted == names:
            return mesh
        if not mesh.mesh_dim_names or not wanted or not set(wanted) <= set(names):
            raise ValueError(f"dp_axes={list(self.dp_axes)}: must be axes of the mesh, which has {names}")
        return mesh[wanted]  # type: ignore[index]
