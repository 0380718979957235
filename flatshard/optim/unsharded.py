"""Parameters that were put into a sharded model after `fully_shard`: adapters, a new head, larger embeddings.

No unit owns them, so every rank trains a copy of its own on its own data. FSDP2 does the same without saying so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch

from flatshard.engine.groups.registry import OWNER, groups
from flatshard.engine.tree.parameters import IGNORED, NO_SHARD, owned_modules
from flatshard.engine.units.unit import unit_with


def warn_of_unsharded(parameters: Iterable[torch.Tensor]) -> None:
    """Warn if some of an optimizer's parameters are in modules of a unit, but were not there when it was made."""
    known = (OWNER, IGNORED, NO_SHARD)
    plain = {id(p): p for p in parameters if p.requires_grad and p.__dict__.keys().isdisjoint(known)}
    names = list(_names_of(plain)) if plain else []
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"an optimizer steps parameters that were put into a sharded model after fully_shard: {names[0]}{more}. "
            "They are not sharded and their gradients are not averaged over the ranks, so each rank trains its own "
            "copy. Put new modules into the model before fully_shard, or call fully_shard on them too; then build the "
            "optimizer",
            stacklevel=2,
        )


def _names_of(wanted: dict[int, torch.Tensor]) -> Iterator[str]:
    """Names, for errors, of those of the wanted parameters that are in modules of units."""
    units = {unit_with(group) for group in groups() if group.mesh.size() > 1}
    for unit in sorted((each for each in units if each is not None), key=lambda each: each.number):
        for prefix, module in owned_modules(unit.modules):
            for name, parameter in module._parameters.items():
                if wanted.pop(id(parameter), None) is not None:
                    inside = f"{prefix}.{name}" if prefix else name
                    yield f"parameter '{inside}' of unit '{unit.name}'"
