"""Gradients over all ranks: norms (also of weights), clipping, detection of those not finite, sums over stages.

Every rank computes over its shards. The results of all parameters on one mesh are combined by one collective over the
axes that shard them; replicated values are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from flatshard import _arguments, _torch
from flatshard.buffer import DBuffer, Lane
from flatshard.buffer.groups import group_among, joint_group
from flatshard.engine.gradients.main_grads import DECOUPLED, MAIN_GRAD, MainGrads, Reduced
from flatshard.engine.groups.registry import group_of, sharded_of
from flatshard.engine.schedule.reduces import join_reduces
from flatshard.optim.flat_params import cut_as
from flatshard.optim.local_step import early_optimizer

# Where a tensor is: its mesh, and the axes of it that cut the tensor. Plain tensors: (None, ()).
_Where = tuple[DeviceMesh | None, tuple[int, ...]]
# A local gradient: what the norm is computed of, and what is scaled. None: a `Reduced`, which is told the factor.
_Gradient = tuple[torch.Tensor, torch.Tensor | None]
_ROWS = 256  # more than there are threads; each must have as many elements, or rows do not pay


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    stages: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scale gradients so that their norm, over all ranks and parameters, is at most ``max_norm``; returns the norm.

    The norm is what `torch.nn.utils.clip_grad_norm_` gives for the unsharded model, as a plain tensor, equal on all
    ranks, in float32 (float64 if a gradient is). ``norm_type`` is any positive number or ``inf``. All ranks must call
    this with the same parameters; they may be of several meshes and dtypes, sharded, tensor-parallel or plain.
    Plain tensors are taken to be the same on every rank.

    ``stages``: a mesh of one axis, along which ranks hold other parameters, as the stages of a pipeline do. The norm is
    then over all of them, which takes one more collective; a weight that two stages share counts in both.
    """
    norm_type = _norm_type(norm_type)
    bound: Any = max_norm
    if not isinstance(bound, torch.Tensor) and _arguments.real("max_norm", bound) < 0:  # one on a device is not read
        raise ValueError(f"max_norm={max_norm!r}: must not be negative")
    if stages is not None and (not isinstance(stages, DeviceMesh) or stages.ndim != 1):
        raise ValueError(f"stages={stages!r}: must be a DeviceMesh of one axis")
    listed = _listed(parameters)
    if any(early_optimizer(group_of(parameter)) is not None for parameter in listed):
        raise RuntimeError(
            "clip_grad_norm_ cannot be used with fully_shard_optimizer(..., in_backward=True): the backward has "
            "already stepped these parameters and freed their gradients; leave one of the two out"
        )
    join_reduces(to_host=False)
    places, on_device = _gradients(listed)
    if not places and stages is None:
        return torch.tensor(0.0)
    total = _total_norm(places, norm_type, any(parameter.dtype == torch.float64 for parameter in listed), stages)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; "
            "find_nonfinite(model) names the parameters, and error_if_nonfinite=False clips without this error"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for found in places.values():
        for device in {held.device for _, held in found if held is not None}:
            here = factor.to(device)
            # The host knows the factor now; elsewhere, to read it would wait for the device.
            if device.type != "cpu" or here.item() != 1.0:
                torch._foreach_mul_([held for _, held in found if held is not None and held.device == device], here)
    for reduced in on_device:
        reduced.scale = factor
    return total


def _listed(parameters: Any) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return [sharded_of(parameter) for parameter in parameters.parameters()]
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise TypeError(f"clip_grad_norm_ takes a module or parameters, not {type(parameters).__name__}")
    unique = list({id(parameter): parameter for parameter in listed}.values())
    odd = next((each for each in unique if not isinstance(each, torch.Tensor)), None)
    if odd is not None:
        raise TypeError(f"clip_grad_norm_ takes a module or parameters; one of them is a {type(odd).__name__}")
    return list({id(sharded): sharded for sharded in map(sharded_of, unique)}.values())


def _grad_name(parameter: torch.Tensor) -> str:
    """The attribute in which a parameter has its gradient (`FSDPModule.set_decoupled_gradients`)."""
    group = group_of(parameter)
    return DECOUPLED if group is not None and group.gradients.main_grads.is_decoupled else "grad"


