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

from dataclasses import dataclass, fields, replace

from flatshard.rehearsal.network import Network
from flatshard.tools.dry_run import DryRun
from flatshard.tools.group_bytes import GroupBytes, PlannedCollective, TrainingSetup, split_into_groups
from flatshard.tools.model_shapes import ModelShape
from flatshard.tools.timing import Estimate, Speed, StepClock


@dataclass(frozen=True)
class Bytes:
    """The memory of one rank at one moment, by purpose."""

    main: int = 0
    compute: int = 0
    state: int = 0
    gradients: int = 0
    gathered: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


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
    groups = _groups(model, setup)
    every = [group for unit in groups for group in unit]
    resting = Bytes(*(sum(getattr(group, name) for group in every) for name in ("main", "compute", "state")))
    fullest = _Fullest(replace(resting, gradients=sum(group.accumulated for group in every)))
    run = DryRun(model, groups, setup, fullest.add)
    run.step()
    return Memory(resting, fullest.peak, fullest.most_gathered, fullest.most_staging, tuple(run.launches()))


def offloaded(model: ModelShape, setup: TrainingSetup) -> Memory:
    """`memory_of` with `CPUOffloadPolicy`: main weights, main gradients and optimizer state are in host memory.

    The peak is an upper bound: the maxima of gathered weights and of staging, and the shards of two units that are
    copied to or from the host.
    """
    memory = memory_of(model, setup)
    shards = [sum(group.main + group.main_grad for group in unit) for unit in _groups(model, setup)]
    resting = Bytes(compute=memory.resting.compute)
    moving = memory.peak.total - memory.resting.total  # includes main gradients, although they are in host memory
    gathered = min(memory.most_gathered, moving)
    staging = min(memory.most_staging, moving - gathered) + 2 * max(shards)
    peak = replace(resting, gathered=gathered, staging=staging)
    host = memory.resting.state + sum(shards)
    return replace(memory, resting=resting, peak=peak, host=host)


def time_of(model: ModelShape, setup: TrainingSetup, speed: Speed, network: Network) -> Estimate:
    """The estimated time of a step."""
    run = DryRun(model, _groups(model, setup), setup, lambda *sizes: None)
    return run.timed(StepClock(speed, network, model.width), setup.microbatches)


def _groups(model: ModelShape, setup: TrainingSetup) -> list[list[GroupBytes]]:
    alike = {
        tensors: split_into_groups(tensors, setup) for tensors in dict.fromkeys(unit.tensors for unit in model.units)
    }
    return [alike[unit.tensors] for unit in model.units]


class _Fullest:
    """Adds up changes of memory, and remembers the peak."""

    def __init__(self, resting: Bytes) -> None:
        self.now = self.peak = resting
        self.most_gathered = self.most_staging = 0

    def add(self, gradients: int, gathered: int, staging: int) -> None:
        was = self.now
        held = was.gradients + gradients, was.gathered + gathered, was.staging + staging
        self.now = now = Bytes(was.main, was.compute, was.state, *held)
        self.most_gathered = max(self.most_gathered, now.gathered)
        self.most_staging = max(self.most_staging, now.staging)
        if now.total > self.peak.total:
            self.peak = now
