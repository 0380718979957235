"""The memory of a rank: between steps, and at the peak of a step.

Between `zero_grad` and the next forward, a rank holds main weights, optimizer state and, if compute weights are less
sharded (ZeRO 1, 2 and HFSDP), these. A step adds main gradients, from the reduce of a group on; gathered weights, for
the unit in use, for prefetched units and for units that are kept for backward; and staging, the gradients of the unit
in backward and of ``max_reducing`` groups in flight. `GroupBytes` counts them for each group (docs/plan.md has the
formulas). `memory_of` lets the engine run a step without tensors (`flatshard/tools/dry_run.py`) and finds the peak.

Not counted: activations and their gradients, temporaries of the optimizer's own step, buffers of the model, memory
that the allocator reserves but does not use, and buffers of the communication library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatshard.rehearsal.network import Network
from flatshard.tools.dry_run import Bytes, DryRun
from flatshard.tools.group_bytes import PlannedCollective, TrainingSetup, groups_of
from flatshard.tools.model_shapes import ModelShape
from flatshard.tools.timing import Estimate, Speed, StepClock


@dataclass(frozen=True)
class Memory:
    """The memory of one rank. ``resting``: between steps. ``peak``: at the peak of a step.

    ``most_gathered`` and ``most_staging``: the maximum of each in a step, possibly at other moments than the peak.
    ``launches``: the collectives of one step. ``host``: bytes in host memory, if weights are offloaded.
    """

    resting: Bytes
    peak: Bytes
    most_gathered: int
    most_staging: int
    launches: tuple[PlannedCollective, ...]
    host: int = 0


def memory_of(model: ModelShape, setup: TrainingSetup) -> Memory:
    """The memory and the collectives of one rank that trains ``model``."""
    run = DryRun(model, setup)
    run.step()
    return Memory(run.resting, run.peak, run.most_gathered, run.most_staging, tuple(run.launches()))


def offloaded(model: ModelShape, setup: TrainingSetup) -> Memory:
    """`memory_of` with `CPUOffloadPolicy`: main weights, main gradients and optimizer state are in host memory.

    The peak is an upper bound: the maxima of gathered weights and of staging, and the shards of two units that are
    copied to or from the host.
    """
    memory = memory_of(model, setup)
    shards = [sum(group.main + group.main_grad for group in unit) for unit in groups_of(model, setup)]
    resting = Bytes(compute=memory.resting.compute)
    moving = memory.peak.total - memory.resting.total  # includes main gradients, although they are in host memory
    gathered = min(memory.most_gathered, moving)
    staging = min(memory.most_staging, moving - gathered) + 2 * max(shards)
    peak = replace(resting, gathered=gathered, staging=staging)
    host = memory.resting.state + sum(shards)
    return replace(memory, resting=resting, peak=peak, host=host)


def time_of(model: ModelShape, setup: TrainingSetup, speed: Speed, network: Network) -> Estimate:
    """The estimated time of a step."""
    return DryRun(model, setup).timed(StepClock(speed, network, model.width), setup.microbatches)
