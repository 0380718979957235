"""DTensors whose shards have any length: their offsets, their checkpoints, and their full tensors.

flatshard's own DTensors store their offsets. For DTensors that were made by `DTensor.from_local` with a global shape,
the ranks of the mesh exchange the sizes of their shards.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict as states_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.buffer.ragged import RaggedDTensor, chunk, joined, write_item
from flatshard.checkpoint.errors import CheckpointError
from flatshard.engine.groups.registry import group_of
from flatshard.engine.schedule.agreement import Agreement, digest
from flatshard.optim.clip import gathered_rows

_Condition = Callable[[Any], bool]


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> Any:
    """The ``offsets`` and ``sizes`` of this rank's shard in the full tensor. All ranks of the mesh call it.

    Raises CheckpointError on all ranks if they pass different tensors, or if the shards do not add up to the shape.
    """
    local = _torch.local_of(dtensor)
    if isinstance(dtensor, RaggedDTensor):
        return _described(dtensor)
    mesh, lane = dtensor.device_mesh, _lane(dtensor)
    own = f"{tuple(dtensor.shape)} {dtensor.placements} {dtensor.dtype}"
    _agree(dtensor, own, f"metadata contract mismatch: this rank has a tensor {own}, other ranks have another one")
    offsets, sizes = [0] * local.dim(), list(local.shape)
    for axis in _inner_first(dtensor.placements):
        placement: Any = dtensor.placements[axis]
        size = torch.tensor([sizes[placement.dim]], device=lane.device)
        held = gathered_rows(lane, mesh.get_group(axis), size, "uneven").flatten().tolist()
        offsets[placement.dim] += sum(held[: mesh.get_local_rank(axis)])
        sizes[placement.dim] = sum(held)
    wanted = tuple(dtensor.shape)
    _agree(dtensor, tuple(sizes), f"the shards of all ranks, {tuple(sizes)}, do not compose {wanted}", wanted)
    return chunk(offsets, local.shape)


def _described(dtensor: DTensor) -> Any:
    """The offsets and sizes that a tensor stores; an empty shard if it stores none."""
    boxes = dtensor.__create_chunk_list__()
    return boxes[0] if boxes else chunk([0] * dtensor.dim(), tuple(_torch.local_of(dtensor).shape))


def _inner_first(placements: Sequence[Any]) -> list[int]:
    """The sharded axes, beginning with the last cut. A strided shard is cut after the axes that follow it."""
    for placement in placements:
        if not isinstance(placement, (Shard, Replicate, _torch.StridedShard)):
            raise ValueError(f"placement {placement}: must be Shard or Replicate; redistribute the tensor first")
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _torch.StridedShard)]
    plain = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and axis not in strided]
    return [*strided, *reversed(plain)]


def _lane(dtensor: DTensor) -> Lane:
    return Lane("uneven", torch.device(dtensor.device_mesh.device_type))


def _agree(dtensor: DTensor, value: Any, otherwise: str, wanted: Any = None) -> None:
    """Raise on all ranks of the mesh unless ``value`` is the same on all of them and, if given, ``wanted``."""
    differs = Agreement(_lane(dtensor), [dtensor.device_mesh]).differs(digest(value), "a tensor")
    if differs or wanted not in (None, value):
        # It is Megatron-Core's exception too, for code that catches that one.
        core: Any = sys.modules.get("megatron.core.dist_checkpointing.core")
        theirs = getattr(core, "CheckpointingException", None)
        kind = CheckpointError if theirs is None else type("CheckpointError", (CheckpointError, theirs), {})
        raise kind(otherwise)


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Store offsets and sizes in ``dtensor`` for torch.distributed.checkpoint. All ranks of the mesh call it."""
    if isinstance(dtensor, RaggedDTensor):
        return
    _describe(dtensor, gather_and_compute_chunk_metadata(dtensor))


