"""``model.param_and_grad_buffer``: a view of the engine's buffers, with the names that other code uses."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _torch
from flatshard.buffer import Pool, broadcast
from flatshard.buffer.dtensor import Parallel, composed
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.layout import is_sharded
from flatshard.megatron import utils
from flatshard.megatron.experimental.parameter_group import ParameterGroup
from flatshard.megatron.uneven_dtensor import update_uneven_dtensor_chunk_metadata, validate_uneven_dtensor
from flatshard.module import FSDPModule

_OF_MODEL = {  # attributes, and their names in the model
    "zero_grad": "zero_grad_buffer",
    "scale_gradients": "scale_gradients",
    "copy_main_weights_to_model_weights": "install_optimized_model_weights",
    "update_main_grads": "attach_grad_to_optimizer_state",
    **{name: name for name in ("ddp_config", "dist_index", "mp_policy")},
}


@dataclass(frozen=True, eq=False)
class TemporaryBucketAllocator:
    """The allocator of gathered weights, or of gradients in flight: a pool of the engine."""

    _model: Any  # a proxy
    _name: str

    @property
    def pool(self) -> Pool | None:
        """None before the first forward."""
        unit = unit_of(self._model.module)
        return None if unit is None or unit.root is None else getattr(unit.root, self._name)


# They do not differ: the class of an allocator shows which one the configuration asked for.
StorageResizeBasedBucketAllocator = type("StorageResizeBasedBucketAllocator", (TemporaryBucketAllocator,), {})
FixedPoolAllocator = type("FixedPoolAllocator", (TemporaryBucketAllocator,), {})
MaxPoolAllocator = type("MaxPoolAllocator", (TemporaryBucketAllocator,), {})


class ParamAndGradBuffer:
    """The parameters and gradients of a `MegatronFSDP`. ReferenceError if the model has been deleted."""

    def __init__(self, model: Any) -> None:
        self._model, config = weakref.proxy(model), model.ddp_config
        self.use_decoupled_grad = config.megatron_fsdp_use_decoupled_grad
        kind = FixedPoolAllocator if config.fsdp_double_buffer else StorageResizeBasedBucketAllocator
        kind = MaxPoolAllocator if config.megatron_fsdp_max_pool_double_buffer else kind
        self.weight_alloc = self.transpose_weight_alloc = kind(self._model, "gather_pool")
        self.main_grad_alloc = kind(self._model, "reduce_pool")

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The sharded parameters with their names in the module."""
        self._model._replace_param_with_distributed_if_needed()
        return list(self._model.module.named_parameters())

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """The parameter groups of all units, outer units first."""
        root = self._model.module
        return [
            ParameterGroup(root.get_submodule(name), unit, group, number or None)
            for number, (name, unit) in enumerate(units_below(root))
            for group in unit.groups
        ]

    num_buckets = property(lambda self: len(self.parameter_groups))

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_MODEL:
            raise AttributeError(f"{name}: flatshard.megatron's param_and_grad_buffer does not have this attribute")
        return getattr(self._model, _OF_MODEL[name])

    def all_gather_parameters(self, async_op: bool = True) -> None:
        """Update replicated compute weights from main weights. RuntimeError if compute weights are sharded."""
        if any(is_sharded(p) for group in self.parameter_groups for p in group.engine.placements.parameter):
            raise RuntimeError("all_gather_parameters: compute weights are sharded; use the model's start_param_sync()")
        self._model.install_optimized_model_weights()

    def reduce_scatter_gradients(self, async_op: bool = True) -> None:
        """Do the reduces that backwards have left undone, all-reduces too."""
        self._model.synchronize_gradient_reduce()

    all_reduce_gradients = reduce_scatter_gradients

    def manual_buffer_registration(self) -> None:
        """Communicate from memory that is registered with NCCL from now on. Call it once."""
        symmetric = not self.ddp_config.disable_symmetric_registration
        for module in self._model.module.modules():
            if isinstance(module, FSDPModule):
                utils.register_memory(module, self.dist_index.dp_mesh, symmetric)


def make_fsdp_dtensor(
    local_tensor: torch.Tensor, param: torch.Tensor, dist_index: utils.FSDPDistributedIndex,
    is_sharded_param: bool = True, is_expert_param: bool = False, run_check: bool = False,
    update_uneven_dtensor_chunk_meta: bool = False, force_sync_tp_duplicated_param: bool = False,
) -> DTensor:  # fmt: skip
    """A DTensor over data-parallel and tensor-parallel meshes, of this rank's rows (all, unless ``is_sharded_param``).

    ``param`` has the shape and the marks of the parameter before data parallelism; it may be a DTensor of tensor
    parallelism. ``run_check``: `validate_uneven_dtensor`. ``force_sync_tp_duplicated_param``: if every tensor-parallel
    rank has all of the parameter, broadcast it from the first of them.
    """
    part = _torch.held_of(param)
    if not is_sharded_param and local_tensor.numel() != part.numel():
        actual = f"has {local_tensor.numel()} elements; the parameter has shape {tuple(part.shape)}"
        raise ValueError(f"local_tensor {actual}, and is_sharded_param=False says that it is not sharded")
    mesh, outer = dist_index.mesh_of(is_expert_param), dist_index.hsdp_outer_dp_shard
    made = param if isinstance(param, DTensor) else None
    if made is None and utils.using_tensor_parallel(dist_index, is_expert_param):
        tp = dist_index.get_submesh(str(dist_index.tp_dim), is_expert_param)
        dim = utils.get_mcore_tensor_parallel_partition_dim(param)
        if dim is not None:
            made = DTensor.from_local(torch.empty_like(param, device="meta"), tp, [Shard(dim)], run_check=False)
        elif force_sync_tp_duplicated_param:
            broadcast(tp.get_group(), local_tensor.detach()).wait()
    local = local_tensor.detach().view(-1, *part.shape[1:]) if part.dim() else local_tensor.detach()
    for axis in reversed(range(mesh.ndim)):  # the last axis shards first
        cut = is_sharded_param and (axis == mesh.ndim - 1 or outer)
        line = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]
        if made is None:
            made = _torch.make_dtensor(local, line, [Shard(0) if cut else Replicate()], part.shape)
        else:
            made = composed(local, line, [cut], 0, Parallel(_torch.spec_of(made)))
    assert made is not None
    if run_check:
        validate_uneven_dtensor(made)
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(made)
    return made
