"""The state of a model and its optimizer for a checkpoint, and the part of each tensor that this rank writes."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from flatshard import _torch
from flatshard.checkpoint.contents import encode_tree
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import CODES
from flatshard.checkpoint.manifest import merge_boxes, pack_boxes


@dataclass
class Part:
    """The part of a tensor that this rank holds: a box, or nothing (``offsets`` is None)."""

    offsets: tuple[int, ...] | None
    local: torch.Tensor
    replica: int = 0  # the index of this rank among the `replicas` ranks that hold the same box
    replicas: int = 1
    ranks: int = 0  # size of the mesh; 0 for a plain tensor


def held_part(tensor: torch.Tensor, rank: int = 0) -> Part:
    """This rank's part of a tensor. A plain tensor counts as a replica on every rank, of which rank 0 writes."""
    if not isinstance(tensor, DTensor):
        return Part((0,) * tensor.dim(), tensor.detach(), rank)
    mesh, local = tensor.device_mesh, _torch.local_of(tensor).detach()
    coordinate = mesh.get_coordinate()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"a DTensor has placements {tensor.placements}; redistribute it, so that none is Partial")
    boxes = _torch.boxes_of(tensor) if coordinate is not None else []
    if coordinate is None or not boxes or 0 in boxes[0][1]:
        return Part(None, local)
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replica, replicas = replica * mesh.size(axis) + coordinate[axis], replicas * mesh.size(axis)
    return Part(boxes[0][0], local, replica, replicas, mesh.size())


@dataclass
class Snapshot:
    """State as JSON trees, and this rank's parts of the tensors in them."""

    rank: int
    world: int = 1
    model: Any = None
    optimizer: Any = None
    extra: Any = None
    # key -> dtype code, shape; without the tensors of ``extra``, which differ between ranks
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    writes: list[tuple[str, tuple[int, ...], torch.Tensor]] = field(default_factory=list)  # key, offsets, local
    # key -> offsets, sizes of what ranks outside this rank's mesh may hold too, for example a norm with tensor
    # parallelism; and a few values of it
    possible_replicas: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)  # of all tensors, with those of ``extra``

    def put(self, key: str, tensor: torch.Tensor, own: bool = False) -> str:
        """Add a tensor and return its key. ``own``: only this rank has it, in ``extra``, so this rank writes it.

        The key is the path ``key``, or a longer one if another tensor has that: {"a/b": x, "a": {"b": y}}.
        """
        while key in self.keys:
            key += "'"
        self.keys.add(key)
        if tensor.dtype not in CODES:
            raise TypeError(f"{key} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        if tensor.is_meta:
            raise ValueError(f"{key} is on the meta device and has no values; call flatshard.materialize first")
        if own and isinstance(tensor, DTensor):
            raise TypeError(f"{key} is a DTensor; extra takes plain tensors, for example those of to_local()")
        part = held_part(tensor, 0 if own else self.rank)
        if _torch.is_wrapper(part.local):
            raise TypeError(f"{key} is a {type(part.local).__name__}; a checkpoint cannot hold this tensor subclass")
        number = len(self.tensors)
        if not own:
            self.tensors[key] = (CODES[tensor.dtype], tuple(tensor.shape))
        # Replicas take turns, so that each writes the same number of tensors. A tensor of ``extra`` is listed only in
        # this rank's file, so it is written even if it has no elements.
        if part.offsets is not None and (own or part.local.numel()) and number % part.replicas == part.replica:
            self.writes.append((key, part.offsets, part.local))
            if 0 < part.ranks < self.world:
                self.possible_replicas[key] = part.offsets, tuple(part.local.shape)
                # Not for optimizer state: without gradients it consists of rounding errors, in which copies differ.
                if key.startswith("model"):
                    self.samples[key] = _sample(part.local)
        return key

    def describe_replicas(self) -> tuple[dict[str, Any], str]:
        """What other ranks need for `write_replicas_once`. It is short, because every rank sends it to every other."""
        return pack_boxes(self.tensors, self.possible_replicas), json.dumps(self.samples)

    def write_replicas_once(self, possible_replicas: Sequence[dict[str, Any]], samples: Sequence[str]) -> None:
        """Leave tensors that several ranks would write to one of them. The arguments: `describe_replicas` of all ranks.

        CheckpointError if this rank and a rank outside its mesh have different values under one name.
        """
        numbers, tables = merge_boxes([shape for _, shape in self.tensors.values()], possible_replicas)
        holders: dict[Any, list[int]] = defaultdict(list)
        for number, table in enumerate(tables):
            for rank, offsets, _ in table:
                holders[number, tuple(offsets)].append(rank)
        read, others = cache(lambda rank: json.loads(samples[rank])), set()
        for turn, (key, number) in enumerate(zip(self.tensors, numbers)):
            if key in self.possible_replicas:
                ranks = holders[number, self.possible_replicas[key][0]]
                if key in self.samples and not _are_copies(self.samples[key], read(ranks[0])[key]):
                    raise CheckpointError(
                        f"'{key}' differs between ranks {ranks[0]} and {self.rank}, but no mesh axis shards it, so one "
                        "value would be lost. If these are different experts, shard them with flatshard.Experts(apart=)"
                    )
                if ranks[turn % len(ranks)] != self.rank:
                    others.add(key)
        self.writes = [each for each in self.writes if each[0] not in others]

    def to_host(self) -> None:
        """Copy the tensors to write to host memory, so that training can go on."""
        pinned = torch.cuda.is_available()
        copies = []
        for key, offsets, local in self.writes:
            copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned and local.is_cuda)
            copies.append((key, offsets, copy.copy_(local, non_blocking=True)))
        if pinned:
            torch.cuda.synchronize()
        self.writes = copies


