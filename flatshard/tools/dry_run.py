"""A dry run: the engine runs a step of a stand-in model, and the bytes that it would allocate and send are counted.

Units, root, program and hooks are the engine's own. The modules have a parameter of one element for every parameter of
the model. Stand-ins for the source of weights and for gradients count bytes instead of gathering and reducing. A dry
run needs no process group, and almost no memory.

`GroupBytes` says what a group holds in memory, and when (docs/plan.md has the formulas). Not counted: activations and
their gradients, temporaries of the optimizer's own step, buffers of the model, memory that the allocator reserves but
does not use, and buffers of the communication library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from flatshard.buffer import Pool, Ticket
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.reduction import Goal, Reduction
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.intent import Intent
from flatshard.engine.units.unit import Unit, set_unit
from flatshard.engine.weights.offload import Home
from flatshard.engine.weights.source import Source
from flatshard.policy import MixedPrecisionPolicy
from flatshard.rehearsal.network import Network
from flatshard.tools.group_bytes import GroupBytes, PlannedCollective, TrainingSetup, groups_of
from flatshard.tools.model_shapes import ModelShape, ModuleCall, UnitShape
from flatshard.tools.timing import Estimate, Speed, StepClock

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _NoMesh:
    """A number of ranks. Nothing is communicated."""

    ranks: int
    ndim = 0

    def size(self) -> int:
        return self.ranks


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
        return self.main + self.compute + self.state + self.gradients + self.gathered + self.staging


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
    return DryRun(model, setup).step()


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
    return replace(memory, resting=resting, peak=peak, host=memory.resting.state + sum(shards))


def time_of(model: ModelShape, setup: TrainingSetup, speed: Speed, network: Network) -> Estimate:
    return DryRun(model, setup).timed(StepClock(speed, network, model.width), setup.microbatches)


class DryRun:
    def __init__(self, model: ModelShape, setup: TrainingSetup) -> None:
        groups = groups_of(model, setup)
        every = [group for unit in groups for group in unit]
        self._resting = Bytes(*(sum(getattr(group, name) for group in every) for name in ("main", "compute", "state")))
        self._now = self._peak = replace(self._resting, gradients=sum(group.accumulated for group in every))
        self._most_gathered = self._most_staging = 0
        self._counts_memory = False
        self._groups = [[_Group(sizes, self, unit) for sizes in of] for unit, of in zip(model.units, groups)]
        self._all_groups = [group for unit in self._groups for group in unit]
        self._modules: dict[int, list[_Module]] = {}
        self._accumulates = setup.microbatches > 1
        self.clock: StepClock | None = None
        self.is_last = True  # this is the last micro-batch of a step
        self.mesh = cast(Any, _NoMesh(math.prod(setup.mesh)))
        self._root = self._module(model.root)
        self._units = []
        for number, modules in self._modules.items():
            tables = frozenset(id(module) for module in modules if module.is_table)
            intent = Intent(unshard_in_backward=len(tables) < len(modules))
            unit_groups, precision = self._groups[number], MixedPrecisionPolicy()
            unit = Unit(modules, unit_groups, self.mesh, _CPU, precision, intent, find_root, setup.schedule)
            unit.embeddings = tables
            for module in modules:
                set_unit(module, unit)
            self._units.append(unit)

    def _module(self, call: ModuleCall) -> _Module:
        module = _Module([self._module(inner) for inner in call.inner], self._groups[call.unit], call.is_table)
        self._modules.setdefault(call.unit, []).append(module)
        for group in self._groups[call.unit]:
            group.calls += 1
        return module

    def step(self) -> Memory:
        """Run the last micro-batch of a step. One pass before it records the order of units. If there are several
        micro-batches, another one runs before it, because its last reduces are still in flight."""
        passes = [(False, True), *[(True, False)] * self._accumulates, (True, True)]
        for self._counts_memory, is_last in passes:
            for group in self._all_groups:
                group.gathers = 0
            self._pass(True, is_last)
        launches = tuple(launch for group in self._all_groups for launch in group.sizes.launches(group.gathers))
        return Memory(self._resting, self._peak, self._most_gathered, self._most_staging, launches)

    def _pass(self, is_first: bool, is_last: bool) -> None:
        """Run forward and backward of one micro-batch."""
        for unit in self._units:
            unit.set_batch(is_first, is_last)
        self._root(torch.zeros(1)).sum().backward()

    def timed(self, clock: StepClock, microbatches: int) -> Estimate:
        """The estimated time of a step. Of many micro-batches, the first, the second and the last are run."""
        self.step()  # records the order of units
        self.clock = clock
        passes = min(microbatches, 3)
        for number in range(passes):
            self.is_last = number == passes - 1
            began = clock.totals
            self._pass(number == 0, self.is_last)
            if number == 1:
                clock.repeat(microbatches - passes, began)
        return clock.finish([group.sizes for group in self._all_groups], len(self._units) * microbatches)

    def moved(self, count: int) -> None:
        """Count bytes that encoding and decoding read and write."""
        if self.clock is not None:
            self.clock.move(count)

    def note(self, gradients: int = 0, gathered: int = 0, staging: int = 0) -> None:
        """Add changes of memory, in bytes."""
        if not self._counts_memory:
            return
        was = self._now
        held = was.gradients + gradients, was.gathered + gathered, was.staging + staging
        self._now = now = Bytes(was.main, was.compute, was.state, *held)
        self._most_gathered = max(self._most_gathered, now.gathered)
        self._most_staging = max(self._most_staging, now.staging)
        self._peak = max(self._peak, now, key=lambda each: each.total)


class _Module(nn.Module):
    """Runs the modules of inner units in order, and uses its own parameters before, between and after them."""

    def __init__(self, inner: Sequence[_Module], groups: Sequence[_Group], is_table: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self._groups, self.is_table = groups, is_table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position in range(len(self.inner) + 1):
            if position:
                x = self.inner[position - 1](x)
            for group in self._groups:
                pairs = zip(group.params, group.sizes.tensors)
                used = [member.sharded for member, tensor in pairs if tensor.after == position]
                if used:
                    x = _Use.apply(group, position, x, *used)  # type: ignore[no-untyped-call]
        return x


class _Use(torch.autograd.Function):
    """Uses parameters of a group in forward, and creates their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, group: _Group, position: int, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.position, ctx.count = group, position, len(parameters)
        group.used(position, backward=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.group.used(ctx.position, backward=True)
        ctx.group.gradients_appear(ctx.position)
        return None, None, grads[0], *[torch.zeros(1) for _ in range(ctx.count)]


class _Group(ParamGroup):
    """A group whose parameters have one element each, and count as the bytes in ``sizes``."""

    def __init__(self, sizes: GroupBytes, run: DryRun, unit: UnitShape) -> None:
        self.sizes, self.run, self._unit = sizes, run, unit
        self.calls = 0  # forwards per pass that use the group
        self.gathers = 0  # all-gathers in this forward and backward
        self._appeared = 0  # calls of `gradients_appear` in this backward
        parameters = [nn.Parameter(torch.zeros(1), requires_grad=sizes.trainable) for _ in sizes.tensors]
        self.params = [ShardedParam("", [], parameter, parameter) for parameter in parameters]
        self.placements, self.is_extended = sizes.placements, False
        self.home = Home(_CPU)
        self.source, self.gathered_bytes = _Source(self), sizes.gathered
        self.gradients = _Gradients(self)
        self.snapshot = self  # type: ignore[assignment]
        self.is_full, self.ticket, self._watched = False, None, False
        self.all_gather_comm = self._refreshed = None
        self.borrowers = []
        self.is_held = False
        self.post_forward_mesh = None

    mesh = property(lambda self: self.run.mesh)
    state = property(lambda self: ())
    arriving_bytes = property(lambda self: self.sizes.passing if self.source.decodes else self.sizes.gathered)

    def has_changed(self) -> bool:
        return False

    def used(self, position: int, backward: bool) -> None:
        if self.run.clock is not None:
            self.run.clock.use(self._unit, self.sizes, position, backward)

    def gradients_appear(self, position: int) -> None:
        sizes = self.sizes
        if not sizes.trainable:
            return
        self.run.note(staging=sizes.arriving_after(position))
        self._appeared += 1
        if self._appeared == self.calls * len({tensor.after for tensor in sizes.tensors}):
            self._appeared = 0
            if self.calls > 1:
                # Autograd has added the gradients of several forwards in a new tensor.
                self.run.note(staging=sizes.arriving)
                self.run.note(staging=-self.calls * sizes.arriving)


class _Source(Source):
    def __init__(self, group: _Group) -> None:
        self._group = group
        self._pool: Pool | None = None
        self._taken = 0  # bytes that are allocated now
        self._is_open, self._is_refreshed = True, False
        self.is_resident = group.sizes.is_resident

    @property
    def decodes(self) -> bool:
        return bool(self._group.sizes.passing)

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        self._pool, sizes, clock = pool, self._group.sizes, self._group.run.clock
        self._group.gathers += 1
        self._is_open = not self.decodes
        self._add(self._group.arriving_bytes)
        if clock is None:
            return Ticket()
        refreshes = [] if self._is_refreshed else sizes.refreshes()  # compute weights, before the first one of a step
        self._is_refreshed = True
        end = clock.launch("gather", [*refreshes, *sizes.gathers()])
        return Ticket(then=lambda: clock.wait(end))

    def open(self) -> None:
        sizes = self._group.sizes
        if not self._is_open:
            self._is_open = True
            self._add(sizes.gathered)
            self._add(-sizes.passing)
            self._group.run.moved(sizes.passing + sizes.gathered)

    def release(self) -> None:
        self._add(-self._taken)

    def _add(self, count: int) -> None:
        assert self._pool is not None
        self._taken += count
        self._pool.live_bytes += count
        self._group.run.note(gathered=count)


class _Gradients(Gradients):
    def __init__(self, group: _Group) -> None:
        self._group = group
        self.params, self.placements = group.params, group.placements
        self.expected = sum(member.sharded.requires_grad for member in self.params)
        self.on_arrival = self.direct = None
        self.main_grads = self  # type: ignore[assignment]
        self._arrived = set()

    has_partial = property(lambda self: False)
    buffer = None  # read, as the next, of `main_grads`

    def free_cleared(self, always: bool = False) -> None:
        """There is nothing to free."""

    def reduce(self, pool: Pool, goal: Goal, name: str, is_last: bool = False) -> Reduction:
        self.take()
        sizes, note = self._group.sizes, self._group.run.note
        ends = sizes.ends and goal is Goal.FINAL
        fresh = sizes.setup.microbatches == 1 or ends
        note(gradients=sizes.main_grad if fresh else 0, staging=sizes.reducing)
        ended = sizes.accumulated if ends else 0
        run, clock = self._group.run, self._group.run.clock
        end = 0.0 if clock is None else clock.launch("reduce", sizes.reduces(run.is_last))
        run.moved(sizes.encoding(run.is_last))

        def over() -> None:
            note(gradients=-ended, staging=-sizes.arriving - sizes.reducing)
            if clock is not None:
                clock.wait(end)

        return Reduction(pool, name, ticket=Ticket(then=over))
