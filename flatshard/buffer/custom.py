"""Collectives with a user's own communication objects: torch's FSDP protocols ``AllGather`` and ``ReduceScatter``.

Such an object allocates flat buffers and communicates them in one call. Runs are copied into its buffers before the
call, and out of them after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work


def gather_by(
    comm: Any, group: ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], asynchronous: bool
) -> tuple[list[Work], Callable[[], None]]:
    """Start gathering each input into its output; what to wait for, and what to call then."""
    sizes, world = [tensor.numel() for tensor in inputs], group.size()
    total = sum(sizes)
    flat = comm.allocate((world * total,), dtype=inputs[0].dtype, device=inputs[0].device)
    mine = flat[group.rank() * total : (group.rank() + 1) * total]
    torch._foreach_copy_(list(mine.split(sizes)), list(inputs))
    work = comm(output_tensor=flat, input_tensor=mine, group=group, async_op=asynchronous)

    def unpack() -> None:
        by_tensor = flat.view(world, total).split(sizes, dim=1)
        torch._foreach_copy_([out.view(world, size) for out, size in zip(outputs, sizes)], list(by_tensor))

    return [] if work is None else [work], unpack


def reduce_by(
    comm: Any,
    group: ProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: str,
    asynchronous: bool,
) -> tuple[list[Work], Callable[[], None]]:
    """Start reducing each input to this rank's piece of it; what to wait for, and what to call then."""
    sizes, world = [tensor.numel() for tensor in outputs], group.size()
    total = sum(sizes)
    sent = comm.allocate((world * total,), dtype=inputs[0].dtype, device=inputs[0].device)
    received = comm.allocate((total,), dtype=inputs[0].dtype, device=inputs[0].device)
    places = list(sent.view(world, total).split(sizes, dim=1))
    torch._foreach_copy_(places, [tensor.view(world, size) for tensor, size in zip(inputs, sizes)])
    reduce_op = getattr(dist.ReduceOp, op.upper())
    work = comm(output_tensor=received, input_tensor=sent, group=group, op=reduce_op, async_op=asynchronous)

    def unpack() -> None:
        places.clear()  # until here, they keep what is sent alive
        torch._foreach_copy_(list(outputs), list(received.split(sizes)))

    return [] if work is None else [work], unpack
