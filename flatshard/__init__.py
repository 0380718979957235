"""flatshard: fully sharded data parallelism for PyTorch."""

# ruff: noqa: I001
from typing import TYPE_CHECKING

from flatshard._lazy import attach

if TYPE_CHECKING:
    from flatshard import checkpoint
    from flatshard.api import fully_shard, microbatch, no_shard
    from flatshard.buffer.groups import destroy_groups
    from flatshard.captured import Captured, capture
    from flatshard.checkpoint.weight_sync import Synced, receive_weights, sync_weights
    from flatshard.engine.tree.materialize import materialize
    from flatshard.engine.tree.summary import Summary, check_buffers, summary
    from flatshard.gathering import gathered
    from flatshard.installing import install, uninstall
    from flatshard.model import shard_model
    from flatshard.module import (
        FSDPModule, GradientReductionHandle, UnshardHandle, register_fsdp_forward_method, share_comm_ctx,
    )  # fmt: skip
    from flatshard.optim.clip import clip_grad_norm_, find_nonfinite, grad_norms, sum_shared_gradients, weight_norms
    from flatshard.optim.step import fully_shard_optimizer, whole_optimizer
    from flatshard.policy import (
        CPUOffloadPolicy, DataParallelMeshDims, Experts, MixedPrecisionPolicy, OffloadPolicy, Placements,
        SchedulePolicy, Sharding,
    )  # fmt: skip
    from flatshard.trust.alarm import PeerError
    from flatshard.wgrads import direct_wgrads, offer_main_grads

__version__ = "0.1.0.dev0"

# The modules of the public names, which are imported at their first use. The imports above are for type checkers.
_HOMES = {
    "checkpoint": (),
    "hf": (),
    "megatron": (),
    "rehearsal": (),
    "api": ("fully_shard", "microbatch", "no_shard"),
    "buffer.groups": ("destroy_groups",),
    "captured": ("Captured", "capture"),
    "checkpoint.weight_sync": ("Synced", "receive_weights", "sync_weights"),
    "engine.tree.materialize": ("materialize",),
    "engine.tree.summary": ("Summary", "check_buffers", "summary"),
    "gathering": ("gathered",),
    "installing": ("install", "uninstall"),
    "model": ("shard_model",),
    "module": (
        "FSDPModule", "GradientReductionHandle", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx",
    ),
    "optim.clip": ("clip_grad_norm_", "find_nonfinite", "grad_norms", "sum_shared_gradients", "weight_norms"),
    "optim": (),
    "optim.step": ("fully_shard_optimizer", "whole_optimizer"),
    "policy": (
        "CPUOffloadPolicy", "DataParallelMeshDims", "Experts", "MixedPrecisionPolicy", "OffloadPolicy", "Placements",
        "SchedulePolicy", "Sharding",
    ),
    "trust.alarm": ("PeerError",),
    "wgrads": ("direct_wgrads", "offer_main_grads"),
}  # fmt: skip
__getattr__, __dir__ = attach(__name__, _HOMES)

__all__ = [
    "CPUOffloadPolicy", "Captured", "DataParallelMeshDims", "Experts", "FSDPModule", "GradientReductionHandle",
    "MixedPrecisionPolicy", "OffloadPolicy", "PeerError", "Placements", "SchedulePolicy", "Sharding", "Summary",
    "Synced", "UnshardHandle",
    "capture", "check_buffers", "checkpoint", "clip_grad_norm_", "destroy_groups", "direct_wgrads", "find_nonfinite",
    "fully_shard", "fully_shard_optimizer", "gathered", "grad_norms", "install", "materialize", "microbatch",
    "no_shard", "offer_main_grads", "receive_weights", "register_fsdp_forward_method", "shard_model", "share_comm_ctx",
    "sum_shared_gradients", "summary", "sync_weights", "uninstall", "weight_norms", "whole_optimizer",
]  # fmt: skip