def _grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    name = _grad_name(parameter)
    grad: torch.Tensor | None = _torch.grad_of(parameter) if name == "grad" else getattr(parameter, name)
    return grad


def _norm_type(norm_type: Any) -> float:
    order = _arguments.real("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f"norm_type={norm_type!r}: must be positive, or inf")
    return order


def _gradients(parameters: Sequence[torch.Tensor]) -> tuple[dict[_Where, list[_Gradient]], list[Reduced]]:
    """The local gradients by place. If all gradients of a buffer are among them, the buffer is there in their stead.

    The place of every parameter is listed, also without gradients on this rank: other ranks may have some.
    Gradients in host memory that have stayed on the device are listed as they are there, and returned too.
    """
    on_device: list[Reduced] = []
    holders: dict[int, MainGrads] = {}  # by their buffer
    places: dict[_Where, list[_Gradient]] = {}
    buffers: dict[Any, tuple[DBuffer, list[_Gradient], list[torch.Tensor]]] = {}
    for parameter in parameters:
        grad = _grad_of(parameter)
        buffer = getattr(grad, MAIN_GRAD, None)
        key: Any = id(buffer)
        if isinstance(grad, DTensor) and buffer is not None and grad.device_mesh is not buffer.mesh:
            key = key, grad.placements  # tensor parallelism may cut some parameters of a group and copy others
        entry = buffers.get(key)  # before `_where`, which takes longer
        if entry is not None and grad is not None:
            entry[2].append(grad)
            continue
        gradients = places.setdefault(_where(parameter), [])
        if buffer is not None and grad is not None:
            buffers[key] = (buffer, gradients, [grad])
            group = group_of(parameter)
            if group is not None and group.gradients.main_grads.buffer is buffer:
                holders[id(buffer)] = group.gradients.main_grads
        elif grad is not None:
            gradients.append((_torch.held_of(cut_as(parameter, grad)), _torch.held_of(grad)))
    for buffer, gradients, grads in buffers.values():
        # What lies between the parts of a buffer of gradients is zero.
        all_there = len(grads) == len(buffer.layout.slots) == len(set(map(id, grads)))
        main_grads = holders.get(id(buffer))
        reduced = None if main_grads is None else main_grads.on_device
        if reduced is not None and all_there and reduced.scale is None:
            gradients.append((reduced.buffer.local, None))
            on_device.append(reduced)
            continue
        if main_grads is not None:
            main_grads.copy_to_host()
        tensors = [buffer.local] if all_there else [_torch.local_of(grad) for grad in grads]
        gradients += zip(tensors, tensors)
    return places, on_device


def _where(tensor: torch.Tensor) -> _Where:
    return (tensor.device_mesh, cut_axes(tensor)) if isinstance(tensor, DTensor) else (None, ())


def cut_axes(tensor: DTensor) -> tuple[int, ...]:
    """The axes of its mesh that shard a tensor."""
    cut = (axis for axis, p in enumerate(tensor.placements) if not isinstance(p, (Replicate, Partial)))
    return tuple(axis for axis in cut if tensor.device_mesh.size(axis) > 1)


def _total_norm(
    places: dict[_Where, list[_Gradient]], norm_type: float, precise: bool, stages: DeviceMesh | None
) -> torch.Tensor:
    # Not by the gradients alone: a rank may have none of those that are precise.
    precise = precise or any(summed.dtype == torch.float64 for found in places.values() for summed, _ in found)
    dtype = torch.float64 if precise else torch.float32
    shares = {}
    for where, gradients in places.items():
        shares[where] = _join(_powers(where, [summed for summed, _ in gradients], norm_type, dtype), norm_type)
    found = list(_over_ranks(shares, norm_type).values())
    total = _join(torch.cat([value.to(found[0].device) for value in found]) if found else torch.zeros(0), norm_type)
    if stages is not None and stages.size() > 1:  # in float64: one of them may hold nothing that is
        own: dict[_Where, torch.Tensor] = {(stages, (0,)): total.to(mesh_device(stages), torch.float64)}
        (total,) = _over_ranks(own, norm_type).values()
    return _root(total[0].to(dtype), norm_type)


# A norm is the root of a sum of powers. The infinite one is a maximum, in which collectives may lose a NaN.


def _powers(where: _Where, tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Per tensor, the norm to the power of ``norm_type``, or the norm if it is infinite; 0 for an empty tensor."""
    device = tensors[0].device if where[0] is None and tensors else mesh_device(where[0])
    if not tensors:
        return torch.zeros(0, dtype=dtype, device=device)
    filled = [_in_rows(tensor, norm_type, dtype) if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    norms = torch._foreach_norm(filled, norm_type, dtype=dtype)
    values = torch.stack([norm.to(device) for norm in norms])
    return values if math.isinf(norm_type) else values.pow(norm_type)


def _in_rows(tensor: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the same norm. For a large one on the CPU, the norms of its rows.

    torch computes these on all threads, and the norm of one tensor on one thread.
    """
    size = tensor.numel() // _ROWS
    if tensor.device.type != "cpu" or size < _ROWS or not tensor.is_contiguous():
        return tensor
    flat = tensor.view(-1)
    norms = torch.linalg.vector_norm(flat[: _ROWS * size].view(_ROWS, size), norm_type, dim=1, dtype=dtype)
    return torch.cat([norms, flat[_ROWS * size :].to(dtype)])


def _join(powers: torch.Tensor, norm_type: float) -> torch.Tensor:
    if not powers.numel():
        return powers.new_zeros(1)
    return (powers.max() if math.isinf(norm_type) else powers.sum()).reshape(1)


def _root(powers: torch.Tensor, norm_type: float) -> torch.Tensor:
    return powers if math.isinf(norm_type) else powers.pow(1.0 / norm_type)


def _over_ranks(shares: dict[_Where, torch.Tensor], norm_type: float) -> dict[_Where, torch.Tensor]:
    """Join the powers of all ranks' shards, over the mesh axes that shard the tensors of each place."""
    highest, result = math.isinf(norm_type), dict(shares)
    for where, share in shares.items() if highest else ():
        result[where] = torch.cat([share.nan_to_num(0.0, math.inf), share.isnan().to(share.dtype)])
    for mesh in dict.fromkeys(mesh for mesh, axes in shares if mesh is not None and axes):
        cut = [where for where in shares if where[0] == mesh and where[1]]
        axes = sorted({axis for where in cut for axis in where[1]})
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for where in cut:
            if not highest and any(coordinate[axis] for axis in axes if axis not in where[1]):
                result[where] = torch.zeros_like(result[where])  # the first rank along the axis counts it
        both, group = torch.cat([result[where] for where in cut]), joint_group(mesh, axes)
        lane = Lane("norms", mesh_device(mesh))
        lane.all_reduce(group, [both], "max" if highest else "sum", after=(lane.mark(),), name="norms").wait()
        result.update(zip(cut, both.split([result[where].numel() for where in cut])))
    for where, value in result.items() if highest else ():
        norms, undefined = value.chunk(2)
        result[where] = norms.masked_fill(undefined > 0, math.nan)
    return result


def mesh_device(mesh: DeviceMesh | None) -> torch.device:
    """The device of this rank in a mesh; the CPU if there is no mesh."""
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


# Per parameter: all ranks list those of the model, which they have in common; the gradients may not be the same.


@torch.no_grad()
def grad_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each gradient, over all ranks, by the name of its parameter. Waits for the device; for logging.

    Parameters that have a gradient on any rank of their mesh are listed on all of them; where there is none it counts
    as zero. Plain parameters are listed where they have one. All ranks must call this.
    """
    _arguments.module("grad_norms", model)
    norm_type = _norm_type(norm_type)  # before anything is communicated
    named = _named(model)
    join_reduces()
    having = _ranks_where(named, lambda grad: True)
    gradients = [(name, parameter, _grad_of(parameter)) for name, parameter in named if having[name]]
    return _norms(gradients, norm_type)


@torch.no_grad()
def weight_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each parameter, over all ranks, by its name. Waits for the device; for logging."""
    _arguments.module("weight_norms", model)
    named = [(name, parameter, parameter.detach()) for name, parameter in _named(model)]
    return _norms(named, _norm_type(norm_type))


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, sharded_of(parameter)) for name, parameter in model.named_parameters()]


