"""Placements of Megatron-FSDP's second version: its own, those of torch that newer ones use, and the engine's."""

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

Placement = Any  # Flat, Replicate, Partial and BlockAtomic of this module, or torch's Shard(0) and Partial
Replicate = TorchReplicate


class Flat(TorchShard):
    """``Shard(0)`` of a tensor in a flat buffer."""

    def __init__(self) -> None:
        super().__init__(0)


RowAtomic = Flat  # its later name


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend; ``reduce_op`` (SUM or AVG) says what the value is."""

    reduce_op: Any = dist.ReduceOp.SUM


@dataclass(frozen=True)
class BlockAtomic:
    """Cut so that ``rows`` consecutive rows stay together."""

    rows: int


def to_engine(placement: Placement) -> layout.Placement:
    """What the engine calls a placement."""
    if isinstance(placement, (layout.Flat, layout.Replicate, layout.Partial, layout.Block)):
        return placement
    if isinstance(placement, TorchReplicate):
        return layout.Replicate()
    if isinstance(placement, TorchShard):
        if placement.dim:
            raise ValueError(f"{placement}: a buffer is cut on dim 0 only")
        return layout.Flat()
    if isinstance(placement, BlockAtomic):
        return layout.Block(placement.rows)
    if isinstance(placement, (Partial, TorchPartial)):
        named = str(placement.reduce_op).rpartition(".")[2].lower()
        if named not in ("sum", "avg"):
            raise ValueError(f"{placement}: a sum or an average can be reduced")
        return layout.Partial("avg" if named == "avg" else "sum")
    raise TypeError(f"{placement!r} is not a placement: use Flat(), Shard(0), Replicate() or Partial(op)")


def to_torch(placement: Placement) -> Any:
    """What torch calls a placement."""
    engine = to_engine(placement)
    if isinstance(engine, layout.Partial):
        return TorchPartial(engine.op)
    return TorchShard(0) if layout.is_sharded(engine) else Replicate()


@dataclass(frozen=True)
class Placements:
    """How weights, gradients and optimizer state rest, one placement for each of the axes ``dp_axes`` of the mesh."""

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def engine(self) -> policy.Placements:
        """The same for the engine, where every gradient that rests unreduced is a mean: `scale` says what it is."""
        parts = [[to_engine(p) for p in given] for given in (self.parameter, self.gradient, self.optimizer)]
        mean = [layout.Partial("avg") if isinstance(p, layout.Partial) else p for p in parts[1]]
        return policy.Placements(tuple(parts[0]), tuple(mean), tuple(parts[2]))

    @property
    def sums(self) -> bool:
        """Whether gradients are sums over the ranks, not means."""
        return any(to_engine(p) == layout.Partial("sum") for p in self.gradient)

    def mesh_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The data-parallel axes of a mesh."""
        names = mesh.mesh_dim_names
        axes = [mesh.ndim + axis if isinstance(axis, int) and axis < 0 else axis for axis in self.dp_axes]
        if all(isinstance(axis, int) for axis in axes) and axes == list(range(mesh.ndim)):
            return mesh
        wanted = tuple(axis if isinstance(axis, str) else names[axis] for axis in axes) if names else ()
        if not wanted or any(name not in (names or ()) for name in wanted):
            raise ValueError(f"dp_axes={list(self.dp_axes)}: the mesh has axes {names or mesh.ndim}")
        return mesh[wanted]
