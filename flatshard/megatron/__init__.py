"""The surface of Megatron-FSDP over flatshard's engine.

    from flatshard.megatron import fully_shard_model, fully_shard_optimizer  # was: from megatron_fsdp import ...

or, with code that is not to be changed, ``flatshard.megatron.install()`` before it is imported.
docs/from-megatron-fsdp.md goes through it name by name. `experimental` and `v2` are its second version.
"""

from flatshard.megatron.distributed_data_parallel_config import DistributedDataParallelConfig
from flatshard.megatron.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from flatshard.megatron.installing import install, uninstall
from flatshard.megatron.mcore_fsdp_adapter import DistributedOptimizer, FullyShardedDataParallel
from flatshard.megatron.megatron_fsdp import MegatronFSDP
from flatshard.megatron.mixed_precision import MixedPrecisionPolicy
from flatshard.megatron.utils import FSDPDistributedIndex, fsdp_no_shard

__version__ = "0.6.1"  # of Megatron-FSDP, whose names these are

__all__ = [
    "DistributedDataParallelConfig", "DistributedOptimizer", "FSDPDistributedIndex", "FullyShardedDataParallel",
    "MegatronFSDP", "MixedPrecisionPolicy", "fsdp_no_shard", "fully_shard", "fully_shard_model",
    "fully_shard_optimizer", "install", "uninstall",
]  # fmt: skip
