"""DTensors whose shards may be of any length: where they lie, how they go into checkpoints, how to put them together.

flatshard's own tensors know all of this by themselves. For others, made by `DTensor.from_local` with a global shape,
the ranks of their mesh tell each other how much they hold.
"""

from __future__ import annotations

import functools
import hashlib
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
from flatshard.buffer.groups import joint_group
from flatshard.buffer.ragged import RaggedDTensor, chunk, write_item
from flatshard.checkpoint.errors import CheckpointError
from flatshard.engine.groups.registry import group_of
from flatshard.optim.clip import gathered_rows

_ANY = Callable[[Any], bool]


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> Any:
    """Which box of the whole this rank holds (``offsets``, ``sizes``). All ranks of the mesh call it.

    CheckpointError, on all of them, if they tell of different tensors, or of parts that do not make up the whole.
    """
    local = _torch.local_of(dtensor)
    if isinstance(dtensor, RaggedDTensor):
        return _described(dtensor)
    mesh, lane = dtensor.device_mesh, _lane(dtensor)
    said = f"{tuple(dtensor.shape)} {dtensor.placements} {dtensor.dtype}"
    _agree(lane, mesh, _digest(said), f"metadata contract mismatch: this rank has a tensor {said}, others have another")
    offsets, sizes = [0] * local.dim(), list(local.shape)
    for axis in _inner_first(dtensor.placements):
        placement: Any = dtensor.placements[axis]
        mine = torch.tensor([sizes[placement.dim]], device=lane.device)
        held = gathered_rows(lane, mesh.get_group(axis), mine, "uneven").flatten().tolist()
        offsets[placement.dim] += sum(held[: mesh.get_local_rank(axis)])
        sizes[placement.dim] = sum(held)
    whole = tuple(sizes) == tuple(dtensor.shape)
    _agree(lane, mesh, int(whole), f"the parts of a tensor do not compose its shape {tuple(dtensor.shape)}", wanted=1)
    return chunk(offsets, local.shape)


def _described(dtensor: DTensor) -> Any:
    """The box that a tensor says it is of the whole; an empty one where it has none."""
    boxes = dtensor.__create_chunk_list__()
    return boxes[0] if boxes else chunk([0] * dtensor.dim(), tuple(_torch.local_of(dtensor).shape))


def _inner_first(placements: Sequence[Any]) -> list[int]:
    """The sharded axes, from the one that cuts last. A strided shard is cut after those that follow it."""
    for placement in placements:
        if not isinstance(placement, (Shard, Replicate, _torch.StridedShard)):
            raise ValueError(f"a tensor that is placed {placement} has no parts that make it up")
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _torch.StridedShard)]
    plain = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and axis not in strided]
    return [*strided, *reversed(plain)]


def _lane(dtensor: DTensor) -> Lane:
    return Lane("uneven", torch.device(dtensor.device_mesh.device_type))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _agree(lane: Lane, mesh: DeviceMesh, number: int, otherwise: str, wanted: int | None = None) -> None:
    """Raise on all ranks of a mesh unless all have the same number, which is ``wanted``."""
    lowest, highest = lane.most([mesh], [-number, number], "a number")
    if -lowest != highest or wanted not in (None, highest):
        # Megatron-Core's own exception too, for code that awaits that.
        core: Any = sys.modules.get("megatron.core.dist_checkpointing.core")
        theirs = getattr(core, "CheckpointingException", None)
        kind = CheckpointError if theirs is None else type("CheckpointError", (CheckpointError, theirs), {})
        raise kind(otherwise)


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Let torch.distributed.checkpoint know which part of the whole this rank holds. All ranks of the mesh call it."""
    if isinstance(dtensor, RaggedDTensor):
        return
    _describe(dtensor, gather_and_compute_chunk_metadata(dtensor))


def _describe(dtensor: DTensor, box: Any) -> None:
    """Let torch.distributed.checkpoint know that this rank's part of the whole is ``box``."""
    local, shape = _torch.local_of(dtensor), dtensor.shape

    def write_items(fqn: str, tensor: Any) -> list[Any]:
        return [write_item(fqn, box, shape, local)] if local.numel() else []

    described: Any = local
    described.__create_chunk_list__ = lambda: [box]
    described.__create_write_items__ = write_items


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """AssertionError, on all ranks, unless the parts of all ranks make up the whole."""
    try:
        box = gather_and_compute_chunk_metadata(dtensor)
    except CheckpointError as error:
        raise AssertionError(str(error)) from error
    if any(offset + size > whole for offset, size, whole in zip(box.offsets, box.sizes, dtensor.shape)):
        raise AssertionError(f"a part at {box.offsets} of {box.sizes} does not lie in {tuple(dtensor.shape)}")


def filter_unflattened_state_dict(
    state_dict: dict[Any, Any], key_chain: Sequence[Any] = (), visit_condition: _ANY = lambda value: False
) -> list[list[Any]]:
    """The keys, from the outside in, of all values in nested dicts that meet a condition."""
    found: list[list[Any]] = []
    for key, value in state_dict.items():
        chain = [*key_chain, key]
        if isinstance(value, dict):
            found += filter_unflattened_state_dict(value, chain, visit_condition)
        elif visit_condition(value):
            found.append(chain)
    return found


def get_unflattened_state_dict(state_dict: dict[Any, Any], key_chain: Sequence[Any] = ()) -> Any:
    """The value in nested dicts at these keys."""
    try:
        return functools.reduce(operator.getitem, key_chain, state_dict)
    except (KeyError, TypeError) as error:
        raise KeyError(f"{list(key_chain)} is not in the state dict") from error


