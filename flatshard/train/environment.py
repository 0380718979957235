"""The environment variables that torchrun and srun set for a rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping


def started_world() -> int:
    """The number of ranks that torchrun or srun has started; 0 if neither has. For srun, sets torchrun's variables."""
    if "RANK" not in os.environ:
        os.environ.update(slurm_ranks(os.environ))
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 0


def slurm_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, made from those of srun; empty unless srun has started several tasks."""
    if "SLURM_STEP_ID" not in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    # Node list "gpu[07-12,20]-ib,login1": the first node, gpu07-ib, is MASTER_ADDR. Tasks "4(x2),1": 4, 4 and 1.
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", environ["SLURM_STEP_NODELIST"])
    assert first is not None
    tasks: list[int] = []
    for part in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(environ["SLURM_NODEID"])]),
        "GROUP_WORLD_SIZE": str(len(tasks)),
        "MASTER_ADDR": environ.get("MASTER_ADDR", re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])),
        "MASTER_PORT": environ.get("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 20000)),
    }


def has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Whether every task of srun sees only its own GPUs (--gpus-per-task), not all of the node."""
    return "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
