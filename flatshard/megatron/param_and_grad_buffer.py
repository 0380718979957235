"""What others ask of ``model.param_and_grad_buffer``. The buffers themselves are the engine's."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard.module import FSDPModule

if TYPE_CHECKING:
    from flatshard.megatron.megatron_fsdp import MegatronFSDP


_METHODS = {  # which the model has too, under these names
    "zero_grad": "zero_grad_buffer",
    "scale_gradients": "scale_gradients",
    "copy_main_weights_to_model_weights": "install_optimized_model_weights",
    "update_main_grads": "attach_grad_to_optimizer_state",
}


class ParamAndGradBuffer:
    """The parameters and gradients of a `MegatronFSDP`, which it does not own."""

    def __init__(self, model: MegatronFSDP) -> None:
        self._model = weakref.ref(model)

    @property
    def _owner(self) -> MegatronFSDP:
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
