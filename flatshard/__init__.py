"""flatshard: fully sharded data parallelism for PyTorch."""

from flatshard.api import FSDPModule, UnshardHandle, fully_shard, microbatch, no_shard
from flatshard.engine.summary import Summary, check_buffers, summary
from flatshard.optim.step import fully_shard_optimizer
from flatshard.policy import MixedPrecisionPolicy, OffloadPolicy, Placements, SchedulePolicy

__version__ = "0.1.0.dev0"

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Placements",
    "SchedulePolicy",
    "Summary",
    "UnshardHandle",
    "check_buffers",
    "fully_shard",
    "fully_shard_optimizer",
    "microbatch",
    "no_shard",
    "summary",
]
