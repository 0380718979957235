"""`shard_model`: a whole model in one call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from flatshard.api import fully_shard
from flatshard.engine.roots import unit_of
from flatshard.engine.summary import Summary, summary
from flatshard.optim.step import repoint
from flatshard.wrapping import unit_modules

_log = logging.getLogger("flatshard")


def shard_model(
    model: nn.Module,
    *,
    units: Literal["auto"] | Sequence[type[nn.Module] | str] = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    **choices: Any,
) -> Summary:
    """Call `fully_shard` on the parts of ``model`` that should be units, and on ``model``; ``choices`` go to all calls.

    ``units``: classes, or their import paths (``"package.module.Class"``), whose instances become units. ``"auto"``
    takes what a Hugging Face model names in ``_no_split_modules``, or else the classes of repeated blocks in
    `ModuleList` and `Sequential`; embeddings and linear layers outside them that are a quarter of a block or larger
    become units too, and those that share a parameter one unit together.
    ``optimizer``: one that was built on the model before; it is pointed at the sharded parameters and keeps its state.

    Returns, and logs, a table of the units.
    """
    if unit_of(model) is not None:
        raise ValueError(f"fully_shard was already called on this {type(model).__name__}; shard a model once")
    for modules in unit_modules(model, units):
        fully_shard(modules, **choices)
    if optimizer is not None:
        repoint(optimizer)
    table = summary(model)
    _log.info("sharded %s:\n%s", type(model).__name__, table)
    return table
