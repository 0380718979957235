"""The mixed-precision policy of Megatron-FSDP."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any

import torch

from flatshard import policy

HAVE_TE_MXFP8TENSOR = False  # Megatron's tests read it; these tensors of TransformerEngine are not supported


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of main weights, of main gradients and of reduces. Compute weights have the model's own dtypes.

    None for ``main_params_dtype``: the dtype of each parameter; for ``main_grads_dtype``: that of compute weights; for
    ``grad_comm_dtype``: that of main gradients. Deprecated spellings are ``preserve_fp32_weights`` (float32 main
    weights) and ``grad_reduce_in_fp32`` (float32 main gradients and reduces).
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    preserve_fp32_weights: InitVar[bool | None] = None
    grad_reduce_in_fp32: InitVar[bool | None] = None

    def __post_init__(self, preserve_fp32_weights: bool | None, grad_reduce_in_fp32: bool | None) -> None:
        if preserve_fp32_weights is not None:
            vars(self).update(main_params_dtype=torch.float32 if preserve_fp32_weights else None)
        if grad_reduce_in_fp32:
            vars(self).update(main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
        self.engine()  # checks the dtypes

    def engine(self) -> EnginePolicy:
        return EnginePolicy(
            main_dtype=self.main_params_dtype, grad_dtype=self.main_grads_dtype, reduce_dtype=self.grad_comm_dtype
        )


class EnginePolicy(policy.MixedPrecisionPolicy):
    """The engine's policy with defaults of Megatron-FSDP: main gradients and reduces are in the compute dtype."""

    def grad_of(self, main: torch.dtype, compute: torch.dtype) -> torch.dtype:
        return self.grad_dtype or compute

    def reduce_of(self, compute: torch.dtype, grad: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or grad


def engine_policy(given: Any) -> EnginePolicy:
    """The engine's policy for a policy of this surface; None is the default one."""
    given = MixedPrecisionPolicy() if given is None else given
    if not hasattr(given, "engine"):
        raise TypeError(f"mixed_precision_policy={given!r}: must be a MixedPrecisionPolicy of flatshard.megatron")
    policy: EnginePolicy = given.engine()
    return policy


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class of TransformerEngine, which are its quantised ones."""
    return any(cls.__module__.startswith("transformer_engine") for cls in type(tensor).__mro__)
