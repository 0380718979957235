"""`shard_model`: a whole model in one call."""

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
from flatshard.engine.tree.build import sort_parameters
from flatshard.engine.tree.summary import Summary, summary
from flatshard.engine.units.unit import unit_of
from flatshard.module import FSDPModule
from flatshard.optim.step import repoint
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
    """Call `fully_shard` on the parts of ``model`` that should be units, and on ``model``; ``choices`` go to all calls.

    ``units``: classes, or their import paths (``"package.module.Class"``), whose instances become units. ``"auto"``
    takes what a Hugging Face model names in ``_no_split_modules``, or else the classes of repeated blocks in
    `ModuleList` and `Sequential`; embeddings and linear layers outside them that are a quarter of a block or larger
    become units too, and those that share a parameter one unit together.
    ``optimizer``: one that was built on the model before; it is pointed at the sharded parameters and keeps its state.
    ``experts``: which modules are experts, and the mesh of those that hold the same ones; everything else is sharded
    over ``mesh``, whose ranks all have data. Gradients of experts are means over ``mesh`` too. They are gathered with
    the unit around them, before anything in it waits for tokens. A rank may leave any of them unused: its gradient
    counts as zero there, and is zero, not None, where all ranks do.
    ``shard_placement_fn``: of parameters that are no experts. Where it says nothing, they are cut on dim 0, or on a dim
    that pads less where dim 0 would be padded much.
    ``rows``: units that are one embedding, tied to nothing, are looked up by rows (`fully_shard`).
    ``offload_bytes``: with ``offload_policy=CPUOffloadPolicy()``, offload only as many units as are needed to move so
    many bytes of main weights of each rank to host memory, with their gradients and optimizer state. The last blocks
    are moved first, because their gradients are complete first.

    Returns, and logs, a table of the units.
    """
    _arguments.module("shard_model", model)
    _arguments.optimizer(optimizer)
    if unit_of(model) is not None:
        raise ValueError(f"fully_shard was already called on this {type(model).__name__}; shard a model once")
    if experts is not None and not isinstance(experts, Experts):
        raise TypeError(f"experts={experts!r}: must be a flatshard.Experts")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn={shard_placement_fn!r}: must be a function of a parameter")
    if offload_bytes is not None:
        _arguments.whole_number("offload_bytes", offload_bytes, 0)
        if not isinstance(own_policy(choices.get("offload_policy")), CPUOffloadPolicy):
            raise ValueError("offload_bytes: which units are offloaded; give offload_policy=CPUOffloadPolicy() too")
    where = _expert_shardings(model, experts) if experts is not None else {}

    def choose(parameter: nn.Parameter) -> Any:
        found = where.get(parameter)
        if found is None and shard_placement_fn is not None:
            found = shard_placement_fn(parameter)
        return Sharding() if found is None else found

    left = set(where)  # experts that no unit owns yet
    to_offload = math.inf if offload_bytes is None else offload_bytes
    found = unit_modules(model, units)
    tables = _tables(model)
    # What is wrong with a unit is told before any has been sharded.
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
        repoint(optimizer)
    table = summary(model)
    _log.info("sharded %s:\n%s", type(model).__name__, table)
    return table


def _tables(model: nn.Module) -> set[nn.Embedding]:
    """Embeddings whose weights no other module has."""
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {each for each in embeddings if all(holders[id(parameter)] == 1 for parameter in each.parameters())}


def _expert_shardings(model: nn.Module, experts: Experts) -> dict[nn.Parameter, Sharding]:
    sharding = Sharding(mesh=experts.mesh, apart=experts.apart)
    modules = instances(model, experts.modules, "experts")
    return {parameter: sharding for module in modules for parameter in module.parameters()}