def _sample(local: torch.Tensor) -> list[float]:
    """Some values of a tensor, by which `_are_copies` tells copies from different tensors."""
    flat = local.flatten()
    return [float(f"{value:.3g}") for value in flat[:: max(flat.numel() // 16, 1)].tolist()]


def _are_copies(few: list[float], others: list[float]) -> bool:
    """Whether two samples may be of copies. Copies on several ranks can differ by rounding after some training."""
    pairs = [(a, b) for a, b in zip(few, others) if math.isfinite(a) and math.isfinite(b)]
    return sum(abs(a - b) for a, b in pairs) <= 0.3 * sum(abs(a) + abs(b) for a, b in pairs)


def take_snapshot(
    model: nn.Module, optimizer: Optimizer | None, state: Mapping[Any, Any], extra: Any, rank: int, world: int
) -> Snapshot:
    """The state of a model and its optimizer, and this rank's ``extra``. Nothing is copied or communicated.

    ``state``: the optimizer state by parameter, with the same entries on all ranks.
    """
    snapshot = Snapshot(rank, world)
    keys: dict[int, str] = {}

    def put_once(key: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in keys:  # tied parameters are one tensor
            keys[id(tensor)] = snapshot.put(key, tensor)
        return keys[id(tensor)]

    snapshot.model = encode_tree(dict(model.state_dict(keep_vars=True)), put_once, "model")
    if optimizer is not None:
        groups: list[Any] = []
        entries: dict[str, Any] = {}
        for group, names in zip(optimizer.param_groups, names_by_group(model, optimizer)):
            groups.append({**group, "params": names})
            entries |= {name: state[p] for name, p in zip(names, group["params"]) if p in state}
        snapshot.optimizer = encode_tree({"groups": groups, "state": entries}, snapshot.put, "optimizer")
    snapshot.extra = encode_tree(extra, partial(snapshot.put, own=True), f"extra/{rank}")
    return snapshot


def names_by_group(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups. ValueError for one that is not in the model."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    for parameter in itertools.chain(*groups):
        if parameter not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model; build the "
                "optimizer from model.parameters() after fully_shard"
            )
    return [[names[parameter] for parameter in group] for group in groups]