def _ranks_where(
    named: Sequence[tuple[str, torch.Tensor]], is_flagged: Callable[[torch.Tensor], torch.Tensor | bool]
) -> dict[str, list[int]]:
    """The ranks whose gradient is flagged, by the name of its parameter. For plain parameters, only this rank."""
    ranks_of = {}
    meshes = [parameter.device_mesh if isinstance(parameter, DTensor) else None for _, parameter in named]
    for mesh in dict.fromkeys(meshes):
        members = [each for each, its_mesh in zip(named, meshes) if its_mesh == mesh]
        flags = torch.zeros(len(members), dtype=torch.int32, device=mesh_device(mesh))
        for number, (_, parameter) in enumerate(members):
            grad = _grad_of(parameter)
            if grad is not None:
                flags[number] = is_flagged(grad)
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
        if mesh is not None:
            lane, ranks = Lane("nonfinite", flags.device), mesh.mesh.flatten().tolist()
            for axis in reversed(range(mesh.ndim)):
                flags = gathered_rows(lane, lane.group(mesh, axis), flags, "nonfinite")
        for (name, _), column in zip(members, flags.view(len(ranks), -1).T.tolist()):
            ranks_of[name] = sorted(rank for rank, flag in zip(ranks, column) if flag)
    return ranks_of


