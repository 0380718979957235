"""`fully_shard_model`, `fully_shard_optimizer` and `fully_shard` of Megatron-FSDP's first version."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from flatshard import _arguments
from flatshard.api import default_mesh
from flatshard.megatron.distributed_data_parallel_config import DistributedDataParallelConfig
from flatshard.megatron.megatron_fsdp import ALSO_IN_CONFIG, MegatronFSDP
from flatshard.megatron.mixed_precision import MixedPrecisionPolicy
from flatshard.megatron.utils import FSDPDistributedIndex
from flatshard.optim import step as local_step
from flatshard.optim.refusals import original_class
from flatshard.optim.step import replace_parameters
from flatshard.policy import strategy_name

# The values of ``zero_dp_strategy``, which may also be the names in lower case.
ShardingStrategy = IntEnum("ShardingStrategy", ["NO_SHARD", "OPTIM", "OPTIM_GRADS", "OPTIM_GRADS_PARAMS"], start=0)

# Arguments of `fully_shard_model` and their names in `DistributedDataParallelConfig` or `MegatronFSDP`.
_RENAMED = {
    "enable_fine_grained_param_gather": "enable_fine_grained_param_gather_hook",
    "use_decoupled_grad": "megatron_fsdp_use_decoupled_grad",
    "cuda_graph_mode": "megatron_fsdp_cuda_graph_mode",
    "maxpool_double_buffer": "megatron_fsdp_max_pool_double_buffer",
}


def fully_shard_model(
    module: nn.Module, device_mesh: DeviceMesh | None = None, dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None, tp_dim: str | None = None, hybrid_fsdp_group: ProcessGroup | None = None,
    hybrid_fsdp_expt_group: ProcessGroup | None = None, expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: ProcessGroup | None = None, expt_fsdp_group_ag: ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None, zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0, device: torch.device | None = None,
    init_model_with_meta_device: bool = False, mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    overlap_grad_reduce: bool = True, overlap_param_gather: bool = True, sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True, report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False, disable_bucketing: bool = False, calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False, nccl_ub: bool = False, fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False, disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False, use_decoupled_grad: bool = False, cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False, *, layout: Any = "tensor", preserve_fp32_weights: bool | None = None,
    grad_reduce_in_fp32: bool | None = None,
) -> MegatronFSDP:  # fmt: skip
    """Shard ``module`` in place, and return it in a `MegatronFSDP`. docs/from-megatron-fsdp.md has every argument.

    ``layout`` is flatshard's: ``"tensor"`` shards each parameter as torch.chunk does, ``"flat"`` packs those of a unit
    into one buffer, so that shards are uneven. ``preserve_fp32_weights`` and ``grad_reduce_in_fp32`` are deprecated:
    set them in the policy.
    """
    given: dict[str, Any] = dict(locals())
    _arguments.module("fully_shard_model", module)
    inner = strategy_name("zero_dp_strategy", zero_dp_strategy)
    outer = strategy_name("outer_dp_sharding_strategy", outer_dp_sharding_strategy)
    if device_mesh is None:
        if dp_outer_dim is not None or hybrid_fsdp_group is not None:
            raise ValueError("device_mesh=None: dp_outer_dim and hybrid_fsdp_group need a device_mesh")
        dp_shard_dim, tp_dim = dp_shard_dim or "fsdp", tp_dim or "tp"
        given.update(device_mesh=default_mesh((dp_shard_dim, tp_dim)), dp_shard_dim=dp_shard_dim, tp_dim=tp_dim)
    if outer != "no_shard" and dp_outer_dim is None:
        raise ValueError(f"outer_dp_sharding_strategy={outer!r} needs dp_outer_dim, the name of the outer axis")
    names = ("preserve_fp32_weights", "grad_reduce_in_fp32")
    deprecated = {name: value for name in names if (value := given.pop(name)) is not None}
    if deprecated:
        given["mixed_precision_policy"] = replace(mixed_precision_policy, **deprecated)
    given.update(data_parallel_sharding_strategy=inner, outer_dp_sharding_strategy=outer)
    given.update({new: given[name] for name, new in _RENAMED.items()}, hsdp_outer_dp_shard=outer == "optim")
    index = FSDPDistributedIndex(**_taken_by(FSDPDistributedIndex, given))
    config = DistributedDataParallelConfig(**_taken_by(DistributedDataParallelConfig, given))
    others = {name: value for name, value in _taken_by(MegatronFSDP, given).items() if name not in ALSO_IN_CONFIG}
    model = MegatronFSDP(dist_index=index, ddp_config=config, **others)
    if preproc_state_dict_for_dcp_ckpt and inner != "no_shard":
        model.register_state_dict_post_hook(_without_extra_state)  # type: ignore[no-untyped-call]
    return model


def _taken_by(made: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The items of ``given`` that are arguments of a class."""
    return {name: given[name] for name in inspect.signature(made).parameters if name in given}


