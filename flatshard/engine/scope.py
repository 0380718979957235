"""What the units of one root share: lanes, pools, the program, and where the current pass stands."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from flatshard import _torch, _waits
from flatshard.buffer import Lane, Planner, Pool
from flatshard.engine.gradients import Reduction
from flatshard.engine.group import Group
from flatshard.engine.keep import gathered_bytes
from flatshard.engine.schedule import Pass, Program
from flatshard.policy import SchedulePolicy

if TYPE_CHECKING:
    from flatshard.engine.unit import Unit


class _Weak:
    """An attribute that holds a unit weakly: units own their scope."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_weak_{name}"

    def __get__(self, scope: Scope, owner: type) -> Unit | None:
        ref: weakref.ref[Unit] | None = scope.__dict__.get(self._name)
        return None if ref is None else ref()

    def __set__(self, scope: Scope, unit: Unit | None) -> None:
        scope.__dict__[self._name] = None if unit is None else weakref.ref(unit)


class Scope:
    """Owned by its units, and knows them weakly: nothing here keeps a model alive."""

    entry = _Weak()  # the outermost unit whose forward is running
    _retained = _Weak()  # gathered by a recompute, its backward to come

    def __init__(self, units: Sequence[Unit], device: torch.device, policy: SchedulePolicy) -> None:
        self.policy = policy
        self.device = device
        self.joins = True  # a backward ends with all its reduces done
        self.main_event: Any = None  # gathers of the next forward wait for it, and not for the current stream
        self.gather_lane = Lane("gather", device)
        self.reduce_lane = Lane("reduce", device, own_groups=policy.separate_groups)
        self.gather_pool = Pool(self.gather_lane, Planner() if policy.planned_pool else None)
        self.reduce_pool = Pool(self.reduce_lane)
        self.program = Program(len(units))
        self.reductions = 0
        self._units = [weakref.ref(unit) for unit in units]
        self._ahead: set[int] = set()  # gathered by prefetch and not needed yet
        self._reducing: deque[Reduction] = deque()
        self._agreed = False
        self._end: weakref.ref[_End] | None = None  # what is to happen at the end of the running backward
        self.resolve()
        if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            warnings.warn(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts communication and compute into one hardware queue, so gathers and "
                "reduces cannot overlap compute; unset it for sharded data parallelism",
                stacklevel=2,
            )

    @property
    def units(self) -> list[Unit]:
        """The units in the order of registration."""
        return [unit for unit in (ref() for ref in self._units) if unit is not None]

    def resolve(self) -> None:
        """Let what units were told about all reduces count: the highest number, the last word on process groups."""
        highest = max((unit.max_reducing for unit in self.units if unit.max_reducing is not None), default=None)
        self.max_reducing = self.policy.max_reducing if highest is None else highest
        told = [unit.separate_groups for unit in self.units if unit.separate_groups is not None]
        self.reduce_lane.own_groups = any(told) if told else self.policy.separate_groups

    def share(self, other: Scope) -> None:
        """Communicate over the lanes, and from the pools, of another scope."""
        if self.program.running is not None or self._reducing:
            raise RuntimeError("a model cannot change its lanes during a forward or backward")
        for unit in self.units:
            unit.release()
        self.gather_lane, self.reduce_lane = other.gather_lane, other.reduce_lane
        self.gather_pool, self.reduce_pool = other.gather_pool, other.reduce_pool

    # Passes

    def begin_forward(self, entry: Unit) -> None:
        """A forward starts at ``entry``. What is left of an earlier pass is cleared: its weights may be out of date."""
        if self.program.running is not None:
            self.reset()
        self.entry = entry
        for unit in self.units:
            if unit.kept and not (unit.keeps_for_next and unit.is_first):
                continue
            unit.release()
            unit.absorb_moved()
            if unit.is_first:
                for group in unit.groups:
                    group.mark_stale()
        self._ahead.clear()
        self.gather_pool.settle()
        # The gathers of this pass read main after all that has been enqueued so far, the optimizer's writes included.
        self.refresh_order()
        self.program.begin(Pass.FORWARD if torch.is_grad_enabled() else Pass.FORWARD_NO_GRAD, entry.index)

    def end_forward(self) -> None:
        """The forward of ``entry`` is over."""
        self.entry = None
        for unit in self.units:
            unit.forward_over()
        self._release_ahead()
        self.program.end()

    def begin_backward(self) -> None:
        """A gradient has reached a unit. The first call of a backward starts its pass."""
        if self._end is not None:
            if self._end() is not None:
                return
            self.reset()  # an exception broke the last backward off, and no forward has been since
        for unit in self.units:
            unit.backward_done = False
        self.program.begin(Pass.BACKWARD)
        end = _End(self)
        self._end = weakref.ref(end)
        _torch.at_end_of_backward(end)

    def end_backward(self) -> None:
        """All gradients are there: reduce what is left, order the current stream after all reduces, rest."""
        self._end = None
        for unit in reversed(self.units):
            unit.finish_backward()
            unit.reduce_unused()
            unit.flush()
            unit.rest()
        self._release_ahead()
        self._retained = None
        while self._reducing and (self.joins or any(reduction.then is not None for reduction in self._reducing)):
            self._land()
        self.program.end()
        if not self._agreed:
            self._agree()

    def flush(self, units: Sequence[Unit]) -> None:
        """Reduce what waits in these units for a backward that goes all the way: the last micro-batch had none."""
        for unit in reversed(self.units):
            if unit in units:
                unit.flush()
        while self._reducing:
            self._land()

    def reset(self) -> None:
        """Give up the running pass, whatever it was: nothing stays gathered, no unreduced gradient is kept."""
        while self._reducing:
            self._land()
        for unit in self.units:
            unit.reset()
        self._ahead.clear()
        self._retained, self.entry, self._end = None, None, None
        self.gather_pool.forget()
        self.program.abandon()

    # Gathers

    def need(self, unit: Unit, gather: bool = True) -> None:
        """Make the full parameters of ``unit`` usable by what follows, and start gathering what comes next.

        Without ``gather``, the first is left out: the unit's turn has come, but not for its parameters.
        """
        self.program.need(unit.index)
        self._ahead.discard(unit.index)
        if self._retained is unit:
            self._retained = None  # in use again
        if gather:
            self.gather(unit)
        room = self.policy.max_gathered - 1 - len(self._ahead)
        for other in self._next(unit, room):
            self._ahead.add(other.index)
            self.gather(other)
        if not gather:
            return
        waits = _waits.recorder()
        if waits is None:
            unit.swap_in()
            return
        phase = "backward" if self.program.running is Pass.BACKWARD else "forward"
        with waits.around(f"{phase} gather {unit.name}", self.device):
            unit.swap_in()

    def gather_ahead(self, unit: Unit) -> None:
        """Start gathering what comes next, in the place of ``unit``, which is done and released."""
        if unit.prefetch_in_backward is None:
            for other in self._next(unit, self.policy.max_gathered - len(self._ahead)):
                self._ahead.add(other.index)
                self.gather(other)

    def gather(self, unit: Unit) -> None:
        """Start gathering a unit. No effect on what has been gathered."""
        if unit.is_gathered:
            return
        # What is made here outlives the pass; made under inference mode, training could never write it again.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self._launch_gather(unit)

    def _launch_gather(self, unit: Unit) -> None:
        lasting = unit.is_kept_for_next and self.program.running is Pass.BACKWARD
        with self.traced("gather", unit):
            for group in unit.needs:
                group.gather(self.gather_pool, unit.name, lasting)

    def refresh_order(self) -> None:
        """Gathers launched from now on read main after all that the current stream has been given."""
        event, self.main_event = self.main_event, None
        with self.gather_lane.entered((self.gather_lane.mark() if event is None else self.gather_lane.ticket(event),)):
            pass

    def retain(self, unit: Unit) -> None:
        """Keep a recomputed unit gathered for its backward, which usually is next; only the last one is kept."""
        earlier, self._retained = self._retained, unit
        if earlier is not None and earlier is not unit and not earlier.in_backward:
            earlier.release()

    def _next(self, unit: Unit, room: int) -> Iterator[Unit]:
        """What to gather ahead: what the user said, or what the recorded order says, if there is room for so many.

        Each has been gathered when the next is asked for: beyond ``room``, the bytes in the pool decide.
        """
        if not self.policy.prefetch:
            return
        explicit = unit.prefetch_in_backward if self.program.running is Pass.BACKWARD else unit.prefetch_in_forward
        if explicit is not None:
            yield from (other for other in (ref() for ref in explicit) if other and not other.is_gathered)
            return
        most = self.policy.max_gathered_bytes
        if room <= 0 and not most:
            return
        for index in self.program.upcoming():
            other = self._units[index]()
            if other is None or other is unit or index in self._ahead:
                continue
            if other.is_gathered:
                return  # the next one is there; what comes after it is gathered when that is needed
            if self.program.running is Pass.BACKWARD and (other.backward_done or not other.unshard_in_backward):
                continue  # a recompute passed through it, or it needs none: nothing of this backward will need it
            if room <= 0 and self.gather_pool.live_bytes + gathered_bytes(other) > most:
                return
            yield other
            room -= 1
            if room <= 0 and not most:
                return

    def _release_ahead(self) -> None:
        """Give back what was gathered ahead and not needed after all."""
        for index in sorted(self._ahead):
            unit = self._units[index]()
            if unit is not None:
                unit.release()
        self._ahead.clear()

    # Reduces

    def reduce(self, unit: Unit, group: Group) -> None:
        """Start reducing the gradients of one group."""
        while len(self._reducing) >= self.max_reducing:
            self._land()
        with self.traced("reduce", unit):
            self._reducing.append(group.gradients.reduce(self.reduce_pool, unit.goal, unit.name))
        self.reductions += 1
        if not self.policy.async_reduce:
            self._land()

    def _land(self) -> None:
        """Order the current stream after the oldest reduce; what it read may be freed."""
        reduction = self._reducing.popleft()
        waits = _waits.recorder()
        if waits is None:
            reduction.ticket.wait()
        else:
            with waits.around(f"reduce {reduction.name}", self.device):
                reduction.ticket.wait()
        if reduction.then is not None:
            reduction.then()

    def _agree(self) -> None:
        """Compare the recorded program with the other ranks', once. A difference would hang sooner or later."""
        self._agreed = True
        digest = self.program.digest()
        for mesh in {unit.mesh for unit in self.units}:
            for axis in range(mesh.ndim):
                mine = torch.tensor([digest], dtype=torch.int64, device=self.device)
                theirs = torch.empty(mesh.size(axis), dtype=torch.int64, device=self.device)
                lane = self.gather_lane
                lane.all_gather(lane.group(mesh, axis), [theirs], [mine], after=(lane.mark(),), name="agree").wait()
                other = [rank for rank, value in enumerate(theirs.tolist()) if value != digest]
                if other:
                    raise RuntimeError(
                        f"ranks {other} of mesh axis {axis} ran the units in another order than this rank; all ranks "
                        "must run the same units in the same order"
                    )

    def traced(self, what: str, unit: Unit) -> AbstractContextManager[Any]:
        """A context that names what its body enqueues, for profilers."""
        return torch.profiler.record_function(f"flatshard::{what} {unit.name}") if _torch.profiling() else _UNTRACED


_UNTRACED = nullcontext()


class _End:
    """Called by autograd at the end of a backward. Autograd owns it: gone uncalled, it tells of an exception."""

    def __init__(self, scope: Scope) -> None:
        self._scope = weakref.ref(scope)

    @_torch.uncompiled
    def __call__(self) -> None:
        scope = self._scope()
        if scope is not None:
            with _torch.Untransformed() if _torch.transforming() else nullcontext():
                scope.end_backward()