def _describe(dtensor: DTensor, box: Any) -> None:
    """Store ``box`` as offsets and sizes of this rank's shard, for torch.distributed.checkpoint."""
    local, shape = _torch.local_of(dtensor), dtensor.shape

    def write_items(fqn: str, tensor: Any) -> list[Any]:
        return [write_item(fqn, box, shape, local)] if local.numel() else []

    described: Any = local
    described.__create_chunk_list__ = lambda: [box]
    described.__create_write_items__ = write_items


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Raise AssertionError on all ranks unless the shards of all ranks add up to the full tensor."""
    try:
        gather_and_compute_chunk_metadata(dtensor)
    except CheckpointError as error:
        raise AssertionError(str(error)) from error


def filter_unflattened_state_dict(
    state_dict: dict[Any, Any], key_chain: Sequence[Any] = (), visit_condition: _Condition = lambda value: False
) -> list[list[Any]]:
    """The key chains, outermost key first, of all values in nested dicts for which the condition is true."""
    chains: list[list[Any]] = []
    for key, value in state_dict.items():
        chain = [*key_chain, key]
        if isinstance(value, dict):
            chains += filter_unflattened_state_dict(value, chain, visit_condition)
        elif visit_condition(value):
            chains.append(chain)
    return chains


def get_unflattened_state_dict(state_dict: dict[Any, Any], key_chain: Sequence[Any] = ()) -> Any:
    """The value at a key chain of nested dicts."""
    try:
        return functools.reduce(operator.getitem, key_chain, state_dict)
    except (KeyError, TypeError) as error:
        raise KeyError(f"{list(key_chain)} is not in the state dict") from error


def _tensors_in(state_dict: dict[Any, Any]) -> list[DTensor]:
    """The DTensors of a state dict, sorted by name. CheckpointError on all ranks if their names differ."""
    chains = sorted(filter_unflattened_state_dict(state_dict, (), lambda value: isinstance(value, DTensor)), key=str)
    tensors: list[DTensor] = [get_unflattened_state_dict(state_dict, chain) for chain in chains]
    if tensors:
        _agree(tensors[0], chains, "metadata contract mismatch: the state dicts of ranks have different tensors")
    return tensors


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """`update_uneven_dtensor_chunk_metadata` for all DTensors of a state dict, which is returned."""
    for tensor in _tensors_in(state_dict):
        update_uneven_dtensor_chunk_metadata(tensor)
    return state_dict


def validate_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> None:
    """`validate_uneven_dtensor` for all DTensors of a state dict."""
    for tensor in _tensors_in(state_dict):
        validate_uneven_dtensor(tensor)


@torch.no_grad()
def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The full tensor, on every rank. All ranks of the mesh call it; it is not differentiable."""
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"dtensor must be a DTensor, not a {type(dtensor).__name__}")
    if isinstance(dtensor, RaggedDTensor):
        return dtensor.full_tensor()
    box, local = gather_and_compute_chunk_metadata(dtensor), _torch.local_of(dtensor).detach()
    mesh, axes = dtensor.device_mesh, sorted(_inner_first(dtensor.placements))
    return joined(local, box.offsets, dtensor.shape, mesh, axes) if axes else local.clone()


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """The full tensor as a DTensor with Replicate placements."""
    everywhere = [Replicate() for _ in dtensor.placements]
    return DTensor.from_local(uneven_dtensor_to_full_tensor(dtensor), dtensor.device_mesh, everywhere, run_check=False)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def make_uneven_dtensor(
    local_tensor: torch.Tensor, shape: Sequence[int], dp_mesh: DeviceMesh, placements: Sequence[Any], *,
    post_process_uneven: bool = False, copy_chunk_meta_from: DTensor | None = None,
    chunk_metadata: tuple[Sequence[int], Sequence[int]] | None = None,
) -> DTensor:  # fmt: skip
    """A DTensor of the global ``shape`` over this rank's shard, which may have any length.

    Offsets and sizes for torch.distributed.checkpoint are exchanged by all ranks of the mesh (``post_process_uneven``),
    copied from a tensor that is sharded alike (``copy_chunk_meta_from``), or given (``chunk_metadata``).
    """
    if len(placements) != dp_mesh.ndim:
        raise ValueError(f"{len(placements)} placements were given for a mesh of {dp_mesh.ndim} axes")
    local = local_tensor.reshape(-1, *shape[1:]) if len(shape) else local_tensor
    made = _torch.make_dtensor(local, dp_mesh, placements, torch.Size(shape))
    if post_process_uneven:
        update_uneven_dtensor_chunk_metadata(made)
    elif copy_chunk_meta_from is not None:
        _describe(made, _described(copy_chunk_meta_from))
    elif chunk_metadata is not None:
        _describe(made, chunk(*chunk_metadata))
    return made


def get_state_dict(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], **choices: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`get_state_dict` of torch.distributed.checkpoint, with offsets and sizes stored in all DTensors.

    DTensors of flatshard's models store them already; for other DTensors all ranks of the mesh exchange them.
    """
    states: tuple[dict[str, Any], dict[str, Any]] = states_of(model, optimizers, **choices)
    if any(isinstance(parameter, DTensor) and group_of(parameter) is None for parameter in model.parameters()):
        for each in states:
            preprocess_state_dict_for_uneven_dtensor(each)
    return states


def split_dtensor(
    dtensor: DTensor, split_size_or_sections: int | Sequence[int], dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:  # fmt: skip
    """`torch.split` along a dim. Each rank keeps its elements of each part; no values are communicated.

    The parts are uneven; ``update_uneven_dtensor_chunk_meta``: `update_uneven_dtensor_chunk_metadata` for each part.
    """
    split: Any = torch.empty(dtensor.shape[dim], device="meta").split(split_size_or_sections)
    box, local, start = gather_and_compute_chunk_metadata(dtensor), _torch.local_of(dtensor), 0
    placements = [Shard(p.dim) if isinstance(p, Shard) else p for p in dtensor.placements]
    for size in map(len, split):
        first = min(max(start - box.offsets[dim], 0), local.shape[dim])
        last = min(max(start + size - box.offsets[dim], first), local.shape[dim])
        shape = torch.Size([size if d == dim else length for d, length in enumerate(dtensor.shape)])
        made = _torch.make_dtensor(local.narrow(dim, first, last - first), dtensor.device_mesh, placements, shape)
        if update_uneven_dtensor_chunk_meta:
            update_uneven_dtensor_chunk_metadata(made)
        start += size
        yield made
