"""`MegatronFSDP`: a sharded model with the methods that Megatron's training loops call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from flatshard import _torch
from flatshard.api import fully_shard, microbatch
from flatshard.buffer import broadcast
from flatshard.engine import steps
from flatshard.engine.gradients.main_grads import DECOUPLED, MainGrads
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.materialize import materialize
from flatshard.megatron import utils
from flatshard.megatron.distributed_data_parallel_config import DistributedDataParallelConfig, own_config, schedule_of
from flatshard.megatron.mixed_precision import MixedPrecisionPolicy, engine_policy
from flatshard.megatron.param_and_grad_buffer import ParamAndGradBuffer
from flatshard.megatron.utils import FSDPDistributedIndex
from flatshard.module import FSDPModule
from flatshard.optim.clip import find_nonfinite

# Arguments that are also fields of ``ddp_config``.
ALSO_IN_CONFIG = (
    "keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
)  # fmt: skip


def _of_root(method: str, doc: str, **choices: Any) -> Callable[..., None]:
    """A method that calls another one of the root, which is an `FSDPModule`."""

    def call(self: MegatronFSDP, *unused: Any) -> None:
        getattr(self._root, method)(**choices)

    call.__doc__ = doc
    return call


@contextmanager
def _temporarily(change: Callable[[Any], None], now: Any, then: Any) -> Iterator[None]:
    change(now)
    try:
        yield
    finally:
        change(then)


class MegatronFSDP(nn.Module):
    """A wrapper that shards ``module`` in place. The names of its parameters begin with ``module.``.

    With ``sync_model_each_microbatch``, gradients are complete after every backward. Otherwise backwards in `no_sync`
    reduce them over the axes that shard gradients, and `finish_grad_sync`, which the optimizer's step calls, completes
    them. ``ddp_config`` may be Megatron-Core's. Its fields are the precision if no policy is given.
    """

    def __init__(
        self, module: nn.Module, dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy | None = None,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None, disable_bucketing: bool = False,
        device: torch.device | None = None, calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False, sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False, nccl_ub: bool = False, fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False, disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: tuple[type[nn.Module], ...] | None = None,
        report_nan_in_param_grad: bool = False, *, layout: Any = "tensor",
    ) -> None:  # fmt: skip
        given = locals()
        flags: dict[str, Any] = {name: given[name] for name in ALSO_IN_CONFIG}
        super().__init__()
        if ddp_config is None:
            flags.update(overlap_grad_reduce=True, overlap_param_gather=True)
            ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params", **flags)
        elif any(flags.values()):
            raise ValueError(f"{', '.join(name for name, on in flags.items() if on)}: ask for it in ddp_config")
        if fine_grained_recurse_module_types:
            units = "every module with parameters is a fine-grained unit"
            raise NotImplementedError(f"fine_grained_recurse_module_types is not supported: {units}; leave it out")
        self.ddp_config = ddp_config = own_config(ddp_config)
        self.dist_index = dist_index
        self.mp_policy = ddp_config.precision() if mixed_precision_policy is None else mixed_precision_policy
        self.calculate_per_token_loss = calculate_per_token_loss
        self.report_nan_in_param_grad = report_nan_in_param_grad or ddp_config.check_for_nan_in_grad
        self.microbatch_count = 0
        self._steps = steps.taken()
        if device is not None:
            if torch.device(device).type != dist_index.device_mesh.device_type:
                raise ValueError(f"device={device}: the mesh is on {dist_index.device_mesh.device_type}; leave it out")
            if not init_model_with_meta_device:
                module.to(device)
        fine = enable_fine_grained_param_gather_hook or enable_fine_grained_param_gather_backward_hook
        fine = fine or ddp_config.megatron_fsdp_enable_fine_grained_param_gather
        self._shard(module, fsdp_unit_modules, fine, disable_bucketing, layout)
        if init_model_with_meta_device:
            materialize(module)
        elif dist_index.device_mesh.device_type != "cpu":
            torch.accelerator.empty_cache()  # the memory of the full weights, which may be too fragmented to reuse
        self.module = module
        self.param_and_grad_buffer = ParamAndGradBuffer(self)
        if ddp_config.nccl_ub and not ddp_config.fsdp_manual_registration:
            self.param_and_grad_buffer.manual_buffer_registration()
        if ddp_config.megatron_fsdp_use_decoupled_grad:
            self._root.set_decoupled_gradients()
        me = weakref.proxy(self)  # a reference would keep the model alive as long as one of its parameters
        for parameter in module.parameters():
            parameter.__dict__.update(__fsdp_param__=True, _megatron_fsdp_model=me, megatron_fsdp_dist_index=dist_index)
        for group in (group for _, unit in units_below(module) for group in unit.groups):
            held = group.main.held
            for param, slot in zip(group.params, group.layout.slots):
                first, count = group.layout.rows(slot, held.first, held.count)
                if count * slot.row:  # the elements of a parameter on this rank
                    where = slice(first * slot.row, (first + count) * slot.row)
                    param.sharded.__dict__["megatron_fsdp_slice"] = where
        self._hides_gradients = False
        self._is_last = self._completes_gradients = True
        self.set_model_auto_sync(sync_model_each_microbatch)
        self.log_parameter_groups()

    def _shard(self, module: nn.Module, classes: Any, fine_grained: bool, single: bool, layout: Any) -> None:
        index, config = self.dist_index, self.ddp_config
        if config.nccl_ub:
            utils.register_memory(None, index.dp_mesh)  # raises before anything is changed
        strategy: Any = config.data_parallel_sharding_strategy
        if not classes and strategy in (3, "optim_grads_params"):
            if config.outer_dp_sharding_strategy in (1, "optim"):
                reason = "without it, parameters are replicated, as in Megatron-FSDP"
                raise ValueError(f"outer_dp_sharding_strategy='optim' needs fsdp_unit_modules: {reason}")
            strategy = "no_shard"  # as in Megatron-FSDP: without units, parameters are replicated
        choices = {"layout": layout, "strategy": strategy, "values": utils.initial_values()}
        choices |= {"mp_policy": engine_policy(self.mp_policy), "schedule": schedule_of(config)}
        planned = utils.plan_units(module, classes, fine_grained=fine_grained, single=single)
        units = [(modules, expert, index.mesh_of(expert)) for modules, expert in [*planned, ([module], False)]]
        meshes, given = {expert: mesh for _, expert, mesh in units}, (index.fsdp_group_ag, index.expt_fsdp_group_ag)
        # Used at the first forward, and not earlier: a model on the meta device has its values by then.
        self._gather_groups: list[Any] = [(given[e], mesh) for e, mesh in meshes.items() if given[e] is not None]
        utils.distribute_marked(module, index)
        for modules, expert, mesh in units:
            scale: Any = "sum" if self.calculate_per_token_loss else "mean"
            data = index.dp_mesh if expert and scale == "mean" else None  # experts get tokens of all these ranks
            outer: Any = config.outer_dp_sharding_strategy if mesh.ndim == 2 else None
            fully_shard(modules, mesh=mesh, outer_strategy=outer, gradient_scale=scale, data_mesh=data, **choices)
            for each in modules if expert else ():
                assert isinstance(each, FSDPModule)
                each.set_reduce_scatter_unused_params(True)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        while self._gather_groups:
            self._root.set_gather_group(*self._gather_groups.pop())
        with ExitStack() as around:
            if _torch.profiling():
                around.enter_context(torch.profiler.record_function("CustomFSDP.forward"))
            if self.model_auto_sync or self.microbatch_count == 0 or self._steps != steps.taken():
                self.microbatch_count = 0
                self._hide_gradients()
            else:  # compute weights do not change within a step
                around.enter_context(microbatch(self.module, is_first=False, is_last=False))
            output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.microbatch_count += 1
            self._steps = steps.taken()
        return output

    # Synchronisation of gradients

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last one before an optimizer step."""
        return self._is_last

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._is_last = value
        completes = value or self.model_auto_sync
        if completes != self._completes_gradients:
            self._completes_gradients = completes
            self._root.set_requires_all_reduce(completes)
            self._root.set_is_last_backward(completes)

    def no_sync(self) -> AbstractContextManager[None]:
        """For backwards of micro-batches that are not the last. No effect with ``sync_model_each_microbatch``."""
        return _temporarily(functools.partial(setattr, self, "is_last_microbatch"), False, True)

    def sync(self) -> AbstractContextManager[None]:
        """Within it, gradients are complete after every backward."""
        return _temporarily(self.set_model_auto_sync, True, False)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Set whether gradients are complete after every backward, in spite of `no_sync`."""
        self.model_auto_sync = sync_model
        self.is_last_microbatch = self._is_last
        if sync_model:
            self.attach_grad_to_optimizer_state()

    start_grad_sync = _of_root("sync_gradients", "Start the reduces that backwards have left undone.", wait=False)
    synchronize_gradient_reduce = _of_root("sync_gradients", "Do the reduces that backwards have left undone.")

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete the gradients and reshard all units, so that any optimizer can step.

        Gradients are cast to the dtype of main weights, unless they are decoupled or ``cuda_graph_mode`` is on.
        """
        self.complete_gradients()
        config = self.ddp_config
        if config.megatron_fsdp_use_decoupled_grad or config.megatron_fsdp_cuda_graph_mode:
            return
        for parameter in self.module.parameters():
            grad = parameter.grad
            if grad is not None and grad.dtype != parameter.dtype:
                parameter.grad = None
                _torch.allow_grad_of(parameter, parameter.dtype)
                parameter.grad = grad.to(parameter.dtype)

    def complete_gradients(self) -> None:
        """`finish_grad_sync` without casts, for optimizers of `fully_shard_optimizer`."""
        self.synchronize_gradient_reduce()
        self.attach_grad_to_optimizer_state()
        if self.report_nan_in_param_grad:
            self.check_for_nan()
        self._replace_param_with_distributed_if_needed()
        self.microbatch_count = 0

    def attach_grad_to_optimizer_state(self) -> None:
        """Set ``.grad`` of the parameters, which is None before if micro-batches are not synchronised."""
        for each in self._main_grads() if self._hides_gradients else ():
            each.unhide()
        self._hides_gradients = False

    def _hide_gradients(self) -> None:
        """Keep ``.grad`` None until gradients are complete, unless some parameter has a gradient already."""
        if self.model_auto_sync or self._hides_gradients or self._gradients():
            return
        for each in self._main_grads():
            each.hide()
        self._hides_gradients = True

    def _main_grads(self) -> list[MainGrads]:
        return [group.gradients.main_grads for _, unit in units_below(self.module) for group in unit.groups]

    def check_for_nan(self) -> None:
        """Raise RuntimeError on all ranks if a gradient is not finite, with the names of parameters and the ranks."""
        nonfinite = find_nonfinite(self.module)
        if nonfinite:
            listed = ", ".join(f"'{name}' (rank {rank})" for name, rank in nonfinite[:8])
            raise RuntimeError(f"gradients are not finite: {listed}{' and more' if len(nonfinite) > 8 else ''}")

    # Gradients

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients. Those that are not reduced yet are reduced first."""
        if not isinstance(scaling_factor, (int, float, torch.Tensor)):
            raise TypeError(f"scaling_factor={scaling_factor!r}: must be a number")
        self.synchronize_gradient_reduce()
        if grads := self._gradients():
            torch._foreach_mul_([_torch.held_of(grad) for grad in grads], scaling_factor)

    def zero_grad_buffer(self, set_to_none: bool = True) -> None:
        """Drop all gradients, unreduced ones too. In ``cuda_graph_mode`` they are zeroed in place."""
        self._root.zero_grad(set_to_none and not self.ddp_config.megatron_fsdp_cuda_graph_mode)
        self.microbatch_count = 0

    def _gradients(self) -> list[torch.Tensor]:
        if self._hides_gradients:
            return [grad for each in self._main_grads() for grad in each.kept or () if grad is not None]
        name = DECOUPLED if self.ddp_config.megatron_fsdp_use_decoupled_grad else "grad"
        return [grad for parameter in self.parameters() if (grad := getattr(parameter, name, None)) is not None]

    # Weights

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Update compute weights and all-gather all units.

        With ``overlap_param_gather``, unless ``force_sync``, only start that of the root: the forward prefetches more.
        """
        self._root.refresh_weights()
        if force_sync or not self.ddp_config.overlap_param_gather:
            self._root.unshard_all()
        elif self.ddp_config.fsdp_all_gather_in_start_param_sync or force_dispatch:
            self._root.unshard(async_op=True)

    synchronize_param_gather = _of_root("reshard_all", "Reshard all units: modules have sharded parameters.")
    _replace_param_with_distributed_if_needed = synchronize_param_gather
    install_optimized_model_weights = _of_root("refresh_weights", "Update compute weights from main weights.")

    def all_gather_and_wait_parameters_ready(
        self, params: Iterable[nn.Parameter], prefetch: bool = True, prefetch_order: Any = None,
        wait_bucket_ready: bool = True, bwd: bool = False,
    ) -> None:  # fmt: skip
        """All-gather the units of these parameters and, if ``wait_bucket_ready``, wait for the full parameters."""
        wanted = {id(parameter) for parameter in params}
        for unit in [unit for unit in self.module.modules() if isinstance(unit, FSDPModule)]:
            if any(id(parameter) in wanted for parameter in unit.own_parameters()):
                unit.unshard(async_op=not wait_bucket_ready)

    def broadcast_params(self) -> None:
        """Broadcast shards that several ranks hold from the first of these ranks. All ranks call it."""
        for parameter in (p for p in self.parameters() if isinstance(p, DTensor) and p.to_local().numel()):
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                if isinstance(placement, Replicate) and mesh.size(axis) > 1:
                    broadcast(mesh.get_group(axis), parameter.to_local().detach()).wait()
        self._root.refresh_weights()

    def _replace_param_with_raw_if_needed(self) -> None:
        """Not needed: a forward sets full parameters."""

    # Norms, checkpoints, precision

    compute_per_param_norms = _compute_per_param_norms = utils.compute_per_param_norms
    log_per_param_norms = _log_per_param_norms = utils.log_per_param_norms
    log_parameter_groups = _log_parameter_groups = utils.log_parameter_groups
    check_all_fsdp_buffers = utils.check_all_fsdp_buffers

    state_dict_for_save_checkpoint = nn.Module.state_dict

    def get_distributed_index(self) -> FSDPDistributedIndex:
        return self.dist_index

    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> AbstractContextManager[None]:
        """Within it, `reset_mixed_precision_policy` is in effect."""
        return _temporarily(self.reset_mixed_precision_policy, mixed_precision_policy, self.mp_policy)

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Use the ``grad_comm_dtype`` of another policy from now on. Main weights and gradients keep their dtypes."""
        engine_policy(mixed_precision_policy)  # raises unless it is a policy
        policy = replace(self.mp_policy, grad_comm_dtype=mixed_precision_policy.grad_comm_dtype)
        self._root.set_mp_policy(engine_policy(policy))
        self.mp_policy = policy
