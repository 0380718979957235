"""The wrapper and the optimizer of Megatron-Core's training loop. Megatron-Core itself is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from flatshard.api import default_device_type
from flatshard.megatron.distributed_data_parallel_config import DistributedDataParallelConfig, own_config
from flatshard.megatron.fully_shard import fully_shard_optimizer
from flatshard.megatron.marks import Names
from flatshard.megatron.megatron_fsdp import MegatronFSDP
from flatshard.megatron.utils import FSDPDistributedIndex, default_mesh
from flatshard.optim.clip import clip_grad_norm_


class FullyShardedDataParallel(nn.Module):
    """A model as Megatron-Core's loop uses it: a `MegatronFSDP`, whose methods it has, and a few of its own.

    ``ddp_config`` and ``module`` may come in either order.
    ``fsdp_unit_modules``: None takes what `flatshard.shard_model` finds. ``pg_collection`` has Megatron-Core's process
    groups: ``dp_cp`` and, where they are used, ``tp``, ``expt_dp``, ``ep``, ``expt_tp``; with several optimizer
    instances ``intra_dp_cp``, ``intra_expt_dp`` and ``inter_dist_opt``. It may also be a mesh with axes of the names
    ``dp_cp``, ``tp`` and ``outer_fsdp_dp``, or None: all ranks are data-parallel.
    """

    # fmt: off
    def __init__(
        self, config: Any, ddp_config: Any, module: Any,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None, disable_bucketing: bool = False,
        device: torch.device | None = None, pg_collection: Any = None,
    ) -> None:
        # fmt: on
        super().__init__()
        if isinstance(ddp_config, nn.Module):
            ddp_config, module = module, ddp_config
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a module and a DistributedDataParallelConfig, not {type(module).__name__}")
        self.config, self.ddp_config = config, own_config(ddp_config)
        self.force_all_reduce = False
        if fsdp_unit_modules is None and self.ddp_config.data_parallel_sharding_strategy == "optim_grads_params":
            fsdp_unit_modules = getattr(module, "_fsdp_unit_modules", None) or "auto"
        names = ("calculate_per_token_loss", "init_model_with_meta_device")
        said: dict[str, Any] = {name: bool(getattr(config, name, False)) for name in names}
        index, precision = index_of(pg_collection, self.ddp_config), self.ddp_config.precision()
        given = (module, index, self.ddp_config, precision, fsdp_unit_modules, disable_bucketing, device)
        self.module = MegatronFSDP(*given, **said)
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
        """Wait for all that is on its way, and release what is gathered."""
        self.module.synchronize_gradient_reduce()
        self.module.synchronize_param_gather()

    # The names in checkpoints are those of the `MegatronFSDP`.

    @property
    def names(self) -> Names:
        """What parameters are called in checkpoints."""
        return Names(self.module.module, self.module.dist_index)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Sharded main weights, which torch.distributed.checkpoint takes; experts have the numbers of all ranks'."""
        state, names = self.module.module.state_dict(*args, **kwargs), self.names
        return {prefix + names.outward(name): names.alone(name, value) for name, value in state.items()}

    state_dict_for_save_checkpoint = state_dict

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """`state_dict` with a prefix. Tensors say by themselves how they are cut."""
        return self.state_dict(prefix=prefix)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Entries ``*_extra_state`` may be left out."""
        names = self.names
        own = {(name := names.inward(key)): names.together(name, value) for key, value in state_dict.items()}
        loaded = self.module.module.load_state_dict(own, strict=False, assign=assign)
        missing = [name for name in loaded.missing_keys if not name.endswith("_extra_state")]
        if strict and (missing or loaded.unexpected_keys):
            raise RuntimeError(f"load_state_dict: missing {missing}, unexpected {loaded.unexpected_keys}")
        return loaded


def index_of(groups: Any, config: DistributedDataParallelConfig) -> FSDPDistributedIndex:
    """Where data parallelism is, from Megatron-Core's process groups, a mesh, or nothing."""
    outer = config.outer_dp_sharding_strategy == "optim"
    if groups is None:
        return FSDPDistributedIndex(default_mesh("dp_cp", "tp"), "dp_cp", tp_dim="tp")
    if isinstance(groups, DeviceMesh):
        names = groups.mesh_dim_names or ()
        known = {key: name if name in names else None for key, name in _AXES.items()}
        return FSDPDistributedIndex(groups, hsdp_outer_dp_shard=outer, **known)  # type: ignore[arg-type]
    hybrid = config.num_distributed_optimizer_instances > 1
    axes = [("outer_fsdp_dp", groups.inter_dist_opt)] if hybrid else []
    mesh = _mesh([*axes, ("dp_cp", groups.intra_dp_cp if hybrid else groups.dp_cp), ("tp", _of(groups, "tp"))])
    experts = _of(groups, "intra_expt_dp" if hybrid else "expt_dp")
    inner = [("dp_cp", experts), ("ep", _of(groups, "ep")), ("tp", _of(groups, "expt_tp"))]
    expert_mesh = None if experts is None else _mesh([*axes, *inner])
    given: dict[str, Any] = {"dp_shard_dim": "dp_cp", "dp_outer_dim": "outer_fsdp_dp" if hybrid else None}
    given["tp_dim"] = "tp" if "tp" in (mesh.mesh_dim_names or ()) else None
    given |= {"hybrid_fsdp_group": groups.dp_cp if hybrid else None, "expt_device_mesh": expert_mesh}
    given |= {"fsdp_group_ag": _of(groups, "dp_cp_ag"), "expt_fsdp_group_ag": _of(groups, "expt_dp_ag")}
    return FSDPDistributedIndex(mesh, hsdp_outer_dp_shard=outer, **given)


