"""The API of the first proposal of Megatron-FSDP's second version."""

# ruff: noqa: I001
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import api, policy
from flatshard.megatron.mixed_precision import EnginePolicy
from flatshard.megatron.uneven_dtensor import (
    gather_and_compute_chunk_metadata, preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated, split_dtensor, uneven_dtensor_to_full_tensor,
)  # fmt: skip
from flatshard.megatron.utils import (
    check_all_fsdp_buffers, compute_per_param_norms, initial_values, log_parameter_groups, log_per_param_norms,
    needs_transformer_engine,
)  # fmt: skip
from flatshard.module import FSDPModule

__all__ = [
    "FSDPModule", "FullyShardFP8Policy", "FullyShardMixedPrecisionPolicy", "MixedPrecisionPolicy",
    "check_all_fsdp_buffers", "compute_per_param_norms", "fully_shard", "gather_and_compute_chunk_metadata",
    "log_parameter_groups", "log_per_param_norms", "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated", "split_dtensor", "uneven_dtensor_to_full_tensor",
]  # fmt: skip


@dataclass(frozen=True)
class FullyShardFP8Policy:
    """Quantised parameters of TransformerEngine, which define how they are gathered. ``recipe`` is not used."""

    enabled: bool = False
    recipe: str | None = None
    keep_transpose_cache: bool = False

    def __post_init__(self) -> None:
        if self.enabled:
            needs_transformer_engine("FullyShardFP8Policy(enabled=True)")
        if self.keep_transpose_cache:
            raise NotImplementedError("keep_transpose_cache=True: leave it out, each gather makes the transposes anew")


@dataclass(frozen=True)
class FullyShardMixedPrecisionPolicy:
    """As `flatshard.megatron.MixedPrecisionPolicy`, but main gradients are float32 if ``main_grads_dtype`` is None."""

    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    fp8_param_gather: bool = False
    fp8_recipe: str | None = None
    keep_fp8_transpose_cache: bool = False
    use_decoupled_grad: bool = False
    fp8: FullyShardFP8Policy | None = None

    def __post_init__(self) -> None:
        if self.fp8 is None:
            fields = self.fp8_param_gather, self.fp8_recipe, self.keep_fp8_transpose_cache
            vars(self).update(fp8=FullyShardFP8Policy(*fields))

    def engine(self) -> EnginePolicy:
        grads = self.main_grads_dtype or torch.float32
        return EnginePolicy(main_dtype=self.main_params_dtype, grad_dtype=grads, reduce_dtype=self.grad_comm_dtype)


MixedPrecisionPolicy = FullyShardMixedPrecisionPolicy


def fully_shard(
    module: nn.Module, mesh: DeviceMesh | None = None, *, reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: FullyShardMixedPrecisionPolicy | None = None, offload_policy: policy.OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None, enable_unshard_prefetch: bool = True,
    enable_async_reduce_grad: bool = True, gradient_scaling_factor: float | None = None,
    enable_trace_pool: bool = False, sharding_strategy: Any = "optim_grads_params",
) -> nn.Module:  # fmt: skip
    """`flatshard.fully_shard` with other argument names. It returns ``module``.

    Gradients are ``gradient_scaling_factor`` times the sum over ranks; None: the mean.
    ``enable_trace_pool`` has no effect: the memory of gathered weights is always reused.
    """
    chosen = FullyShardMixedPrecisionPolicy() if mp_policy is None else mp_policy
    sharded: Any = api.fully_shard(
        module, mesh=mesh, reshard_after_forward=reshard_after_forward, shard_placement_fn=shard_placement_fn,
        offload_policy=offload_policy, ignored_params=ignored_params, strategy=sharding_strategy,
        mp_policy=chosen.engine(), values=initial_values(),
        gradient_scale="mean" if gradient_scaling_factor is None else gradient_scaling_factor,
        schedule=policy.SchedulePolicy(prefetch=enable_unshard_prefetch, async_reduce=enable_async_reduce_grad),
    )  # fmt: skip
    if chosen.use_decoupled_grad:
        sharded.set_decoupled_gradients(recurse=False)
    return module
