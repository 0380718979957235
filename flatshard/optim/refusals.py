"""Optimizers that are refused: on shards they would compute something else without saying so, or step nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard.engine.groups.registry import OWNER
from flatshard.optim.clip import cut_axes
from flatshard.optim.local_step import stepped_by_others

# Class names of optimizers, torch's and well-known others, that read a whole parameter: on a part of one they would
# compute something else without saying so.
_WHOLE = {
    **dict.fromkeys(("Adafactor", "CAME"), "factors second moments over rows and columns"),
    **dict.fromkeys(("Muon", "Shampoo", "DistributedShampoo", "SOAP"), "needs whole matrices"),
    **dict.fromkeys(("LAMB", "Lamb", "LARS", "Lars", "NovoGrad"), "scales by norms of whole parameters"),
}
_REMEDIES = {
    "all": "but a rank has only shards; give whole=True, or use an elementwise optimizer such as AdamW",
    "rest": "but of the parameters that `whole` leaves out a rank has only shards; give those to an elementwise "
    "optimizer such as AdamW",
}
_OVER_ALL = "sums over all parameters, and no rank has all of them; use another optimizer"
_NEVER = {
    "LBFGS": "evaluates the model several times in a step and needs dot products over all parameters; use an "
    "elementwise optimizer such as AdamW",
    "SparseAdam": "needs sparse gradients, and those of sharded parameters are dense; use Adam",
    **dict.fromkeys(("Prodigy", "DAdaptAdam", "DAdaptSGD"), _OVER_ALL),
}


def original_class(optimizer: Optimizer) -> type[Optimizer]:
    """The class of an optimizer before `fully_shard_optimizer` has changed it."""
    return getattr(type(optimizer), "_flatshard_original", type(optimizer))


def refuse_class(optimizer: Optimizer, on_shards: Literal["all", "rest", "none"]) -> None:
    """Raise for what cannot work; ``on_shards`` says whether all parameters, some or none are stepped in parts."""
    names = [cls.__name__ for cls in original_class(optimizer).__mro__]
    reason = next((_NEVER[name] for name in names if name in _NEVER), None)
    if reason is None and on_shards != "none":
        refuse_foreign_blocks(optimizer)
        reason = next((f"{_WHOLE[name]}, {_REMEDIES[on_shards]}" for name in names if name in _WHOLE), None)
    if reason is not None:
        raise ValueError(f"{names[0]} {reason}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"{names[0]}(differentiable=True) is not supported for sharded parameters; leave it out")


def refuse_foreign_blocks(optimizer: Optimizer) -> None:
    """Raise if the optimizer keeps state in blocks of each tensor, which would be blocks of a shard."""
    name = type(optimizer).__name__
    if "8bit" in name and any(cls.__module__.startswith("bitsandbytes.") for cls in type(optimizer).__mro__):
        raise ValueError(
            f"{name} of bitsandbytes scales blocks of a rank's shard, so its state cannot be saved for another number "
            "of ranks; use flatshard.optim.AdamW8bit, or fully_shard_optimizer with whole=True"
        )


def refuse_sharded_matrices(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Raise if sharded matrices would be factored, or multiplied in place: DTensor fails in that."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    kind = next((name for name in names if name in ("Adafactor", "CAME")), None)
    kind = "Muon" if isinstance(optimizer, torch.optim.Muon) else kind
    if kind is None:
        return
    matrices = [
        p for p in parameters if isinstance(p, DTensor) and p.dim() > 1 and any(a.is_shard() for a in p.placements)
    ]
    if matrices and (kind != "Muon" or any(cut_axes(p) for p in matrices)):  # one rank alone has whole ones
        raise ValueError(
            f"{names[0]} {_WHOLE[kind]}, but these are sharded: call fully_shard_optimizer(optimizer, whole=True), "
            "which steps each on one rank, or use an elementwise optimizer such as AdamW"
        )


def refuse_stepped(optimizer: Optimizer) -> None:
    """Raise if backwards step parameters of the optimizer for another one: their gradients are gone."""
    for parameter, _ in stepped_by_others(optimizer):
        name, owner = parameter.__dict__.get(OWNER, ("a parameter", "the model"))
        raise RuntimeError(
            f"'{name}' of {owner} is stepped by the backward, for another optimizer that has in_backward=True, so this "
            f"{type(optimizer).__name__} has no gradient for it. Delete the other one before the next backward, or "
            "call fully_shard_optimizer on this one, which then replaces it"
        )
