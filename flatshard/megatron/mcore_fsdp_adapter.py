"""The wrapper and the optimizer of Megatron-Core's training loop. Megatron-Core itself is not needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flatshard import _arguments, _torch
from flatshard.api import default_device_type, default_mesh
from flatshard.buffer.dtensor import without_axis
from flatshard.megatron.distributed_data_parallel_config import DistributedDataParallelConfig, own_config
from flatshard.megatron.fully_shard import fully_shard_optimizer
from flatshard.megatron.megatron_fsdp import MegatronFSDP
from flatshard.megatron.utils import FSDPDistributedIndex, find_megatron_fsdp, is_expert
from flatshard.optim.clip import clip_grad_norm_


class FullyShardedDataParallel(nn.Module):
    """The model of Megatron-Core's loop: a `MegatronFSDP`, with all of its methods, in ``module``.

    ``ddp_config`` and ``module`` are accepted in either order.
    ``fsdp_unit_modules``: None takes the units that `flatshard.shard_model` finds.
    ``pg_collection`` has Megatron-Core's process groups: ``dp_cp`` and, if they are used, ``tp``, ``expt_dp``, ``ep``,
    ``expt_tp``; with several optimizer instances ``intra_dp_cp``, ``intra_expt_dp`` and ``inter_dist_opt``. It may also
    be a mesh with axes named ``dp_cp``, ``tp`` and ``outer_fsdp_dp``, or None: all ranks are data-parallel.
    """

    def __init__(
        self, config: Any, ddp_config: Any, module: Any,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None, disable_bucketing: bool = False,
        device: torch.device | None = None, pg_collection: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(ddp_config, nn.Module):
            ddp_config, module = module, ddp_config
        _arguments.module("FullyShardedDataParallel", module)
        self.config, self.ddp_config = config, own_config(ddp_config)
        self.force_all_reduce = False
        if fsdp_unit_modules is None and self.ddp_config.data_parallel_sharding_strategy == "optim_grads_params":
            fsdp_unit_modules = getattr(module, "_fsdp_unit_modules", None) or "auto"
        names = ("calculate_per_token_loss", "init_model_with_meta_device")
        choices: dict[str, Any] = {name: bool(getattr(config, name, False)) for name in names}
        index, precision = index_of(pg_collection, self.ddp_config), self.ddp_config.precision()
        given = (module, index, self.ddp_config, precision, fsdp_unit_modules, disable_bucketing, device)
        self.module = MegatronFSDP(*given, **choices)
        self.param_and_grad_buffer = self.module.param_and_grad_buffer
        self.megatron_fsdp_dist_index = self.module.dist_index

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def stop_communication(self) -> None:
        """Wait for all collectives, and reshard all units."""
        self.module.synchronize_gradient_reduce()
        self.module.synchronize_param_gather()

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The sharded main weights, for torch.distributed.checkpoint, with the names that `Names` describes."""
        state, names = self.module.module.state_dict(*args, **kwargs), Names(self)
        return {prefix + names.in_checkpoint.get(key, key): names.own_expert(key, x) for key, x in state.items()}

    state_dict_for_save_checkpoint = state_dict

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """`state_dict` with a prefix. The other arguments are not needed: DTensors have their offsets."""
        return self.state_dict(prefix=prefix)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned. Entries ``*_extra_state`` may be missing, even if ``strict``."""
        names = Names(self)
        inward = {outward: name for name, outward in names.in_checkpoint.items()}
        own = {(name := inward.get(key, key)): names.all_experts(name, value) for key, value in state_dict.items()}
        loaded = self.module.module.load_state_dict(own, strict=False, assign=assign)
        missing = [name for name in loaded.missing_keys if not name.endswith("_extra_state")]
        if strict and (missing or loaded.unexpected_keys):
            raise RuntimeError(f"the state dict does not fit: missing {missing}, unexpected {loaded.unexpected_keys}")
        return loaded


def index_of(groups: Any, config: DistributedDataParallelConfig) -> FSDPDistributedIndex:
    """The meshes of Megatron-Core's process groups, of a mesh, or of all ranks if ``groups`` is None."""
    mesh, others = default_mesh(("dp_cp", "tp")) if groups is None else groups, dict[str, Any]()
    if not isinstance(mesh, DeviceMesh):
        hybrid = config.num_distributed_optimizer_instances > 1
        names = ("tp", "ep", "expt_tp", "expt_dp", "intra_expt_dp", "dp_cp_ag", "expt_dp_ag")
        given = {name: getattr(groups, name, None) for name in names}
        axes = [("outer_fsdp_dp", groups.inter_dist_opt)] if hybrid else []
        mesh = _mesh([*axes, ("dp_cp", groups.intra_dp_cp if hybrid else groups.dp_cp), ("tp", given["tp"])])
        experts = given["intra_expt_dp" if hybrid else "expt_dp"]
        inner = [("dp_cp", experts), ("ep", given["ep"]), ("tp", given["expt_tp"])]
        others = {
            "expt_device_mesh": None if experts is None else _mesh([*axes, *inner]),
            "hybrid_fsdp_group": groups.dp_cp if hybrid else None,
            "fsdp_group_ag": given["dp_cp_ag"],
            "expt_fsdp_group_ag": given["expt_dp_ag"],
        }
    dims = {"dp_shard_dim": "dp_cp", "dp_outer_dim": "outer_fsdp_dp", "tp_dim": "tp"}
    known: Any = {key: name for key, name in dims.items() if name in (mesh.mesh_dim_names or ())}
    is_outer_sharded = config.outer_dp_sharding_strategy == "optim"
    return FSDPDistributedIndex(mesh, hsdp_outer_dp_shard=is_outer_sharded, **known, **others)


