"""A dry run: the engine runs a step of a stand-in model, and the bytes that it would allocate and send are counted.

Units, root, program and hooks are the engine's own. The modules have a parameter of one element for every parameter of
the model. Stand-ins for the source of weights and for gradients count bytes instead of gathering and reducing. A dry
run needs no process group, and almost no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatshard.buffer import Pool, Ticket
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.reduction import Goal, Reduction
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.intent import Intent
from flatshard.engine.units.unit import Unit, own
from flatshard.engine.weights.offload import Home
from flatshard.engine.weights.source import Source
from flatshard.policy import MixedPrecisionPolicy
from flatshard.tools.group_bytes import GroupBytes, PlannedCollective, TrainingSetup, groups_of
from flatshard.tools.model_shapes import ModelShape, ModuleCall
from flatshard.tools.timing import Estimate, StepClock


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


class DryRun:
    """A dry run of a model. `resting`, `peak`, `most_gathered` and `most_staging` are as in `Memory`."""

    def __init__(self, model: ModelShape, setup: TrainingSetup) -> None:
        groups = groups_of(model, setup)
        every = [group for unit in groups for group in unit]
        self.resting = Bytes(*(sum(getattr(group, name) for group in every) for name in ("main", "compute", "state")))
        self._now = self.peak = replace(self.resting, gradients=sum(group.accumulated for group in every))
        self.most_gathered = self.most_staging = 0
        self._is_noting = False
        self._groups = [[_Group(sizes, setup, self, number) for sizes in unit] for number, unit in enumerate(groups)]
        self._modules: dict[int, list[_Module]] = {}
        self._accumulates = setup.microbatches > 1
        self.clock: StepClock | None = None
        self.is_last = True  # this is the last micro-batch of a step
        self._refreshed: set[_Source] = set()
        self._model = model
        self._root = self._module(model.root)
        self._units = []
        for number, modules in self._modules.items():
            tables = frozenset(id(module) for module in modules if module.is_table)
            intent = Intent(unshard_in_backward=len(tables) < len(modules))
            mine, precision = self._groups[number], MixedPrecisionPolicy()
            unit = Unit(modules, mine, _NO_MESH, _CPU, precision, intent, find_root, setup.schedule)
            unit.tables = tables
            for module in modules:
                own(module, unit)
            self._units.append(unit)

    def step(self) -> None:
        """Run the last micro-batch of a step. One pass before it records the order of units. If there are several
        micro-batches, another one runs before it, because its last reduces are still in flight."""
        passes = [(False, True), *[(True, False)] * self._accumulates, (True, True)]
        for self._is_noting, is_last in passes:
            for unit in self._units:
                unit.set_batch(True, is_last)
            for group in (group for unit in self._groups for group in unit):
                group.gathers = 0
            self._root(torch.zeros(1)).sum().backward()

    def timed(self, clock: StepClock, microbatches: int) -> Estimate:
        """The estimated time of a step. Of many micro-batches, the first, the second and the last are run."""
        self.step()  # records the order of units
        self.clock = clock
        passes = min(microbatches, 3)
        for number in range(passes):
            self.is_last = number == passes - 1
            for unit in self._units:
                unit.set_batch(number == 0, self.is_last)
            began = clock.marks
            self._root(torch.zeros(1)).sum().backward()
            if number == 1:
                clock.repeat(microbatches - passes, began)
        groups = [group.sizes for unit in self._groups for group in unit]
        return clock.finish(groups, len(self._units) * microbatches)

    def launched(self, source: _Source, group: GroupBytes) -> Ticket:
        """Launch the all-gather of a group and, before the first one of a step, the refresh of its compute weights."""
        clock = self.clock
        if clock is None:
            return Ticket()
        launches = [] if source in self._refreshed else group.refreshes()
        self._refreshed.add(source)
        end = clock.launch("gather", [*launches, *group.gathers()])
        return Ticket(then=lambda: clock.wait(end))

    def moved(self, count: int) -> None:
        """Count bytes that encoding and decoding read and write."""
        if self.clock is not None:
            self.clock.move(count)

    def used(self, unit: int, group: GroupBytes, position: int, backward: bool) -> None:
        if self.clock is not None:
            self.clock.use(self._model.units[unit], group, position, backward)

    def _module(self, call: ModuleCall) -> _Module:
        module = _Module([self._module(inner) for inner in call.inner], self._groups[call.unit], call.is_table)
        self._modules.setdefault(call.unit, []).append(module)
        for group in self._groups[call.unit]:
            group.calls += 1
        return module

    def note(self, gradients: int = 0, gathered: int = 0, staging: int = 0) -> None:
        """Add changes of memory, in bytes."""
        if not self._is_noting:
            return
        was = self._now
        held = was.gradients + gradients, was.gathered + gathered, was.staging + staging
        self._now = now = Bytes(was.main, was.compute, was.state, *held)
        self.most_gathered = max(self.most_gathered, now.gathered)
        self.most_staging = max(self.most_staging, now.staging)
        self.peak = max(self.peak, now, key=lambda each: each.total)

    def launches(self) -> list[PlannedCollective]:
        """The collectives of the step that was run."""
        groups = [group for unit in self._groups for group in unit]
        return [launch for group in groups for launch in group.sizes.launches(group.gathers)]


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
                used = group.used_after(position)
                if used:
                    x = _Use.apply(group, position, x, *used)  # type: ignore[no-untyped-call]
        return x


class _Use(torch.autograd.Function):
    """Uses parameters of a group in forward, and creates their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, group: _Group, position: int, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.position, ctx.count = group, position, len(parameters)
        group.run.used(group.number, group.sizes, position, backward=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.group.run.used(ctx.group.number, ctx.group.sizes, ctx.position, backward=True)
        ctx.group.gradients_appear(ctx.position)
        return None, None, grads[0], *[torch.zeros(1) for _ in range(ctx.count)]


class _Group(ParamGroup):
    """A group whose parameters have one element each, and count as the bytes in ``sizes``."""

    def __init__(self, sizes: GroupBytes, setup: TrainingSetup, run: DryRun, unit: int) -> None:
        self.sizes, self.run, self.number = sizes, run, unit
        self.calls = 0  # forwards per pass that use the group
        self.gathers = 0  # all-gathers in this forward and backward
        self._appeared = 0  # calls of `gradients_appear` in this backward
        parameters = [nn.Parameter(torch.zeros(1), requires_grad=sizes.trainable) for _ in sizes.tensors]
        self.params = [ShardedParam("", [], parameter, parameter) for parameter in parameters]
        self.placements, self.is_extended = sizes.placements, False
        self.home = Home(_CPU)
        self.source, self.gathered_bytes = _Source(self), sizes.gathered
        self.gradients = _Gradients(self, setup)
        self.snapshot = self  # type: ignore[assignment]
        self.is_full, self.ticket, self._watched = False, None, False
        self.all_gather_comm = self._refreshed = None
        self.borrowers = []
        self.is_held = False
        self.park_mesh = None

    mesh = property(lambda self: _NO_MESH)
    state = property(lambda self: ())
    arriving_bytes = property(lambda self: self.sizes.passing if self.source.decodes else self.sizes.gathered)

    def has_changed(self) -> bool:
        return False

    def used_after(self, position: int) -> list[nn.Parameter]:
        pairs = zip(self.params, self.sizes.tensors)
        return [member.sharded for member, tensor in pairs if tensor.after == position]

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
        self._is_open = True
        self.is_resident = group.sizes.is_resident

    @property
    def decodes(self) -> bool:
        return bool(self._group.sizes.passing)

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        self._pool = pool
        self._group.gathers += 1
        self._is_open = not self.decodes
        self._add(self._group.arriving_bytes)
        return self._group.run.launched(self, self._group.sizes)

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
    def __init__(self, group: _Group, setup: TrainingSetup) -> None:
        self._group, self._accumulates = group, setup.microbatches > 1
        self.params, self.placements = group.params, group.placements
        self.expected = sum(member.sharded.requires_grad for member in self.params)
        self.on_arrival = self.direct = None
        self.main_grads = self  # type: ignore[assignment]
        self._arrived = set()

    has_partial = property(lambda self: False)

    def rest(self, always: bool = False) -> None:
        """Called as a method of `main_grads`; there is nothing to free."""

    def reduce(self, pool: Pool, goal: Goal, name: str, is_last: bool = False) -> Reduction:
        self.take()
        sizes, note = self._group.sizes, self._group.run.note
        ends = sizes.ends and goal is Goal.FINAL
        fresh = not self._accumulates or ends
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


_CPU = torch.device("cpu")


class _NoMesh:
    ndim = 0


_NO_MESH: Any = _NoMesh()
