"""Gradients of weights that stages of a pipeline share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.buffer.groups import group_among


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
    parts = []
    for parameter in listed:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        parts.append(_torch.held_of(grad))
    lane, group = Lane("shared", torch.device(stages.device_type)), group_among(ends, [stages.get_group()])
    lane.all_reduce(group, parts, after=(lane.mark(),), name="shared gradients").wait()
