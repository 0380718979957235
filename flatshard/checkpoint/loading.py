"""`load`: read and verify a whole checkpoint, then change the model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard import _arguments, _torch
from flatshard.buffer import Exchange
from flatshard.checkpoint.contents import decode_tree
from flatshard.checkpoint.errors import CheckpointError, from_all_ranks, on_all_ranks
from flatshard.checkpoint.files import TensorEntry
from flatshard.checkpoint.manifest import Manifest
from flatshard.checkpoint.progress import bar
from flatshard.checkpoint.reader import Reader, read_extra
from flatshard.checkpoint.state import held_part, names_by_group
from flatshard.checkpoint.stored_names import renaming
from flatshard.optim.flat_params import PER_PARAMETER
from flatshard.optim.optimizer_state import owner_of_entries, state_devices

_LISTED = 8  # problems that one error lists


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    progress: bool = True,
) -> Any:
    """Load a checkpoint that `save` wrote, with any number of ranks and any sharding. All ranks must call it.

    Each rank reads and verifies its shards. The model and the optimizer change only after this has succeeded on all
    ranks; otherwise all ranks raise CheckpointError, which says what is damaged, missing or of another shape. No code
    from the files is run. Optimizer state keeps the dtype that it was saved in; weights are cast to the model's dtype.

    ``strict=False`` ignores tensors that only the model or only the checkpoint has. A prefix ``module.`` of all names,
    which wrappers add, may be present in the model, in the checkpoint, in both or in neither.
    Returns the ``extra`` that this rank saved or, if the number of ranks has changed, that of rank 0.
    """
    path = _arguments.path("path", path)
    _arguments.module("load", model)
    _arguments.optimizer(optimizer)
    ranks = Exchange("control")
    manifest = on_all_ranks(ranks, lambda: Manifest(path))
    if len(set(from_all_ranks(ranks, manifest.digest))) > 1:
        raise CheckpointError(f"{path} is not the same on all ranks: it must be on storage that all ranks share")

    def stage() -> tuple[dict[str, Any], Any, Any]:
        own = ranks.rank if manifest.world == ranks.size else 0
        total = sum(file["bytes"] for file in manifest.files.values()) // ranks.size
        with bar("loading", total, progress and ranks.rank == 0) as advance, Reader(manifest, advance) as reader:
            weights = stage_model(reader, model, strict)
            state = None if optimizer is None else _stage_optimizer(manifest, reader, model, optimizer)
            return weights, state, read_extra(manifest, reader, own)

    weights, state, extra = on_all_ranks(ranks, stage)
    put_weights(model, weights)
    if optimizer is not None:
        optimizer.__setstate__(state)
    return extra


def put_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load the result of `stage_model` into a model."""
    meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in model.state_dict().values())
    model.load_state_dict(weights, strict=False, assign=meta)  # `stage_model` has compared the names


def stage_model(reader: Reader, model: nn.Module, strict: bool) -> dict[str, Any]:
    """Read this rank's shards of a model's state. CheckpointError names the tensors that do not fit the model."""
    wanted, source = model.state_dict(keep_vars=True), reader.source
    rename = renaming([name for name, _ in source.model["dict"]], wanted)
    saved: dict[str, Any] = {rename(name): tree for name, tree in source.model["dict"]}
    tied: dict[int, list[str]] = defaultdict(list)
    for name, value in wanted.items():
        tied[id(value)].append(name)
    problems, weights = [], {}
    read: dict[tuple[int, str], torch.Tensor] = {}  # id of the model's tensor, key -> local shard
    firsts: dict[int, tuple[str, torch.Tensor]] = {}  # id of the model's tensor -> its first name, local shard
    for name, value in wanted.items():
        names = [name, *tied[id(value)]]  # a tied weight may have been saved under one of its names only
        stored = next((other for other in names if other in saved), None)
        if stored is None:
            if strict:
                problems.append(f"'{name}' is not in the checkpoint")
            continue
        tree = saved[stored]
        if not isinstance(value, torch.Tensor):
            weights[name] = decode_tree(tree, reader.whole)
            continue
        key: Any = tree.get("tensor") if isinstance(tree, dict) else None
        problem = "is not a tensor in the checkpoint" if key is None else _misfit(source.tensors[key], value)
        if problem:
            problems.append(f"'{name}' {problem}")
        elif not problems:
            if (id(value), key) not in read:
                read[id(value), key] = _read_part(reader, name, source.tensors[key], value)
            local = read[id(value), key]
            first, other = firsts.setdefault(id(value), (name, local))
            if other is not local and not torch.equal(other, local):
                problems.append(f"'{name}' is tied to '{first}' in the model, but differs from it in the checkpoint")
            local = local.to(value.device_mesh.device_type) if isinstance(value, DTensor) and value.is_meta else local
            weights[name] = _torch.like_dtensor(value, local) if isinstance(value, DTensor) else local
    if strict:
        problems += [f"'{name}' is not in the model" for name in saved if name not in wanted]
    if problems:
        more = f", and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        advice = " (strict=False ignores missing names)" if any("' is not in the " in each for each in problems) else ""
        raise CheckpointError(f"{source.folder} does not fit the model: {'; '.join(problems[:_LISTED])}{more}{advice}")
    return weights


