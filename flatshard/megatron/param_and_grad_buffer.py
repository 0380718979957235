"""What others ask of ``model.param_and_grad_buffer``. The buffers themselves are the engine's."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _torch
from flatshard.buffer import Lane
from flatshard.megatron.uneven_dtensor import update_uneven_dtensor_chunk_metadata, validate_uneven_dtensor
from flatshard.megatron.utils import (
    FSDPDistributedIndex,
    get_mcore_tensor_parallel_partition_dim,
    using_tensor_parallel,
)
from flatshard.module import FSDPModule

_METHODS = {  # which the model has too, under these names
    "zero_grad": "zero_grad_buffer",
    "scale_gradients": "scale_gradients",
    "copy_main_weights_to_model_weights": "install_optimized_model_weights",
    "update_main_grads": "attach_grad_to_optimizer_state",
}


class ParamAndGradBuffer:
    """The parameters and gradients of a `MegatronFSDP`, which it does not own."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

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

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"{name}: not in the param_and_grad_buffer of flatshard.megatron")
        return getattr(self._owner, _METHODS[name])

    def manual_buffer_registration(self) -> None:
        """Let what is communicated lie in registered memory from now on. Once is enough."""
        owner = self._owner
        for module in owner.module.modules():
            if isinstance(module, FSDPModule):
                mesh = owner.dist_index.dp_mesh
                register_memory(module, mesh, symmetric=not owner.ddp_config.disable_symmetric_registration)


def register_memory(unit: FSDPModule | None, mesh: DeviceMesh, symmetric: bool = True) -> None:
    """Let a unit communicate from memory that NCCL knows: symmetric, or of NCCL's own allocator."""
    if mesh.device_type != "cuda":
        raise ValueError(f"nccl_ub=True: memory is registered with NCCL, and this mesh is on {mesh.device_type}")
    if unit is not None and symmetric:
        unit.set_force_sum_reduction_for_comms(True)  # all that NCCL does in symmetric memory
        unit.set_symm_mem_for_comm()
    elif unit is not None:
        unit.set_allocate_memory_from_process_group_for_comm(True)


def make_fsdp_dtensor(
    local_tensor: torch.Tensor,
    param: torch.Tensor,
    dist_index: FSDPDistributedIndex,
    is_sharded_param: bool = True,
    is_expert_param: bool = False,
    run_check: bool = False,
    update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> DTensor:
    """This rank's rows of a parameter, or all of it unless ``is_sharded_param``, as a DTensor over all of its meshes.

    ``param`` has the shape and the marks that the parameter has before data parallelism: it may be a DTensor of tensor
    parallelism. ``run_check``: AssertionError, on all ranks, unless the parts of all of them make up the whole.
    ``force_sync_tp_duplicated_param``: what every tensor-parallel rank has becomes that of the first of them.
    """
    part = _torch.local_of(param) if isinstance(param, DTensor) else param
    if not is_sharded_param and local_tensor.numel() != part.numel():
        raise ValueError(
            f"a parameter of {tuple(part.shape)} that is not sharded was given as {local_tensor.numel()} elements"
        )
    mesh, outer = dist_index.mesh_of(is_expert_param), dist_index.hsdp_outer_dp_shard
    made = param if isinstance(param, DTensor) else None
    if made is None and using_tensor_parallel(dist_index, is_expert_param):
        assert dist_index.tp_dim is not None
        tp, dim = (
            dist_index.get_submesh(dist_index.tp_dim, is_expert_param),
            get_mcore_tensor_parallel_partition_dim(param),
        )
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
            made = _torch.composed_dtensor(local, line, [cut], 0, _torch.Parallel(_torch.spec_of(made)))
    assert made is not None
    if run_check:
        validate_uneven_dtensor(made)
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(made)
    return made


def take_first(lane: Lane, mesh: DeviceMesh, axis: int, local: torch.Tensor) -> None:
    """Give the ranks of an axis what the first of them has. All of them call it."""
    if mesh.get_local_rank(axis):
        local.zero_()
    lane.all_reduce(lane.group(mesh, axis), [local], after=(lane.mark(),), name="broadcast").wait()
