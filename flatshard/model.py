"""`shard_model`: shard a whole model in one call."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from flatshard import _arguments
from flatshard.api import checked_choices, fully_shard
from flatshard.engine.tree.parameters import sort_parameters
from flatshard.engine.tree.summary import Summary, summary
from flatshard.engine.units.unit import unit_of
from flatshard.module import FSDPModule
from flatshard.optim.step import replace_parameters
from flatshard.policy import CPUOffloadPolicy, Experts, OffloadPolicy, Sharding, own_policy
from flatshard.wrapping import instances, unit_modules

_log = logging.getLogger("flatshard")


def shard_model(
    model: nn.Module,
    *,
    units: Literal["auto"] | Sequence[type[nn.Module] | str] = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    experts: Experts | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    rows: bool = False,
    offload_bytes: int | None = None,
    **choices: Any,
) -> Summary:
    """Call `fully_shard` on the submodules of ``model`` that become units, and on ``model``, with the same ``choices``.

    ``units``: classes, or their import paths (``"package.module.Class"``), whose instances become units. ``"auto"``
    takes the classes in ``_no_split_modules`` of a Hugging Face model, or else those of repeated blocks in `ModuleList`
    and `Sequential`. Embeddings and linear layers outside of blocks, with at least a quarter of a block's parameters,
    become units too; those that share a parameter become one unit.
    ``optimizer``: one that was built on the model before; its parameters are replaced by the sharded ones, and it keeps
    its state.
    ``experts``: which modules are experts, and the mesh to shard them over. Everything else is sharded over ``mesh``,
    whose ranks all have data; gradients of experts are the mean over ``mesh`` too. Experts are gathered with the unit
    that contains them, before it exchanges tokens. A rank may leave experts unused; its gradient for them is zero. If
    no rank uses an expert, its gradient is zero, not None.
    ``shard_placement_fn``: as in `fully_shard`, for parameters that are not experts. Default: dim 0, or another dim if
    dim 0 would need much padding.
    ``rows``: shard units that are a single, untied embedding with ``rows=True`` (see `fully_shard`).
    ``offload_bytes``: with ``offload_policy=CPUOffloadPolicy()``, offload only as many units as are needed to move so
    many bytes of main weights of each rank to host memory, with their gradients and optimizer state. The last blocks
    are moved first, because their gradients are complete first.

    Returns, and logs, a table of the units. All ranks must call it.
    """
    _arguments.module("shard_model", model)
    _arguments.optimizer(optimizer)
    if unit_of(model) is not None:
        raise ValueError(f"this {type(model).__name__} is already sharded; call fully_shard or shard_model once")
    if experts is not None and not isinstance(experts, Experts):
        raise TypeError(f"experts={experts!r}: must be a flatshard.Experts")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn={shard_placement_fn!r}: must be a function of a parameter")
    if offload_bytes is not None:
        _arguments.whole_number("offload_bytes", offload_bytes, 0)
        if not isinstance(own_policy(choices.get("offload_policy")), CPUOffloadPolicy):
            raise ValueError("offload_bytes: which units are offloaded; give offload_policy=CPUOffloadPolicy() too")
    where: dict[nn.Parameter, Sharding] = {}
    if experts is not None:
        sharding = Sharding(mesh=experts.mesh, apart=experts.apart)
        where = {p: sharding for module in instances(model, experts.modules, "experts") for p in module.parameters()}

    def choose(parameter: nn.Parameter) -> Any:
        found = where.get(parameter)
        if found is None and shard_placement_fn is not None:
            found = shard_placement_fn(parameter)
        return Sharding() if found is None else found

    left = set(where)  # experts that no unit owns yet
    to_offload = math.inf if offload_bytes is None else offload_bytes
    found = unit_modules(model, units)
    tables = _tables(model)
    # Raise for wrong arguments before any unit has been sharded.
    sort_parameters([model], checked_choices(shard_placement_fn=choose, **choices))
    for modules in found:
        held = left & {parameter for module in modules for parameter in module.parameters()}
        by_rows = rows if len(modules) == 1 and modules[0] in tables else False
        if to_offload <= 0:
            choices["offload_policy"] = OffloadPolicy()
        fully_shard(modules, shard_placement_fn=choose, **choices, rows=by_rows)
        unit = unit_of(modules[0])
        assert unit is not None
        to_offload -= sum(group.main.local.nbytes for group in unit.groups)
        if held:
            left -= held
            assert isinstance(modules[0], FSDPModule)
            modules[0].set_reduce_scatter_unused_params(True, recurse=False)
    if optimizer is not None:
        replace_parameters(optimizer)
    table = summary(model)
    _log.info("sharded %s:\n%s", type(model).__name__, table)
    return table


def _tables(model: nn.Module) -> set[nn.Embedding]:
    """Embeddings whose weights are not tied to another module."""
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {each for each in embeddings if all(holders[id(parameter)] == 1 for parameter in each.parameters())}