def _misfit(entry: TensorEntry, value: torch.Tensor) -> str | None:
    if entry.shape != tuple(value.shape):
        return f"has shape {entry.shape} in the checkpoint and {tuple(value.shape)} in the model"
    if entry.dtype != value.dtype and not (entry.dtype.is_floating_point and value.dtype.is_floating_point):
        return f"is {entry.dtype} in the checkpoint and {value.dtype} in the model"
    return None


def _read_part(reader: Reader, name: str, entry: TensorEntry, like: torch.Tensor) -> torch.Tensor:
    """Read the part of a saved tensor that this rank holds of ``like``."""
    part = held_part(like)
    if part.offsets is None:
        return torch.empty(part.local.shape, dtype=entry.dtype)
    return reader.read(name, entry, part.offsets, part.local.shape)


def _stage_optimizer(manifest: Manifest, reader: Reader, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Read this rank's optimizer state, in the form that `Optimizer.__setstate__` takes."""
    if manifest.optimizer is None:
        raise CheckpointError(f"{manifest.folder} was saved without an optimizer; load it with optimizer=None")
    saved = dict(manifest.optimizer["dict"])
    rename = renaming([name for name, _ in manifest.model["dict"]], model.state_dict(keep_vars=True))
    states = {rename(name): entries for name, entries in saved["state"]["dict"]}
    groups = [decode_tree(group, reader.whole) for group in saved["groups"]]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{manifest.folder} has {len(groups)} param_groups and the optimizer has {len(optimizer.param_groups)}: "
            "build the optimizer with the same param_groups as when it was saved"
        )
    owned_of, devices = owner_of_entries(optimizer), state_devices(optimizer)
    state: dict[Any, Any] = defaultdict(dict)
    named = names_by_group(model, optimizer)
    for number, (group, own, names) in enumerate(zip(groups, optimizer.param_groups, named)):
        odd = set(names) ^ {rename(name) for name in group.pop("params")}
        if odd:
            sides = ["the optimizer", "the checkpoint"]
            has, lacks = sides if min(odd) in names else reversed(sides)
            raise CheckpointError(
                f"{manifest.folder}: '{min(odd)}' is in param_groups[{number}] of {has}, not of {lacks}; build the "
                "optimizer with the same param_groups as when it was saved"
            )
        steps_on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in zip(names, own["params"]):
            if name not in states:
                continue
            entries = dict(states[name]["dict"])
            try:
                owned = owned_of(parameter, entries)
            except ValueError as error:
                raise CheckpointError(f"{manifest.folder}: optimizer state of '{name}': {error}") from None
            loaded = state[parameter]
            for key, tree in entries.items():
                if owned is None or owned[key]:
                    on_device = (key != "step" or steps_on_device) and not parameter.is_meta
                    device = devices[parameter] if on_device else torch.device("cpu")
                    # A parameter without dims has the shape of what an optimizer keeps once per parameter.
                    per_element = owned is None and (parameter.dim() > 0 or key not in PER_PARAMETER)
                    loaded[key] = _entry(reader, f"{name}: {key}", tree, parameter, per_element, device)
    return {"state": state, "param_groups": [{**a, **b} for a, b in zip(optimizer.param_groups, groups)]}


def _entry(
    reader: Reader, name: str, tree: Any, parameter: torch.Tensor, per_element: bool, device: torch.device
) -> Any:
    """Read an entry of a parameter's state. With ``per_element``, its tensors of that shape are sharded alike."""

    def read(key: str) -> torch.Tensor:
        entry = reader.source.tensors[key]
        if per_element and entry.shape == tuple(parameter.shape) and isinstance(parameter, DTensor):
            return _torch.like_dtensor(parameter, _read_part(reader, name, entry, parameter).to(device))
        return reader.read(name, entry).to(device)

    return decode_tree(tree, read)
