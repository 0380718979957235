"""Gathers and reduces by copies between ranks that can access each other's memory: no NCCL kernels, no staging.

Each rank of a process group has a workspace in torch's symmetric memory, which the others can access. A gather copies
this rank's shards into its workspace, and those of the others out of theirs. A reduce writes the other ranks' parts of
the gradients into their workspaces, and sums what they have written into this one, in the order of ranks, rounding
once. Copy engines do the copies; multiprocessors do the sums and the barriers, on the lane's stream.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.buffer.groups import WITHOUT_PEERS

_ALIGN = 16  # bytes
_GRANULE = 2 << 20


def _number(name: str) -> int:
    """A number for a machine or a GPU, which a tensor can hold."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")


def see_peers(lane: Lane, groups: Sequence[ProcessGroup]) -> bool:
    """Gather and reduce by copies from now on in groups whose ranks are all on one node; returns whether there are any.

    A collective call in each group of more than one rank. Groups of one rank need no communication.
    """
    assert lane.stream is not None
    others = [group for group in groups if group.size() > 1]
    for group in others:
        if lane.backend_in(group) not in WITHOUT_PEERS:
            gpu = str(torch.cuda.get_device_properties(lane.device).uuid)
            own = torch.tensor([_number(socket.gethostname()), _number(gpu)], device=lane.device)
            numbers = own.new_empty(2 * group.size())  # flat, because Gloo requires as many dims as the input has
            lane.all_gather(group, [numbers], [own], after=(lane.mark(),), name="nodes").wait()
            nodes, devices = numbers.view(-1, 2).T.tolist()
            if len(set(nodes)) == 1:
                may_share = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
                if len(set(devices)) < len(devices) and not may_share:
                    raise ValueError(
                        f"WirePolicy(peers=True): several of the ranks {dist.get_process_group_ranks(group)} use the "
                        "same GPU; call torch.cuda.set_device(LOCAL_RANK) before fully_shard"
                    )
                lane.peers[group] = Peers(group, lane.stream)
    return bool(lane.peers) or not others


class Peers:
    """The workspaces of one process group, whose ranks are all on this node, for one lane."""

    def __init__(self, group: ProcessGroup, stream: torch.cuda.Stream) -> None:
        self.group, self._stream = group, stream
        self._memory: torch.Tensor | None = None
        self._handle: Any = None
        self._in_graphs: list[tuple[Any, torch.Tensor]] = []  # workspaces that replays of CUDA graphs may use

    def __del__(self) -> None:
        if self._memory is not None:
            self._stream.synchronize()  # the last launch ends with a barrier; after it no rank uses the workspace

    def workspace(self, numbytes: int) -> Any:
        """A handle of the workspaces of all ranks, each of at least ``numbytes``, which must be the same on all."""
        if self._memory is None or self._memory.numel() < numbytes:
            if self._memory is not None:
                self._stream.synchronize()
            self._memory = _torch.symmetric_memory(-(-numbytes // _GRANULE) * _GRANULE, self._stream.device)
            self._handle = _torch.rendezvous(self._memory, self.group)
        elif torch.cuda.is_current_stream_capturing() and all(
            handle is not self._handle for handle, _ in self._in_graphs
        ):
            self._in_graphs.append((self._handle, self._memory))
        return self._handle

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> PeerGather:
        return PeerGather(self, outputs, inputs)

    def reduce(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        reduction: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        """Reduce each input over the ranks into this rank's piece of it, on the current stream."""
        world, rank = self.group.size(), self.group.rank()
        places, total = _places(inputs)
        handle = self.workspace(total)
        pieces = [tensor.view(world, -1) for tensor in inputs]
        handle.barrier()  # all ranks have finished the last sums, so the workspaces can be overwritten
        for peer in _from(rank, world):
            for piece, place in zip(pieces, places):
                target = handle.get_buffer(peer, piece[peer].shape, piece.dtype, place + rank * piece.shape[1])
                target.copy_(piece[peer])
        handle.barrier()
        for out, piece, place in zip(outputs, pieces, places):
            out.copy_(reduction(handle.get_buffer(rank, piece.shape, piece.dtype, place), 0))


class PeerGather:
    """A gather that can be launched repeatedly, with the same tensors; their storage may be freed in between."""

    def __init__(self, peers: Peers, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._peers, self._inputs = peers, inputs
        self._outputs = [tensor.view(peers.group.size(), -1).unbind() for tensor in outputs]
        self._places, self._total = _places(inputs)
        self._handle: Any = None
        self._shards: list[list[torch.Tensor]] = []  # of all ranks in their workspaces, for each tensor

    def __call__(self) -> None:
        """Launch it on the current stream."""
        world, rank = self._peers.group.size(), self._peers.group.rank()
        handle = self._peers.workspace(self._total)
        if self._handle is not handle:
            self._handle = handle
            self._shards = [
                [handle.get_buffer(peer, inp.shape, inp.dtype, place) for peer in range(world)]
                for inp, place in zip(self._inputs, self._places)
            ]
        for inp, out, shards in zip(self._inputs, self._outputs, self._shards):
            shards[rank].copy_(inp)
            if out[rank].data_ptr() != inp.data_ptr():
                out[rank].copy_(inp)
        handle.barrier()
        for peer in _from(rank + 1, world)[:-1]:
            for out, shards in zip(self._outputs, self._shards):
                out[peer].copy_(shards[peer])
        handle.barrier()  # all ranks have read this workspace


def _from(first: int, world: int) -> list[int]:
    """All ranks from ``first`` on, cyclically, so that ranks do not all access the same one at a time."""
    return [(first + step) % world for step in range(world)]


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """The offsets of tensors in a workspace, in their own elements, and its size in bytes."""
    ends = list(accumulate((-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors), initial=0))
    return [end // tensor.element_size() for end, tensor in zip(ends, tensors)], ends[-1]