def _mesh(axes: Sequence[tuple[str, Any]]) -> DeviceMesh:
    """The mesh whose axes are these process groups of this rank. It must be regular: its ranks at equal distances."""
    named = [(name, group) for name, group in axes if group is not None and (name == "dp_cp" or group.size() > 1)]
    names, groups = zip(*named)
    members = [sorted(torch.distributed.get_process_group_ranks(group)) for group in groups]
    steps = [ranks[1] - ranks[0] if len(ranks) > 1 else 0 for ranks in members]
    me = torch.distributed.get_rank()
    grid = torch.tensor(me - sum(ranks.index(me) * step for ranks, step in zip(members, steps)))
    for name, ranks, step in zip(names, members, steps):
        if ranks != [ranks[0] + number * step for number in range(len(ranks))]:
            raise ValueError(f"pg_collection: ranks {ranks} of {name} are not at equal distances; pass a mesh instead")
        grid = grid.unsqueeze(-1) + torch.arange(len(ranks)) * step
    return DeviceMesh.from_group(list(groups), default_device_type(), mesh=grid.tolist(), mesh_dim_names=names)


class DistributedOptimizer:
    """The optimizer of Megatron-Core's loop. ``state_dict`` has numbers as keys, `sharded_state_dict` has names.

    ``model_chunks`` are the models whose parameters the optimizer has; ``per_model_buffers`` is not used. ``step``
    returns True, the norm of all gradients (None unless ``clip_grad`` is positive), and None.
    """

    def __init__(
        self, optimizer: Optimizer, model_chunks: Sequence[nn.Module], per_model_buffers: Any = None, *,
        clip_grad: float = 0.0,
    ) -> None:  # fmt: skip
        self.optimizer = fully_shard_optimizer(optimizer)
        self.model_chunks, self.clip_grad = list(model_chunks), clip_grad

    def __getattr__(self, name: str) -> Any:
        if name not in ("param_groups", "state", "state_dict", "zero_grad"):
            raise AttributeError(f"{name}: the DistributedOptimizer of flatshard.megatron does not have this attribute")
        return getattr(self.optimizer, name)

    def get_parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of their groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale all gradients so that their norm is at most ``clip_grad``, and return the norm before."""
        return float(clip_grad_norm_(self.get_parameters(), clip_grad))

    def step(self) -> tuple[bool, float | None, None]:
        """Complete and clip gradients, step, and update compute weights."""
        for chunk in self.model_chunks:
            chunk.complete_gradients()  # type: ignore[operator]
        norm = self.clip_grad_norm(self.clip_grad) if self.clip_grad > 0 else None
        self.optimizer.step()
        return True, norm, None

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, **unused: Any
    ) -> dict[str, Any]:
        """The state by names of parameters, for torch.distributed.checkpoint to save or to load into."""
        state, named = self.optimizer.state_dict(), self._named()
        entries = {}
        for number, entry in state["state"].items():
            key, name, names = named[number]
            entries[key] = {what: names.own_expert(name, value) for what, value in entry.items()}
        # Without the numbers of parameters: ranks have different experts in their groups.
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        return {"state": entries, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state by numbers or by names. The groups must be those of this optimizer, in the same order."""
        if any(isinstance(key, str) for key in state_dict["state"]):
            own, saved = self.optimizer.state_dict()["param_groups"], state_dict["param_groups"]
            if len(own) != len(saved):
                raise ValueError(f"the state dict has {len(saved)} param_groups; the optimizer has {len(own)}")
            state = {}
            for number, (key, name, names) in enumerate(self._named()):
                if key in state_dict["state"]:
                    state[number] = {w: names.all_experts(name, v) for w, v in state_dict["state"][key].items()}
            groups = [{**group, "params": current["params"]} for group, current in zip(saved, own)]
            state_dict = {"state": state, "param_groups": groups}
        self.optimizer.load_state_dict(state_dict)

    def _named(self) -> list[tuple[str, str, Names]]:
        """Of each parameter, in the order of groups: its name in checkpoints, in its model, and the model's `Names`."""
        known = {}
        for number, chunk in enumerate(self.model_chunks):
            names, prefix = Names(chunk), f"{number}." if self.model_chunks[1:] else ""
            for name, parameter in names.parameters.items():
                known[id(parameter)] = prefix + names.in_checkpoint[name], name, names
        return [known[id(parameter)] for parameter in self.get_parameters()]


