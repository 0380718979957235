"""Megatron-FSDP's second version, with the signatures of 0.6 and of 0.7."""

# ruff: noqa: I001
from flatshard.megatron.experimental.checkpoint import load_checkpoint, save_checkpoint
from flatshard.megatron.experimental.dbuffer import DBuffer
from flatshard.megatron.experimental.fully_shard import fully_shard, fully_shard_context, microbatch
from flatshard.megatron.experimental.module import FsdpContext, FsdpModule
from flatshard.megatron.experimental.optimizer import fully_shard_optimizer
from flatshard.megatron.experimental.placement import (
    BlockAtomic, Flat, Partial, Placement, Placements, Replicate, RowAtomic,
)  # fmt: skip

__all__ = [
    "BlockAtomic", "DBuffer", "Flat", "FsdpContext", "FsdpModule", "Partial", "Placement", "Placements", "Replicate",
    "RowAtomic", "fully_shard", "fully_shard_context", "fully_shard_optimizer", "load_checkpoint", "microbatch",
    "save_checkpoint",
]  # fmt: skip
