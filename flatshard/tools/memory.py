"""The bytes of a rank: between steps, and at the fullest moment of a step.

Between `zero_grad` and the next forward, a rank holds per group

    main      shard x main dtype
    compute   what its placement says x compute dtype, where that placement is not main's (ZeRO 1 and 2, HFSDP)
    state     tensors of optimizer state x shard x main dtype

with ``shard`` the elements of the layout on one rank, padding included. A step adds

    gradients of main     shard x gradient dtype, from the reduce of the group on
    gathered              all elements x compute dtype, of the unit in use and of those gathered ahead of it
                          (``max_gathered`` together, or more under ``max_gathered_bytes``), and of units
                          kept for backward; under a format those ahead take the bytes that travel
    staging               gradients as autograd leaves them, all elements x compute dtype, until their reduce has been
                          waited for: those of the unit in backward and of ``max_reducing`` groups in flight; where they
                          are not in the reduce dtype or a segment has padding, also a copy x reduce dtype; and what a
                          reduce needs on its way where it cannot write main gradients directly

`memory_of` lets the engine go through a step (`flatshard/tools/dry_run.py`) and notes the fullest moment.
Not counted: activations and their gradients, temporaries of the optimizer's own step, buffers of the model, what the
allocator reserves beyond what is used, and the communication library's buffers.
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
    """The memory of one rank at one moment, by what it is for."""

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
    """``resting``: between steps. ``peak``: the fullest moment of a step.

    ``most_gathered`` and ``most_staging``: the most that gathered weights and staging take, perhaps at other moments.
    ``launches``: the collectives of one step. ``host``: bytes in host memory, where weights are offloaded.
    """

    resting: Bytes
    peak: Bytes
    most_gathered: int
    most_staging: int
    launches: tuple[PlannedCollective, ...]
    host: int = 0


def memory_of(model: ModelShape, setup: TrainingSetup) -> Memory:
    """What training ``model`` takes of one rank, and sends."""
    groups = _groups(model, setup)
    every = [group for unit in groups for group in unit]
    resting = Bytes(*(sum(getattr(group, name) for group in every) for name in ("main", "compute", "state")))
    fullest = _Fullest(replace(resting, gradients=sum(group.accumulated for group in every)))
    run = DryRun(model, groups, setup, fullest.add)
    run.step()
    launches = [
        launch
        for unit, counts in zip(groups, run.gathers)
        for group, count in zip(unit, counts)
        for launch in group.launches(*count)
    ]
    return Memory(resting, fullest.peak, fullest.most_gathered, fullest.most_staging, tuple(launches))


def offloaded(model: ModelShape, setup: TrainingSetup) -> Memory:
    """The same under `CPUOffloadPolicy`: main weights, their gradients and optimizer state are in host memory.

    The peak is an upper bound: the most that gathered weights and staging can take together, and the shards of two
    units on their way to the host or from it.
    """
    memory = memory_of(model, setup)
    shards = [sum(group.main + group.main_grad for group in unit) for unit in _groups(model, setup)]
    resting = Bytes(compute=memory.resting.compute)
    moving = memory.peak.total - memory.resting.total  # with gradients, which are in host memory then
    gathered = min(memory.most_gathered, moving)
    staging = min(memory.most_staging, moving - gathered) + 2 * max(shards)
    peak = replace(resting, gathered=gathered, staging=staging)
    host = memory.resting.state + sum(shards)
    return replace(memory, resting=resting, peak=peak, host=host)


def time_of(model: ModelShape, setup: TrainingSetup, speed: Speed, network: Network) -> Estimate:
    """How long a step of that takes."""
    run = DryRun(model, _groups(model, setup), setup, lambda *sizes: None)
    return run.timed(StepClock(speed, network, model.width), setup.microbatches)


def _groups(model: ModelShape, setup: TrainingSetup) -> list[list[GroupBytes]]:
    alike = {
        tensors: split_into_groups(tensors, setup) for tensors in dict.fromkeys(unit.tensors for unit in model.units)
    }
    return [alike[unit.tensors] for unit in model.units]


class _Fullest:
    """Remembers the fullest moment."""

    def __init__(self, resting: Bytes) -> None:
        self.now = self.peak = resting
        self.most_gathered = self.most_staging = 0

    def add(self, gradients: int, gathered: int, staging: int) -> None:
        now = self.now
        self.now = now = replace(
            now,
            gradients=now.gradients + gradients,
            gathered=now.gathered + gathered,
            staging=now.staging + staging,
        )
        self.most_gathered = max(self.most_gathered, now.gathered)
        self.most_staging = max(self.most_staging, now.staging)
        if now.total > self.peak.total:
            self.peak = now