def _norms(named: Sequence[tuple[str, torch.Tensor, torch.Tensor | None]], norm_type: float) -> dict[str, float]:
    """The norm of each tensor, by name: of a parameter or of its gradient; None: this rank has no gradient."""
    places: dict[_Where, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter, tensor in named:
        local = torch.empty(0) if tensor is None else _torch.held_of(cut_as(parameter, tensor))
        places.setdefault(_where(parameter), []).append((name, local))
    shares = {}
    for where, members in places.items():
        shares[where] = _powers(where, [tensor for _, tensor in members], norm_type, torch.float64)
    norms: dict[str, float] = {}
    for where, powers in _over_ranks(shares, norm_type).items():
        norms.update(zip((name for name, _ in places[where]), _root(powers, norm_type).tolist()))
    return {name: norms[name] for name, _, _ in named}


@torch.no_grad()
def find_nonfinite(model: nn.Module) -> list[tuple[str, int]]:
    """Which parameters have infinities or NaN in their gradients, and the global ranks whose parts have them.

    A gradient is a mean over ranks, so the rank named is the one that holds the part, not the one that computed it.
    All ranks must call this. They find the same, except for plain parameters, of which each rank names its own.
    """
    _arguments.module("find_nonfinite", model)
    join_reduces()
    named = _named(model)
    where = _ranks_where(named, lambda grad: torch.isfinite(_torch.held_of(grad)).all().logical_not())
    return [(name, rank) for name, _ in named for rank in where[name]]


def gathered_rows(lane: Lane, group: ProcessGroup, values: torch.Tensor, name: str) -> torch.Tensor:
    """All-gather a tensor, of the same size on all ranks of a group, into one row for each rank."""
    rows = values.new_empty(group.size(), values.numel())
    if rows.numel():
        lane.all_gather(group, [rows.view(-1)], [values.reshape(-1)], after=(lane.mark(),), name=name).wait()
    return rows


@torch.no_grad()
def sum_shared_gradients(parameters: nn.Parameter | Iterable[nn.Parameter], stages: DeviceMesh) -> None:
    """Add up the gradients of weights of which the first and the last stage of a pipeline have a copy each.

    ``stages``: the mesh of one axis along which the stages are. Call it on the ranks of both ends, or on all, after the
    schedule's step and before the optimizer's, with the same weights in the same order; they are sharded alike. Copies
    that begin equal then stay equal. A missing gradient counts as zero.
    """
    if not isinstance(stages, DeviceMesh) or stages.ndim != 1:
        raise ValueError(f"stages={stages!r}: must be a DeviceMesh of one axis, the stages of the pipeline")
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for each in listed:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"sum_shared_gradients takes parameters, not {each!r}")
    ends = [int(stages.mesh[0]), int(stages.mesh[-1])]
    if ends[0] == ends[1] or dist.get_rank() not in ends:
        return
    join_reduces()
    parts = []
    for parameter in listed:
        grad = _grad_of(parameter)
        if grad is None:
            grad = torch.zeros_like(parameter)
            setattr(parameter, _grad_name(parameter), grad)
        parts.append(_torch.held_of(grad))
    lane, group = Lane("shared", torch.device(stages.device_type)), group_among(ends, [stages.get_group()])
    lane.all_reduce(group, parts, after=(lane.mark(),), name="shared gradients").wait()
