"""The API of Megatron-FSDP, on flatshard's engine.

    from flatshard.megatron import fully_shard_model, fully_shard_optimizer  # was: from megatron_fsdp import ...

For programs that are not to be changed, call ``flatshard.megatron.install()`` before they import `megatron_fsdp`.
docs/from-megatron-fsdp.md lists every name. `experimental` and `v2` are Megatron-FSDP's second version.
"""

from flatshard.megatron.distributed_data_parallel_config import DistributedDataParallelConfig
from flatshard.megatron.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from flatshard.megatron.installing import install, uninstall
from flatshard.megatron.mcore_fsdp_adapter import DistributedOptimizer, FullyShardedDataParallel
from flatshard.megatron.megatron_fsdp import MegatronFSDP
from flatshard.megatron.mixed_precision import MixedPrecisionPolicy
from flatshard.megatron.utils import FSDPDistributedIndex, fsdp_no_shard

__version__ = "0.6.1"  # the version of Megatron-FSDP whose API this is

__all__ = [
    "DistributedDataParallelConfig", "DistributedOptimizer", "FSDPDistributedIndex", "FullyShardedDataParallel",
    "MegatronFSDP", "MixedPrecisionPolicy", "fsdp_no_shard", "fully_shard", "fully_shard_model",
    "fully_shard_optimizer", "install", "uninstall",
]  # fmt: skip