def _without_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Drop the extra state of TransformerEngine, which torch.distributed.checkpoint cannot save."""
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


def fully_shard_optimizer(optimizer: Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True) -> Optimizer:
    """`flatshard.fully_shard_optimizer` for parameters of a `MegatronFSDP`. It returns the same optimizer.

    ``step`` gets the arguments ``sync_grad_before_optimizer_step`` (complete the gradients before the step) and
    ``install_optimized_model_weights`` (False: the model keeps its compute weights until
    `MegatronFSDP.install_optimized_model_weights`); ``zero_grad`` gets ``zero_grad_buffer``. With
    ``preproc_state_dict_for_dcp_ckpt``, the state dict of an optimizer that has not stepped yet has tensors for
    torch.distributed.checkpoint to load into. The optimizer itself is not changed by that.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = (getattr(parameter, "_megatron_fsdp_model", None) for parameter in parameters)
    models: list[MegatronFSDP] = list({id(model.module): model for model in owners if model is not None}.values())
    if not models:
        missing = f"no parameter of this {type(optimizer).__name__} belongs to a model of fully_shard_model"
        raise ValueError(f"{missing}; build the optimizer on the parameters of the model that it returns")
    if not any(model.ddp_config.megatron_fsdp_use_decoupled_grad for model in models):
        local_step.fully_shard_optimizer(optimizer)
    cls = type(optimizer)
    base = optimizer.__dict__.pop("step", cls.step)  # a learning-rate scheduler may have wrapped it

    def step(
        self: Optimizer, *args: Any, sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        for model in models:
            if sync_grad_before_optimizer_step and not model.model_auto_sync:
                model.complete_gradients()
            elif model.report_nan_in_param_grad:
                model.check_for_nan()
            if not install_optimized_model_weights:
                model._root.hold_weights()
        result = base(self, *args, **kwargs) if base is cls.step else base(*args, **kwargs)
        for model in models:
            model.microbatch_count = 0
            if install_optimized_model_weights:
                model.install_optimized_model_weights()
        return result

    def zero_grad(self: Optimizer, set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        keep = any(model.ddp_config.megatron_fsdp_cuda_graph_mode for model in models)
        cls.zero_grad(self, set_to_none and not keep)
        for model in models if zero_grad_buffer else ():
            model.zero_grad_buffer(set_to_none)

    optimizer.step = _Method(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = _Method(zero_grad, optimizer)  # type: ignore[method-assign]
    if preproc_state_dict_for_dcp_ckpt:
        optimizer.register_state_dict_post_hook(_with_state)
    return optimizer


class _Method:
    """A bound method without a reference cycle. Learning-rate schedulers read ``__func__``."""

    def __init__(self, function: Callable[..., Any], optimizer: Optimizer) -> None:
        self.__func__, self._optimizer = function, weakref.ref(optimizer)
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._optimizer(), *args, **kwargs)


def _with_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Fill the state dict of an optimizer that has not stepped with the state from before the first step."""
    if state_dict["state"]:
        return
    state_of_one = functools.cache(functools.partial(_state_of_one, optimizer))
    parameters = [(at, each) for at, group in enumerate(optimizer.param_groups) for each in group["params"]]
    for number, (at, parameter) in enumerate(parameters):
        state = state_dict["state"][number] = copy.deepcopy(state_of_one(at, parameter.dtype, parameter.device))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = torch.full_like(parameter, value.item(), dtype=value.dtype, requires_grad=False)


def _state_of_one(optimizer: Optimizer, group: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The state before the first step of a parameter of one element in ``param_groups[group]``."""
    cls: Any = original_class(optimizer)
    probe = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    probe.grad = torch.zeros_like(probe)
    scratch: Any = cls.__new__(cls)
    own = {"step", "zero_grad", "state", "param_groups"}
    scratch.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in own})
    scratch.__dict__.update({key: OrderedDict() for key in scratch.__dict__ if key.endswith("_hooks")})
    scratch.state, scratch.param_groups = defaultdict(dict), [{**optimizer.param_groups[group], "params": [probe]}]
    cls.step(scratch)
    state = dict(scratch.state[probe])
    count = state.get("step")
    if count is not None:
        state["step"] = torch.zeros_like(count) if isinstance(count, torch.Tensor) else 0
    return state


def fully_shard(module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[MegatronFSDP, Optimizer]:
    """`fully_shard_model`, with all of its arguments, and `fully_shard_optimizer`.

    ``optimizer`` was built on ``module`` before this call. It keeps its parameter groups and its state.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    given = _SIGNATURE.bind(module, *args, **kwargs).arguments
    model = fully_shard_model(module, *args, **kwargs)
    replace_parameters(optimizer)
    return model, fully_shard_optimizer(optimizer, given.get("preproc_state_dict_for_dcp_ckpt", True))


_SIGNATURE = inspect.signature(fully_shard_model)
_first, *_rest = _SIGNATURE.parameters.values()
fully_shard.__signature__ = inspect.signature(fully_shard).replace(  # type: ignore[attr-defined]
    parameters=[_first, inspect.signature(fully_shard).parameters["optimizer"], *_rest]
)