class Names:
    """The names of a sharded model's parameters in checkpoints, where the experts of all ranks come together.

    The number of an expert, in the list that it is in (``experts.local_experts.3.weight``) or at the end of its name
    (``experts.weight3``), becomes its number among the experts of all ranks, so that a checkpoint can be loaded on any
    number of ranks. A parameter without a number is a stack of experts: one tensor with those of all ranks.

    If a parameter has a ``partition_stride``, tensor-parallel ranks have alternating parts of it (gate and up of a
    gated layer). Its name says so: it can only be loaded on as many tensor-parallel ranks, and is missing otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        wrapper = find_megatron_fsdp(model)
        assert isinstance(wrapper, MegatronFSDP)
        self._index = index = wrapper.dist_index
        self.parameters = dict(wrapper.module.named_parameters())
        self._numbered: set[str] = set()  # names of experts with a number
        self.in_checkpoint: dict[str, str] = {}  # the names in checkpoints
        for name, parameter in self.parameters.items():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            axes = () if mesh is None else mesh.mesh_dim_names or ()
            self.in_checkpoint[name] = name
            if mesh is not None and is_expert(parameter) and index.ep_dim in axes:
                numbered = _numbered(wrapper.module, name, mesh.get_local_rank(index.ep_dim))
                if numbered is not None:
                    self._numbered.add(name)
                    self.in_checkpoint[name] = numbered
            stride = getattr(parameter, "partition_stride", 1)
            if mesh is not None and stride > 1 and index.tp_dim in axes:
                self.in_checkpoint[name] += f".stride_{stride}_of_{mesh.size(axes.index(index.tp_dim))}"

    def own_expert(self, name: str, value: Any) -> Any:
        """The part of this rank's expert in ``value``, a tensor of the shape of parameter ``name``."""
        known = name in self._numbered and isinstance(value, DTensor)
        if not known or value.shape != self.parameters[name].shape:
            return value
        axis, mesh = self._index.ep_dim, self._index.mesh_of(is_expert_parallel=True)
        assert axis is not None
        names = tuple(each for each in value.device_mesh.mesh_dim_names or () if each != axis)
        others = mesh if names == mesh.mesh_dim_names else self._index.get_submesh(names, is_expert_parallel=True)
        return without_axis(value, axis, others)

    def all_experts(self, name: str, value: Any) -> Any:
        """The inverse of `own_expert`, for a tensor that is sharded as `own_expert` returns it, or a plain full one."""
        if name not in self._numbered or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        parameter = self.parameters[name]
        if not isinstance(value, DTensor):
            return _torch.like_dtensor(parameter, _torch.part_of(value, self.own_expert(name, parameter)))
        return _torch.like_dtensor(parameter, _torch.local_of(value))


def _numbered(model: nn.Module, name: str, rank: int) -> str | None:
    """The name of an expert's parameter with its number among the experts of all ranks; None if it has no number."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        container = model.get_submodule(".".join(parts[:place]))
        if part.isdecimal() and all(is_expert(parameter) for parameter in container.parameters()):
            parts[place] = str(int(part) + rank * len(list(container.children())))
            return ".".join(parts)
    match = re.fullmatch(r"(.*?)(\d+)", parts[-1])
    if match is None:
        return None
    siblings = model.get_submodule(".".join(parts[:-1]))._parameters
    count = sum(re.fullmatch(re.escape(match[1]) + r"\d+", other) is not None for other in siblings)
    return ".".join([*parts[:-1], f"{match[1]}{int(match[2]) + rank * count}"])
