"""The precision policy of Megatron-FSDP, and what it is for the engine."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any

import torch

from flatshard import policy

HAVE_TE_MXFP8TENSOR = False  # Megatron's tests ask; of Transformer Engine's tensors none is of this kind here


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of main weights, main gradients and what travels in a reduce. Compute is in the model's own dtypes.

    ``main_params_dtype``: None keeps each parameter's own. ``main_grads_dtype``: None keeps that of compute.
    ``grad_comm_dtype``: None is that of main gradients. The older spellings ``preserve_fp32_weights`` (main weights in
    float32) and ``grad_reduce_in_fp32`` (gradients in float32, resting and on the wire) say the same where they are
    given.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    preserve_fp32_weights: InitVar[bool | None] = None
    grad_reduce_in_fp32: InitVar[bool | None] = None

    def __post_init__(self, preserve_fp32_weights: bool | None, grad_reduce_in_fp32: bool | None) -> None:
        if preserve_fp32_weights is not None:
            object.__setattr__(self, "main_params_dtype", torch.float32 if preserve_fp32_weights else None)
        if grad_reduce_in_fp32:
            object.__setattr__(self, "main_grads_dtype", torch.float32)
            object.__setattr__(self, "grad_comm_dtype", torch.float32)
        self.engine()  # checks the dtypes

    def engine(self) -> EnginePolicy:
        """The same for the engine."""
        return EnginePolicy(
            main_dtype=self.main_params_dtype, grad_dtype=self.main_grads_dtype, reduce_dtype=self.grad_comm_dtype
        )


class EnginePolicy(policy.MixedPrecisionPolicy):
    """Defaults are those of Megatron-FSDP: gradients rest in the compute dtype, and travel as they rest."""

    def grad_of(self, main: torch.dtype, compute: torch.dtype) -> torch.dtype:
        return self.grad_dtype or compute

    def reduce_of(self, compute: torch.dtype, grad: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or grad


def engine_policy(given: Any) -> EnginePolicy:
    """What the engine takes for a policy of this surface; None is the default one."""
    given = MixedPrecisionPolicy() if given is None else given
    if not hasattr(given, "engine"):
        raise TypeError(f"mixed_precision_policy={given!r}: must be a MixedPrecisionPolicy of flatshard.megatron")
    found = given.engine()
    assert isinstance(found, EnginePolicy)
    return found


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether TransformerEngine has quantised this tensor."""
    return any(cls.__module__.startswith("transformer_engine") for cls in type(tensor).__mro__)
