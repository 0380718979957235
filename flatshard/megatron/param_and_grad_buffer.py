"""What others ask of ``model.param_and_grad_buffer``. The buffers themselves are the engine's."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _torch
from flatshard.buffer import Lane, Pool
from flatshard.buffer.dtensor import Parallel, composed
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.layout import is_sharded
from flatshard.megatron.experimental.parameter_group import ParameterGroup
from flatshard.megatron.uneven_dtensor import update_uneven_dtensor_chunk_metadata, validate_uneven_dtensor
from flatshard.megatron.utils import FSDPDistributedIndex, register_memory, take_first, using_tensor_parallel
from flatshard.megatron.utils import get_mcore_tensor_parallel_partition_dim as partition_dim
from flatshard.module import FSDPModule

_OF_MODEL = {  # what the model has too, by these names
    "zero_grad": "zero_grad_buffer",
    "scale_gradients": "scale_gradients",
    "copy_main_weights_to_model_weights": "install_optimized_model_weights",
    "update_main_grads": "attach_grad_to_optimizer_state",
    **{name: name for name in ("ddp_config", "dist_index", "mp_policy")},
}


class TemporaryBucketAllocator:
    """Where the memory comes from of what is gathered, or is to be reduced: a pool of the engine."""

    def __init__(self, model: weakref.ref[Any], name: str) -> None:
        self._model, self._name = model, name

    @property
    def pool(self) -> Pool | None:
        """None before the first forward."""
        model = self._model()
        unit = None if model is None else unit_of(model.module)
        return None if unit is None or unit.root is None else getattr(unit.root, self._name)


# Of no use by themselves: which of them an allocator is says what the configuration has asked for.
StorageResizeBasedBucketAllocator = type("StorageResizeBasedBucketAllocator", (TemporaryBucketAllocator,), {})
FixedPoolAllocator = type("FixedPoolAllocator", (TemporaryBucketAllocator,), {})
MaxPoolAllocator = type("MaxPoolAllocator", (TemporaryBucketAllocator,), {})


class ParamAndGradBuffer:
    """The parameters and gradients of a `MegatronFSDP`, which it does not own."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        config = model.ddp_config
        self.use_decoupled_grad = config.megatron_fsdp_use_decoupled_grad
        kind = FixedPoolAllocator if config.fsdp_double_buffer else StorageResizeBasedBucketAllocator
        kind = MaxPoolAllocator if config.megatron_fsdp_max_pool_double_buffer else kind
        self.weight_alloc = self.transpose_weight_alloc = kind(self._model, "gather_pool")
        self.main_grad_alloc = kind(self._model, "reduce_pool")

    @property
    def _owner(self) -> Any:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this param_and_grad_buffer has been deleted")
        return model

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Sharded parameters by their names in the module."""
        self._owner._replace_param_with_distributed_if_needed()
        return list(self._owner.module.named_parameters())

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """Parameters of one unit that travel together, unit after unit from the outside in."""
        root = self._owner.module
        return [
            ParameterGroup(root.get_submodule(name), unit, group, number or None)
            for number, (name, unit) in enumerate(units_below(root))
            for group in unit.groups
        ]

    num_buckets = property(lambda self: len(self.parameter_groups))

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_MODEL:
            raise AttributeError(f"{name}: not in the param_and_grad_buffer of flatshard.megatron")
        return getattr(self._owner, _OF_MODEL[name])

    def all_gather_parameters(self, async_op: bool = True) -> None:
        """Bring compute weights that rest whole up to date. Where they are sharded, a forward gathers them."""
        if any(is_sharded(p) for group in self.parameter_groups for p in group.engine.placements.parameter):
            raise RuntimeError("all_gather_parameters: compute weights are sharded; use start_param_sync()")
        self._owner.install_optimized_model_weights()

    def reduce_scatter_gradients(self, async_op: bool = True) -> None:
        """Reduce what backwards have left unreduced, and wait for it; so does `all_reduce_gradients`."""
        self._owner.synchronize_gradient_reduce()

    all_reduce_gradients = reduce_scatter_gradients

    def manual_buffer_registration(self) -> None:
        """Let what is communicated lie in registered memory from now on. Once is enough."""
        symmetric = not self.ddp_config.disable_symmetric_registration
        for module in self._owner.module.modules():
            if isinstance(module, FSDPModule):
                register_memory(module, self.dist_index.dp_mesh, symmetric)


def make_fsdp_dtensor(
    local_tensor: torch.Tensor, param: torch.Tensor, dist_index: FSDPDistributedIndex, is_sharded_param: bool = True,
    is_expert_param: bool = False, run_check: bool = False, update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> DTensor:  # fmt: skip
    """This rank's rows of a parameter, or all of it unless ``is_sharded_param``, as a DTensor over all of its meshes.

    ``param`` has the shape and the marks that the parameter has before data parallelism: it may be a DTensor of tensor
    parallelism. ``run_check``: AssertionError, on all ranks, unless the parts of all of them make up the whole.
    ``force_sync_tp_duplicated_param``: what every tensor-parallel rank has becomes that of the first of them.
    """
    part = _torch.local_of(param) if isinstance(param, DTensor) else param
    if not is_sharded_param and local_tensor.numel() != part.numel():
        found = f"{local_tensor.numel()} elements"
        raise ValueError(f"a parameter of {tuple(part.shape)} that is not sharded was given as {found}")
    mesh, outer = dist_index.mesh_of(is_expert_param), dist_index.hsdp_outer_dp_shard
    made = param if isinstance(param, DTensor) else None
    if made is None and using_tensor_parallel(dist_index, is_expert_param):
        assert dist_index.tp_dim is not None
        tp, dim = dist_index.get_submesh(dist_index.tp_dim, is_expert_param), partition_dim(param)
        if dim is not None:
            made = DTensor.from_local(torch.empty_like(param, device="meta"), tp, [Shard(dim)], run_check=False)
        elif force_sync_tp_duplicated_param:
            take_first(Lane("duplicates", torch.device(mesh.device_type)), tp, 0, local_tensor)
    local = local_tensor.detach().view(-1, *part.shape[1:]) if part.dim() else local_tensor.detach()
    meta = torch.empty(part.shape, device="meta")
    for axis in reversed(range(mesh.ndim)):  # the last one cuts first
        cut = is_sharded_param and (axis == mesh.ndim - 1 or outer)
        line = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]
        if made is None:
            made = _torch.make_dtensor(local, line, [Shard(0) if cut else Replicate()], meta.shape, meta.stride())
        else:
            made = composed(local, line, [cut], 0, Parallel(_torch.spec_of(made)))
    assert made is not None
    if run_check:
        validate_uneven_dtensor(made)
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(made)
    return made
