"""flatshard: fully sharded data parallelism for PyTorch."""

from flatshard.api import FSDPModule, UnshardHandle, fully_shard
from flatshard.engine.summary import Summary, check_buffers, summary
from flatshard.policy import MixedPrecisionPolicy, OffloadPolicy, SchedulePolicy

__version__ = "0.1.0.dev0"

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "SchedulePolicy",
    "Summary",
    "UnshardHandle",
    "check_buffers",
    "fully_shard",
    "summary",
]
