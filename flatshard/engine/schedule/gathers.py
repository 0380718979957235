"""The all-gathers of a root: when they are launched, and which of them before a pass reaches their unit."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flatshard.buffer import CoalescedGather, Lane, Pool
from flatshard.engine.program import Pass
from flatshard.engine.schedule.agreement import Announcer
from flatshard.engine.units.leases import Lease
from flatshard.engine.units.unit import RootProtocol, Unit, unit_of
from flatshard.policy import SchedulePolicy


class Gathers:
    """The gather lane and pool of a root, and its prefetch. Units are numbers, as in `Program`."""

    def __init__(
        self, root: RootProtocol, units: Sequence[Unit], lane: Lane, policy: SchedulePolicy, announcer: Announcer
    ) -> None:
        self.lane = lane
        self.main_event: Any = None  # all-gathers of the next forward wait for it instead of the current stream
        # Look-ups must not queue behind prefetched all-gathers: the host may wait for a look-up.
        looks_up = any(unit.rows is not None for unit in units)
        own_rows = policy.separate_groups is not False
        self.rows_lane = Lane("rows", lane.device, own_groups=own_rows) if looks_up else lane
        self.pool = Pool(lane)
        if any(group.source.is_gathered_twice for unit in units for group in unit.groups):
            # All-gathers along the inner axis must not queue behind the refresh along the outer one after a step.
            self.pool.refresh_lane = Lane("refresh", lane.device)
        self._policy, self._program, self._announcer = policy, root.program, announcer
        self._units = [weakref.ref(unit) for unit in units]
        self._apart = frozenset(_experts(units)) if len(root.meshes) > 1 else frozenset[int]()
        self._keeps_for_next = bool(policy.keep_for_next) and not root.has_optional
        self._is_alone = all(mesh.size() == 1 for mesh in root.meshes)

    @property
    def units(self) -> list[Unit]:
        """The units in the order of registration."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def share(self, other: Gathers) -> None:
        """Use the lanes and the pool of another root."""
        self.lane, self.rows_lane, self.pool = other.lane, other.rows_lane, other.pool

    def refresh_order(self) -> None:
        """Order later all-gathers and look-ups after all work on the current stream, so that they read main after it.

        With `main_event`, order them after that event instead; then look-ups wait for it too.
        """
        event, self.main_event = self.main_event, None
        for lane in (self.lane,) if event is None else (self.lane, self.rows_lane):
            with lane.entered((lane.mark() if event is None else lane.ticket(event),)):
                pass
        if self.pool.refresh_lane is not self.lane:  # gathers may still read the buffers that a refresh writes
            with self.lane.entered():
                so_far = self.lane.mark()
            with self.pool.refresh_lane.entered((so_far,)):
                pass

    def launch(self, unit: Unit, is_prefetch: bool = False) -> None:
        """Launch the all-gather of a unit. No effect if it is already gathered.

        ``is_prefetch``: the running pass reaches the unit later.
        """
        program = self._program
        if program.announces and any(group.launches for group in unit.needs):
            size = sum(group.arriving_bytes for group in unit.needs)
            self._announcer.announce(f"gather {size} bytes of" if program.checks else "gather", unit)
        program.gathered.append(unit.index)
        if not program.has_launched:
            program.has_launched = any(group.launches for group in unit.needs)
        lasting = unit.keeps_for_next and not unit.is_last and program.running is Pass.BACKWARD
        if unit.needs[1:] or program.is_profiled or torch.is_inference_mode_enabled():
            self._launch_all(unit, lasting)
        elif unit.needs:
            unit.needs[0].gather(self.pool, unit.name, lasting)
        if unit.may_stay or unit.leases or program.running is not Pass.BACKWARD:
            unit.record_main_state()
        if is_prefetch:
            unit.leases[Lease.PREFETCH] = True

    def _launch_all(self, unit: Unit, lasting: bool) -> None:
        """Launch the all-gathers of all groups as one, named in a profile."""
        # Tensors created here outlive the pass; training could not write tensors of inference mode.
        training = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        naming = torch.profiler.record_function if self._program.is_profiled else nullcontext
        absent = [group for group in unit.needs if group.ticket is None]
        try:
            with training, naming(f"flatshard::gather {unit.name}"), CoalescedGather(self.lane):
                for group in absent:
                    group.gather(self.pool, unit.name, lasting)
        except BaseException:
            for group in absent:
                group.cancel()
            raise

    def prefetch(self, unit: Unit, is_released: bool = False) -> None:
        """Prefetch the units that the user has set, or else the next units of the recorded order.

        ``is_released``: a backward has released ``unit``, and the next units take its place.
        """
        if not self._policy.prefetch:
            return
        backward = self._program.running is Pass.BACKWARD
        explicit = unit.intent.prefetch_in_backward if backward else unit.intent.prefetch_in_forward
        if explicit is not None:
            for module in () if is_released else (ref() for ref in explicit):  # they were prefetched when it began
                other = None if module is None else unit_of(module)
                if other is not None and not other.is_gathered and other.rows is None:
                    self.launch(other, is_prefetch=True)
            return
        if backward and self._is_alone and not self._program.left:
            return  # beside the loss it would add to the peak; one rank waits only for its own copy of one unit
        room = self._policy.max_gathered - (unit.index in self._apart if is_released else 1)
        bytes_ahead = self._policy.max_gathered_bytes
        for index in self._program.upcoming:
            if room <= 0 and not bytes_ahead:
                return
            other = self._units[index]()
            if other is None or other is unit:
                continue
            if Lease.PREFETCH in other.leases:
                room -= index not in self._apart
                continue
            if other.is_gathered:
                return  # the next unit is gathered; the one after it is prefetched when the next is needed
            if not (other.unshard_in_backward if backward else other.unshard_in_forward):
                continue
            if backward and index in self._program.left:
                continue  # a recompute has used it, or it needs no gather: this backward does not need it
            if room <= 0 and self._bytes_with(unit, other) > bytes_ahead:
                return
            self.launch(other, is_prefetch=True)
            room -= index not in self._apart
        if backward and self._keeps_for_next:
            # Prefetch for the next micro-batch, which starts with units that this backward does not gather.
            for other in self.units:
                kept = other.keeps_for_next and not other.is_last
                if kept and not other.unshard_in_backward and not other.is_gathered:
                    self.launch(other)

    def _bytes_with(self, unit: Unit, other: Unit) -> int:
        """The peak memory of gathered weights if ``other`` is prefetched while ``unit`` is used.

        Units that contain others, and units that are kept, stay decoded when the next unit is decoded.
        """
        ahead = [each for each in self.units if Lease.PREFETCH in each.leases]
        staying = one = 0
        for each in (unit, *ahead, other):
            decoded = sum(g.gathered_bytes for g in each.groups if g.source.decodes and not g.is_full)
            if each.nests or each.stays:
                staying += decoded
            else:
                one = max(one, decoded)
        arriving = sum(group.arriving_bytes for group in other.groups)
        return self.pool.live_bytes + arriving + staying + one

    def release_prefetched(self) -> None:
        """At the end of a pass: release the prefetched units that it has not reached."""
        for unit in self.units:
            if Lease.PREFETCH in unit.leases:
                unit.release()

    def look_up(self, unit: Unit, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of ``tokens`` in a unit that is an embedding by rows.

        All-gathers that are launched later do not share the network with it: they are needed later.
        """
        assert unit.rows is not None
        announce = functools.partial(self._announcer.announce, unit=unit) if self._program.announces else None
        found = unit.rows.look_up(tokens, self.rows_lane, unit.name, announce)
        with self.lane.after_current_stream():
            pass
        return found


def _experts(units: Sequence[Unit]) -> Iterator[int]:
    """The units on another mesh than the unit around them, unless that is the root: experts in their blocks.

    They do not count toward the prefetch limit. The host waits for token counts before experts run, and the units after
    them must be launched before that wait.
    """
    for number, unit in enumerate(units):
        around = [other for other in units[1:] if unit.name.startswith(f"{other.name}.")]
        if around and around[-1].mesh != unit.mesh:
            yield number
