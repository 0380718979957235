"""Frozen parameters that `no_shard` leaves whole in their modules: no group holds them, nothing communicates them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from flatshard.engine.group import Site


@dataclass
class Plain:
    """One such parameter, known by where it is registered: `materialize` and `to_empty` replace it."""

    name: str  # from the unit's module down
    sites: list[Site]

    @property
    def parameter(self) -> nn.Parameter:
        return self.sites[0].get()

    def place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Bring it to the device and the dtype that compute wants."""
        parameter = self.parameter
        if not parameter.is_meta:
            wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            parameter.data = parameter.data.to(device, wanted)
        self.guard()

    def guard(self) -> None:
        """See to it that a gradient of it raises: nothing would average it, and the ranks' copies would part."""
        parameter = self.parameter
        if parameter._post_accumulate_grad_hooks or not parameter.is_floating_point() or parameter.requires_grad:
            return
        parameter.requires_grad_(True)  # a hook can be put only on what needs a gradient
        parameter.register_post_accumulate_grad_hook(functools.partial(_refuse_gradient, self.name))
        parameter.requires_grad_(False)


def _refuse_gradient(name: str, parameter: torch.Tensor) -> None:
    parameter.grad = None
    raise RuntimeError(
        f"parameter '{name}' was marked with no_shard while it was frozen, so nothing averages its gradient over the "
        "ranks; let it need gradients before fully_shard, or keep it frozen"
    )
