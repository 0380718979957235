"""`DistributedDataParallelConfig`, with every field that megatron_fsdp and Megatron-Core have."""

from __future__ import annotations

import logging
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from flatshard.megatron.mixed_precision import MixedPrecisionPolicy
from flatshard.megatron.utils import needs_transformer_engine
from flatshard.policy import SchedulePolicy

_log = logging.getLogger("flatshard")

# Fields that concern buckets have no effect: each unit is communicated as a whole.
_OF_BUCKETS = (
    "bucket_size", "num_buckets", "pad_buckets_for_high_nccl_busbw", "suggested_communication_unit_size",
    "align_param_gather",
)  # fmt: skip
_UNSUPPORTED = {  # and what to do instead
    "param_name_patterns_for_fp32_local_accumulation": "use main_grads_dtype=torch.float32",
    "reduce_scatter_with_fp32_accumulation": "use grad_comm_dtype=torch.float32",
    "check_for_large_grads": "use flatshard.grad_norms",
    "delay_wgrad_compute": "let autograd compute weight gradients, or use flatshard.direct_wgrads",
    "keep_fp8_transpose_cache": "leave it out: each gather makes the transposes",
}


@dataclass
class DistributedDataParallelConfig:
    """The same fields as upstream. `schedule_of` raises for unsupported ones, and warns about those of buckets."""

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    fp4_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    megatron_fsdp_version: int = 1
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        if self.megatron_fsdp_max_pool_double_buffer or self.nccl_ub:
            self.fsdp_double_buffer = True

    def precision(self) -> MixedPrecisionPolicy:
        """The policy of the ``megatron_fsdp_*_dtype`` fields and of their deprecated spellings."""
        main = self.megatron_fsdp_main_params_dtype if self.preserve_fp32_weights else None
        gradients = self.megatron_fsdp_main_grads_dtype, self.megatron_fsdp_grad_comm_dtype
        return MixedPrecisionPolicy(main, *gradients, grad_reduce_in_fp32=self.grad_reduce_in_fp32)


def own_config(given: Any) -> DistributedDataParallelConfig:
    """The same configuration as this class. NotImplementedError if a field that we do not know is set."""
    if isinstance(given, DistributedDataParallelConfig):
        return given
    if not is_dataclass(given) or isinstance(given, type):
        raise TypeError(f"ddp_config={given!r}: must be a DistributedDataParallelConfig")
    fresh, known = type(given)(), DistributedDataParallelConfig.__dataclass_fields__
    others = [name for name, value in vars(given).items() if name not in known and value != getattr(fresh, name, None)]
    if others:
        raise NotImplementedError(f"ddp_config: {', '.join(others)} is not supported; leave it at its default")
    return DistributedDataParallelConfig(**{name: value for name, value in vars(given).items() if name in known})


def schedule_of(config: DistributedDataParallelConfig) -> SchedulePolicy:
    """The engine's schedule for a configuration. Raises if an unsupported field is set."""
    for name, instead in _UNSUPPORTED.items():
        if getattr(config, name):
            raise NotImplementedError(f"{name}={getattr(config, name)} is not supported; {instead}")
    for name in ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"):
        if getattr(config, name):
            needs_transformer_engine(f"{name}=True")
    idle = [name for name in _OF_BUCKETS if getattr(config, name) != getattr(DistributedDataParallelConfig, name)]
    if idle:
        _log.warning("%s: no effect, since units are communicated instead of buckets; leave it out", ", ".join(idle))
    return SchedulePolicy(prefetch=config.overlap_param_gather, async_reduce=config.overlap_grad_reduce)