def _of(groups: Any, name: str) -> Any:
    return getattr(groups, name, None)


_AXES = {"dp_shard_dim": "dp_cp", "dp_outer_dim": "outer_fsdp_dp", "tp_dim": "tp"}


def _mesh(axes: Sequence[tuple[str, Any]]) -> DeviceMesh:
    """The mesh of which these process groups are the axes, as this rank sees it."""
    named = [(name, group) for name, group in axes if group is not None and (name == "dp_cp" or group.size() > 1)]
    names, groups = zip(*named)
    ranks = _ranks_of(list(groups))
    return DeviceMesh.from_group(list(groups), default_device_type(), mesh=ranks, mesh_dim_names=tuple(names))


def _ranks_of(groups: list[Any]) -> Any:
    """The ranks of a mesh by its axes: those of regular meshes lie at equal distances along each."""
    members = [sorted(torch.distributed.get_process_group_ranks(group)) for group in groups]
    steps = [ranks[1] - ranks[0] if len(ranks) > 1 else 0 for ranks in members]
    me = torch.distributed.get_rank()
    corner = me - sum(ranks.index(me) * step for ranks, step in zip(members, steps))
    grid = torch.tensor(corner)
    for ranks, step in zip(members, steps):
        if ranks != [ranks[0] + number * step for number in range(len(ranks))]:
            raise ValueError(f"pg_collection: ranks {ranks} of a group lie at unequal distances; give a mesh instead")
        grid = grid.unsqueeze(-1) + torch.arange(len(ranks)) * step
    return grid.tolist()


class DistributedOptimizer:
    """An optimizer over sharded parameters, as Megatron-Core's loop uses it; ``state_dict`` has numbers for names.

    ``model_chunks`` are the `FullyShardedDataParallel` models whose parameters it has; ``per_model_buffers`` is there
    for the sake of the signature. ``step`` returns whether it stepped, the norm of all gradients if ``clip_grad`` is
    positive, and None.
    """

    def __init__(
        self, optimizer: Optimizer, model_chunks: Sequence[nn.Module], per_model_buffers: Any = None, *,
        clip_grad: float = 0.0,
    ) -> None:  # fmt: skip
        self.optimizer = fully_shard_optimizer(optimizer)
        self.model_chunks, self.clip_grad = list(model_chunks), clip_grad

    def __getattr__(self, name: str) -> Any:
        if name not in ("param_groups", "state", "state_dict", "zero_grad"):
            raise AttributeError(f"{name}: not in the DistributedOptimizer of flatshard.megatron")
        return getattr(self.optimizer, name)

    def get_parameters(self) -> list[nn.Parameter]:
        """All of its parameters."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def clip_grad_norm(self, clip_grad: float) -> float:
        """The norm of all gradients, which are scaled so that it is at most ``clip_grad``."""
        return float(clip_grad_norm_(self.get_parameters(), clip_grad))

    def step(self) -> tuple[bool, float | None, None]:
        """Complete gradients, clip them, step, and bring compute weights up to date."""
        for chunk in self.model_chunks:
            chunk.complete_gradients()  # type: ignore[operator]
        norm = self.clip_grad_norm(self.clip_grad) if self.clip_grad > 0 else None
        self.optimizer.step()
        return True, norm, None

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, **unused: Any
    ) -> dict[str, Any]:
        """The state by the names of parameters, for torch.distributed.checkpoint to save, or to load into."""
        state, named = self.optimizer.state_dict(), self._named()
        entries = {}
        for number, entry in state["state"].items():
            key, name, names = named[number]
            entries[key] = {what: names.alone(name, value) for what, value in entry.items()}
        # Which parameters are in a group is not said: each rank has experts of its own in them.
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        return {"state": entries, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state by numbers or by names. Groups are those of the optimizer, in their order."""
        if any(isinstance(key, str) for key in state_dict["state"]):
            own = self.optimizer.state_dict()["param_groups"]
            if len(own) != len(state_dict["param_groups"]):
                raise ValueError(f"{len(state_dict['param_groups'])} groups of parameters were saved, not {len(own)}")
            state = {}
            for number, (key, name, names) in enumerate(self._named()):
                if key in state_dict["state"]:
                    state[number] = {w: names.together(name, v) for w, v in state_dict["state"][key].items()}
            groups = [{**g, "params": mine["params"]} for g, mine in zip(state_dict["param_groups"], own)]
            state_dict = {"state": state, "param_groups": groups}
        self.optimizer.load_state_dict(state_dict)

    def _named(self) -> list[tuple[str, str, Names]]:
        """Of its parameters, in the order of its groups: names in checkpoints, in their chunks, and who knows."""
        known = {}
        for number, chunk in enumerate(self.model_chunks):
            model: Any = chunk.module if isinstance(chunk, FullyShardedDataParallel) else chunk
            names, prefix = Names(model.module, model.dist_index), f"{number}." if self.model_chunks[1:] else ""
            for name, parameter in model.module.named_parameters():
                known[id(parameter)] = prefix + names.outward(name), name, names
        return [known[id(parameter)] for parameter in self.get_parameters()]
