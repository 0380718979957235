"""What a rehearsed collective costs the host, on a GPU machine.

    python -m benchmarks.rehearsal_host

The fastest of 20 samples of 10 launches each: the host of a shared machine has slow moments.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from flatshard.rehearsal import rehearse

SEGMENTS = 9  # of a coalesced launch: the tensors of a transformer layer


def main() -> None:
    with rehearse(8, "h100-nvlink"):
        world = dist.group.WORLD
        full = [torch.empty(8 * 4096, device="cuda", dtype=torch.bfloat16) for _ in range(SEGMENTS)]
        shards = [tensor[:4096] for tensor in full]
        gather, reduce = AllgatherOptions(), ReduceScatterOptions()
        reduce.reduceOp = dist.ReduceOp.AVG
        gather.asyncOp = reduce.asyncOp = False  # what sharded data parallelism launches from streams of its own
        launches = {
            "gather": lambda: world._allgather_base(full[0], shards[0], gather),
            "asynchronous gather": lambda: world._allgather_base(full[0], shards[0]),
            f"gather of {SEGMENTS} segments": lambda: world.allgather_into_tensor_coalesced(full, shards, gather),
            f"reduce of {SEGMENTS} segments": lambda: world.reduce_scatter_tensor_coalesced(shards, full, reduce),
        }
        for name, launch in launches.items():
            samples = []
            for _ in range(20):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(10):
                    launch().wait()
                samples.append((time.perf_counter() - begin) / 10)
            print(f"{name:25} {1e6 * min(samples):6.1f} us")


if __name__ == "__main__":
    main()
