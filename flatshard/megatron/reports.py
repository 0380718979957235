"""What a sharded model is made of and how large its parts are, for logs; by functions of a model or as its methods."""

from __future__ import annotations

import logging

from torch import nn

from flatshard.engine.tree.summary import check_buffers, summary
from flatshard.megatron.utils import find_megatron_fsdp, log_single_rank
from flatshard.optim.clip import grad_norms, weight_norms

_log = logging.getLogger("flatshard")


def _inside(model: nn.Module) -> nn.Module:
    """What was wrapped, whose names count."""
    found = find_megatron_fsdp(model)
    return model if found is None else found.get_submodule("module")


def compute_per_param_norms(module: nn.Module) -> dict[str, dict[str, float]]:
    """Norms of weights and gradients over all ranks, by name: ``param_norm``, ``grad_norm``. All ranks call it."""
    weights, gradients = weight_norms(_inside(module)), grad_norms(_inside(module))
    return {name: {"param_norm": norm, "grad_norm": gradients.get(name, 0.0)} for name, norm in weights.items()}


def log_per_param_norms(module: nn.Module, iteration: int | None = None, prefix: str = "") -> None:
    """Log `compute_per_param_norms` on the first rank. All ranks call it."""
    head = " ".join([*([prefix] if prefix else []), *([] if iteration is None else [f"iteration {iteration},"])])
    for name, norms in compute_per_param_norms(module).items():
        told = (f"{head} {name}".strip(), norms["param_norm"], norms["grad_norm"])
        log_single_rank(_log, logging.INFO, "%s: weight %.6g, gradient %.6g", *told)


def log_parameter_groups(module: nn.Module) -> None:
    """Log the table of units and groups on the first rank."""
    log_single_rank(_log, logging.INFO, "parameter groups:\n%s", summary(_inside(module)))


def check_all_fsdp_buffers(module: nn.Module) -> bool:
    """Whether all parameters lie where their layout says, and none overlap; logs what is wrong."""
    try:
        check_buffers(_inside(module))
    except AssertionError as error:
        _log.error("%s", error)
        return False
    return True