def _tensors_in(state_dict: dict[Any, Any]) -> list[DTensor]:
    """The DTensors of a state dict, by name; CheckpointError, on all ranks, if they are not the same everywhere."""
    chains = sorted(filter_unflattened_state_dict(state_dict, (), lambda value: isinstance(value, DTensor)), key=str)
    tensors: list[DTensor] = [get_unflattened_state_dict(state_dict, chain) for chain in chains]
    if tensors:
        said = _digest(" ".join(map(str, chains)))
        otherwise = "metadata contract mismatch: the state dicts of ranks have different tensors"
        _agree(_lane(tensors[0]), tensors[0].device_mesh, said, otherwise)
    return tensors


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """`update_uneven_dtensor_chunk_metadata` of all tensors in a state dict, which is returned."""
    for tensor in _tensors_in(state_dict):
        update_uneven_dtensor_chunk_metadata(tensor)
    return state_dict


def validate_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> None:
    """`validate_uneven_dtensor` of all tensors in a state dict."""
    for tensor in _tensors_in(state_dict):
        validate_uneven_dtensor(tensor)


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor, on every rank. All ranks of the mesh call it; no gradient flows through it."""
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"expected a DTensor, not a {type(dtensor).__name__}")
    if isinstance(dtensor, RaggedDTensor):
        return dtensor.full_tensor()
    box, local = gather_and_compute_chunk_metadata(dtensor), _torch.local_of(dtensor).detach()
    mesh, axes = dtensor.device_mesh, sorted(_inner_first(dtensor.placements))
    if not axes:
        return local.clone()
    lane, group = _lane(dtensor), joint_group(mesh, axes)
    boxes = gathered_rows(lane, group, torch.tensor([*box.offsets, *box.sizes], device=lane.device), "uneven")
    sizes = boxes[:, local.dim() :]
    padded = torch.nn.functional.pad(local.flatten(), (0, int(sizes.prod(1).max()) - local.numel()))
    whole = local.new_zeros(dtensor.shape)
    for part, place, size in zip(gathered_rows(lane, group, padded, "uneven"), boxes.tolist(), sizes.tolist()):
        into = whole[tuple(slice(offset, offset + length) for offset, length in zip(place, size))]
        into.copy_(part[: into.numel()].view(size))
    return whole


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """The whole tensor as a DTensor that every rank has."""
    everywhere = [Replicate() for _ in dtensor.placements]
    return DTensor.from_local(uneven_dtensor_to_full_tensor(dtensor), dtensor.device_mesh, everywhere, run_check=False)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def make_uneven_dtensor(
    local_tensor: torch.Tensor, shape: Sequence[int], dp_mesh: DeviceMesh, placements: Sequence[Any], *,
    post_process_uneven: bool = False, copy_chunk_meta_from: DTensor | None = None,
    chunk_metadata: tuple[Sequence[int], Sequence[int]] | None = None,
) -> DTensor:  # fmt: skip
    """A DTensor of this shape over this rank's part of it, which may have any length.

    Which part that is, torch.distributed.checkpoint is told: as all ranks of the mesh find out
    (``post_process_uneven``), as another tensor of the same parts says, or by offsets and sizes.
    """
    if len(placements) != dp_mesh.ndim:
        raise ValueError(f"{len(placements)} placements were given for a mesh of {dp_mesh.ndim} axes")
    meta = torch.empty(torch.Size(shape), device="meta")
    local = local_tensor.reshape(-1, *meta.shape[1:]) if meta.dim() else local_tensor
    made = _torch.make_dtensor(local, dp_mesh, placements, meta.shape, meta.stride())
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
    """torch.distributed.checkpoint's `get_state_dict`, whose tensors know which parts of the whole they are.

    Those of flatshard's models do so by themselves; for others, all ranks of their mesh find out.
    """
    found: tuple[dict[str, Any], dict[str, Any]] = states_of(model, optimizers, **choices)
    if any(isinstance(parameter, DTensor) and group_of(parameter) is None for parameter in model.parameters()):
        for each in found:
            preprocess_state_dict_for_uneven_dtensor(each)
    return found


def split_dtensor(
    dtensor: DTensor, split_size_or_sections: int | Sequence[int], dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:  # fmt: skip
    """`torch.split` along a dim, without communicating values: each rank keeps what it holds of each part.

    The parts are uneven; with ``update_uneven_dtensor_chunk_meta`` they say so to torch.distributed.checkpoint.
    """
    whole, sections = torch.empty(dtensor.shape[dim], device="meta"), split_size_or_sections
    sections = [len(part) for part in whole.split(sections)] if isinstance(sections, int) else sections
    box, local, start = gather_and_compute_chunk_metadata(dtensor), _torch.local_of(dtensor), 0
    for size in sections:
        first = min(max(start - box.offsets[dim], 0), local.shape[dim])
        last = min(max(start + size - box.offsets[dim], first), local.shape[dim])
        shape = torch.Size([size if d == dim else length for d, length in enumerate(dtensor.shape)])
        placements = [Shard(p.dim) if isinstance(p, Shard) else p for p in dtensor.placements]
        stride = torch.empty(shape, device="meta").stride()
        part = local.narrow(dim, first, last - first)
        made = DTensor.from_local(part, dtensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)
        if update_uneven_dtensor_chunk_meta:
            update_uneven_dtensor_chunk_metadata(made)
        start += size
        yield made
