"""What the units of one root share: lanes, pools, the program, and the state of the current pass."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from flatshard import _recording, _torch
from flatshard.buffer import Lane, Pool, destroy_unused_within, watch_over
from flatshard.engine import steps
from flatshard.engine.gradients.reduction import Goal
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.program import Pass, Program
from flatshard.engine.schedule.agreement import Agreement, Announcer, check_model, patience
from flatshard.engine.schedule.auto_formats import AutoFormats
from flatshard.engine.schedule.gathers import Gathers
from flatshard.engine.schedule.reduces import Reduces
from flatshard.engine.units.changes import absorb_moved
from flatshard.engine.units.leases import Lease
from flatshard.engine.units.unit import Phase, Unit, unit_with
from flatshard.engine.weights.offload import HostCopy, prepare_in_turns
from flatshard.policy import MixedPrecisionPolicy, SchedulePolicy
from flatshard.trust.record import PHASES, record


class Root:
    """What the units of one model share. They own it; its references to them are weak, or numbers."""

    has_optional = False  # some of its units are: `OptionalRoot`

    def __init__(self, units: Sequence[Unit], device: torch.device, policy: SchedulePolicy) -> None:
        self.policy = policy
        self.device = device
        self.is_last_backward = True  # `FSDPModule.set_is_last_backward`
        self.finalizes_by_hand = False  # `FSDPModule.set_manual_backward_finalization`
        self.finalizing: object | None = None  # of the handle of `finalize_backward`, until its wait
        self.program = Program([len(unit.groups) for unit in units], [unit.parent for unit in units])
        self.forwards = self.backwards = 0
        self._units = [weakref.ref(unit) for unit in units]
        of_units = [mesh for unit in units for mesh in (unit.mesh, *(group.mesh for group in unit.groups))]
        self.meshes = list(dict.fromkeys(of_units))  # in one order on all ranks
        checking = patience()
        self.program.checks = checking is not None
        # In check mode ranks compare over a separate lane, whose groups have a short timeout.
        gather_lane = Lane("gather", device)
        talk = gather_lane if checking is None else Lane("check", torch.device("cpu"), patience=checking)
        self.announcer = Announcer(self.program, talk)
        self.gathers = Gathers(self, units, gather_lane, policy, self.announcer)
        self._has_agreed = False  # the ranks have compared their current models
        self.reduces = Reduces(self, units, Pool(Lane("reduce", device)), policy, self.announcer)
        self.entry: int | None = None  # the outermost unit whose forward is running
        self._recomputed: int | None = None  # the last unit that was recomputed and is not yet in its backward
        # The step of this model, which ranks compare in check mode; and the optimizer steps of all models so far.
        self._step, self._taken = 1, steps.taken()
        self.task = -1  # the autograd graph task of the running backward
        # The callback at the end of the running backward. Autograd owns it: if it is freed uncalled, that has raised.
        self._end: weakref.ref[Callable[[], None]] | None = None
        self._auto = AutoFormats() if any(unit.policy.gather_format == "auto" for unit in units) else None
        if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            warnings.warn(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts communication and compute into one hardware queue, so gathers and "
                "reduces cannot overlap compute; unset it for sharded data parallelism",
                stacklevel=2,
            )

    @property
    def units(self) -> list[Unit]:
        """The units in the order of registration."""
        return self.gathers.units

    @property
    def joins(self) -> bool:
        """Whether a backward waits for all its reduces at its end."""
        return self.is_last_backward and not self.finalizes_by_hand

    def unit_at(self, index: int) -> Unit | None:
        """A unit by its number, if it still exists."""
        return self._units[index]()

    @property
    def gather_pool(self) -> Pool:
        return self.gathers.pool

    @property
    def gather_lane(self) -> Lane:
        return self.gathers.lane

    @property
    def reduce_pool(self) -> Pool:
        return self.reduces.pool

    @property
    def reduce_lane(self) -> Lane:
        return self.reduces.pool.lane

    def share(self, other: Root) -> None:
        """Use the lanes and pools of another root."""
        if self.program.running is not None or self.reduces.in_flight:
            raise RuntimeError("share_comm_ctx was called during a forward or backward; call it between steps")
        for unit in self.units:
            unit.free()
        self.gathers.share(other.gathers)
        self.reduces.pool = other.reduces.pool
        self.reduces.share_axes()

    # Passes

    def begin_forward(self, entry: Unit) -> None:
        """A forward starts at ``entry``. What an earlier pass has left is released, because main may have changed."""
        is_on_cuda = self.gather_lane.device.type == "cuda"
        if is_on_cuda and torch.cuda.is_current_stream_capturing() and not record.captures:
            raise RuntimeError(
                "a sharded model is called while a CUDA graph is captured, which would hold its collectives and its "
                "memory; capture the whole step with flatshard.capture instead"
            )
        if self.program.running is not None:
            self.recover()
        if self.reduces.steps.running:
            self.reduces.wait_for_all()
        self.count_step()
        if self._auto is not None and self._auto.begin_forward(self, self._step, torch.is_grad_enabled()):
            self._auto = None
        self.agree()
        _refuse_forward_within(self)
        self.entry = entry.index
        self.forwards += 1
        if _ran is not None:
            _ran.add(self)
        self.free_cleared_gradients()
        grads, copies = torch.is_grad_enabled(), list[HostCopy]()
        for unit in self.units:
            if unit.leases:  # without one, it is not gathered
                if unit.keeps():
                    continue
                unit.release(always=True)
            absorb_moved(unit)
            for group in unit.groups:
                if unit.is_first:
                    group.renew()
                if group.source.host_copy is not None:
                    copies.append(group.source.host_copy)
        if copies:  # main may be sent only if a backward follows: otherwise it may be written while it is read
            prepare_in_turns(copies, may_send_main=grads and entry.is_first)
        # The gathers of this pass read main after all work that has been enqueued, the optimizer's writes included.
        self.gathers.refresh_order()
        kind = Pass.FORWARD if grads else Pass.FORWARD_NO_GRAD
        record.phase = _PHASE[kind]
        self.program.is_profiled = _torch.profiling()
        self.program.begin(kind, entry.index)
        for unit in self.units:
            if Lease.USER in unit.leases and not unit.shows_full:
                self.gathers.launch(unit)
                unit.swap_in()

    def count_step(self) -> None:
        """Begin a new step if an optimizer has stepped."""
        if self._taken != steps.taken():
            self._taken, self._step = steps.taken(), self._step + 1
        record.step = self._step

    def count_no_step(self) -> None:
        """Do not count optimizer steps since the last `count_step`: they were captured."""
        self._taken = steps.taken()

    def free_cleared_gradients(self, always: bool = False) -> None:
        """Free the buffers of gradients that `zero_grad` has set to None."""
        always = always or not torch.is_grad_enabled()
        with _torch.PlainAttributes():
            for unit in self.units:
                for group in unit.groups:
                    grads = group.gradients.main_grads
                    if always or grads.buffer is not None:
                        grads.free_cleared(always)

    def end_forward(self, grads: bool) -> None:
        """The forward of ``entry`` has ended; ``grads``: its output may get a gradient."""
        self.entry = None
        for unit in self.units:
            if unit.phase is not Phase.RESTING or unit.may_recompute:
                unit.end_forward(grads)
        self.gathers.release_prefetched()
        self._end_pass()

    def begin_backward(self) -> None:
        """A gradient has reached a unit. The first call of a backward starts its pass."""
        if self._end is not None and self._end() is not None:
            return
        self.recover_if_broken()
        if _torch.in_compiled_backward():
            raise RuntimeError(
                "compiled autograd is not supported: parameters would be left without gradients. Set "
                "torch._dynamo.config.compiled_autograd to False; torch.compile of the model or its blocks works "
                "without it"
            )
        self.backwards += 1
        self.task = _torch.graph_task()
        _refuse_backward_of_two(self)
        self.reduces.begin(self.units)
        record.phase = _PHASE[Pass.BACKWARD]
        self.program.is_profiled = _torch.profiling()
        self.program.begin(Pass.BACKWARD, free=self.reduces.is_alike)
        end = functools.partial(_end_backward, weakref.ref(self))
        self._end = weakref.ref(end, self.reduces.join_later)
        _torch.at_end_of_backward(end)

    @property
    def is_nested(self) -> bool:
        """Within a backward: whether a segment is recomputed and differentiated as a separate graph."""
        return _torch.graph_task() != self.task

    def end_backward(self) -> None:
        """All gradients have been computed: reduce the remaining groups, wait for all reduces, and reset the units."""
        self._end = None
        self.reduces.reduce_remaining(self.units)
        for unit in reversed(self.units):
            if not unit.is_at_rest:
                unit.end_backward()
        self.gathers.release_prefetched()
        self._recomputed = None
        self.reduces.end_backward(joins=self.joins and any(unit.is_last for unit in self.units))
        self._end_pass()

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that backwards without gradient synchronization have left.

        Parameters that several roots share (the first and the last stage of a pipeline on one rank) are reduced when
        the last of these roots calls this.
        """
        self.program.begin(Pass.BACKWARD)
        self.reduces.is_one_of_several = True
        try:
            Root.end_backward(self)  # `OptionalRoot` would skip units
        finally:
            self.reduces.is_one_of_several = False
        for unit in self.units:
            for group in unit.needs:
                owner = unit_with(group)
                other = None if owner is None else root_of(owner)
                if other is None or other is self:
                    continue
                if group.gradients.waiting:  # accumulate them now: the caller may scale the gradients of this root next
                    group.gradients.reduce(self.reduces.pool, Goal.UNREDUCED, unit.name)
                if group.gradients.has_partial and not self.reduces.is_awaited_by_other_roots(group):
                    other.reduce_accumulated()

    def recover(self) -> None:
        """Drop the running pass, which an exception interrupted. Gradients of earlier micro-batches are kept."""
        broken = self.program.running is Pass.BACKWARD
        self.reduces.drop_steps()
        self.reduces.join()
        for unit in self.units:
            unit.recover(broken)
        self._recomputed, self.entry, self._end = None, None, None
        self.program.abandon()

    @property
    def is_broken(self) -> bool:
        """Whether an exception has interrupted the last backward, without a `recover` since."""
        return self._end is not None and self._end() is None

    def recover_if_broken(self) -> None:
        """`recover` if an exception has interrupted the last pass."""
        if self.is_broken or (self._end is None and self.entry is None and self.program.running is not None):
            self.recover()

    def reset(self) -> None:
        """Drop the running pass: nothing stays gathered, and unreduced gradients are dropped."""
        self.recover()
        self.finalizing = None
        for unit in self.units:
            unit.reset()

    # Gathers

    def need(self, unit: Unit, gather: bool = True, is_skipped: bool = False) -> None:
        """Make the full parameters of ``unit`` usable by the current stream, and prefetch the next units.

        Without ``gather``, only prefetch: the pass has reached the unit, but does not need its parameters.
        ``is_skipped``: the pass has gone by the unit. Launch its all-gather as other ranks do, but do not wait for it.
        """
        in_forward = self.program.running is not Pass.BACKWARD
        if self.program.checks and in_forward and not is_skipped:  # a recompute may have nothing to do
            self.announcer.announce("run", unit)
        if not (unit.is_optional and unit.index in self.program.needed):  # only the first use counts
            for skipped in map(self.unit_at, self.program.need(unit.index, self._comes_later)):
                if skipped is not None and Lease.PREFETCH in skipped.leases:
                    skipped.release()
        if self._recomputed == unit.index:
            self._recomputed = None  # its backward begins, or it is recomputed again
        if gather and in_forward and unit.is_outdated:
            self._drop_outdated(unit)
        if Lease.PREFETCH in unit.leases:  # it is gathered
            del unit.leases[Lease.PREFETCH]
        elif gather and not unit.is_gathered:
            self.gathers.launch(unit)
        self.gathers.prefetch(unit)
        if self.reduces.in_flight and in_forward and 2 * len(self.program.needed) > len(self._units):
            self.reduces.wait_for_all()  # gradients of the last micro-batch must not add to the peak of activations
        if not gather or is_skipped:
            return
        recording = _recording.active
        if recording is None:
            unit.swap_in()
            return
        with recording.around("forward" if in_forward else "backward", unit.name, self):
            unit.swap_in()

    def _drop_outdated(self, unit: Unit) -> None:
        """The running forward has written main since this unit was gathered: a momentum encoder, a step within it."""
        unit.leases.pop(Lease.PREFETCH, None)
        for group in unit.needs:
            if not group.is_full:
                group.release()
                if unit.is_first:
                    group.renew()
        self.gathers.refresh_order()

    def gather_outside_pass(self, units: Sequence[Unit]) -> None:
        """Launch the all-gathers of units outside of any pass. Their leases determine how long they stay gathered."""
        self.agree()
        for unit in units:
            absorb_moved(unit)
        self.gathers.refresh_order()
        for unit in units:
            for group in unit.groups:
                if unit.is_first and not group.is_full:
                    group.renew()
            self.gathers.launch(unit)

    def _comes_later(self, index: int) -> bool:
        unit = self.unit_at(index)
        return unit is not None and unit.is_ahead

    def hold(self, units: Sequence[Unit]) -> None:
        """Keep the compute weights of these units as they are."""
        self._check_rest("hold_weights")
        for group in [group for unit in units for group in unit.groups if group.by_rows or group.is_extended]:
            reason = "sharded with rows=True" if group.by_rows else "a tensor subclass, encoded in each gather"
            raise NotImplementedError(f"hold_weights: '{group.params[0].name}' is {reason}; leave it out")
        self.gathers.refresh_order()
        for unit in units:
            for group in unit.groups:
                group.hold(self.gathers.pool, unit.name)

    def refresh(self, units: Sequence[Unit], only: Sequence[ParamGroup] | None = None) -> None:
        """Start to update the compute weights of these units, or of these groups, from main."""
        self._check_rest("refresh_weights")
        self.gathers.refresh_order()
        for unit in units:
            for group in unit.groups:
                if only is None or group in only:
                    group.refresh(self.gathers.pool, unit.name)

    def set_precision(self, units: Sequence[Unit], policy: MixedPrecisionPolicy) -> None:
        """Change the dtypes of these units, except that of main."""
        self._check_rest("set_mp_policy")
        for unit in units:
            for group in unit.groups:
                group.check_policy(policy)
        for unit in units:
            unit.release()
            unit.policy = policy
            for group in unit.groups:
                group.set_policy(policy)
        self._has_agreed = False
        if policy.gather_format == "auto":
            self._auto = AutoFormats()

    def choose_formats(self) -> bool:
        """Choose the formats of units with ``gather_format="auto"``. Returns False if that needs further steps."""
        if self._auto is not None and self._auto.choose(self):
            self._auto = None
        return self._auto is None

    def _check_rest(self, method: str) -> None:
        self.recover_if_broken()
        if self.program.running is not None:
            raise RuntimeError(
                f"{method} was called during a {self.program.running.value}; call it between passes or, if an "
                "exception interrupted that pass, after reset() on the root module"
            )

    def keep_recomputed(self, unit: Unit) -> None:
        """Keep a recomputed unit gathered, because its backward usually is next. Only the last such unit is kept."""
        earlier, self._recomputed = self._recomputed, unit.index
        other = None if earlier is None or earlier == unit.index else self.unit_at(earlier)
        if other is not None and not other.in_backward and Lease.USER not in other.leases:
            other.release()

    def unit_left(self, unit: Unit) -> None:
        """The running backward has left a unit, so the gradients of its groups are complete."""
        self.program.left.add(unit.index)
        for number in unit.numbers:
            self.program.turns.mark(number)
        self.reduces.reduce_due()

    def group_complete(self, number: int) -> None:
        """All gradients of a group have arrived."""
        self.reduces.group_complete(number)

    def reshard_later(self, unit: Unit, grads: bool) -> None:
        """Reshard an optional unit after its forward."""
        unit.leave(keep=False, grads=grads)

    def check_forward(self, forward: int) -> None:
        """The running backward has reached a call of this forward, given by number."""

    # Agreement

    def agree(self) -> None:
        """Check that all ranks have the same model, before the first launch after a change of it."""
        if self._has_agreed:
            return
        lane = self.announcer.lane
        if watch_over(lane.device):
            for unit in self.units:
                absorb_moved(unit)  # assigned parameters count as written
            check_model(self.units, self.policy, lane, [mesh for mesh in self.meshes if mesh.ndim])
        self._has_agreed = True
        if self.announcer.agreement is not None:
            return
        self.announcer.agreement = Agreement(lane, self.meshes)
        for mesh in self.meshes:
            if mesh.ndim:
                destroy_unused_within(mesh)  # groups of models that have been freed
        for used, pool in ((self.gather_lane, self.gather_pool), (self.reduce_lane, self.reduce_pool)):
            self.policy.connect(used, pool, self.meshes)

    def _end_pass(self) -> None:
        """The running pass has ended."""
        if self.gathers.rows_lane is not self.gathers.lane:
            self.program.has_launched = True  # a look-up
        self.announcer.end_pass(self.units[0], self.gathers.lane, self.reduces.pool.lane)
        self.program.end(is_held=True in [Lease.USER in unit.leases for unit in self.units])
        record.phase = 0


def root_of(unit: Unit) -> Root | None:
    """The root of a unit, if it already has one."""
    assert unit.root is None or isinstance(unit.root, Root)
    return unit.root


_ran: set[Root] | None = None  # roots whose forwards have started in `roots_that_ran`


@contextmanager
def roots_that_ran() -> Iterator[list[Root]]:
    """A list that contains, after the body, the roots of which a forward has started within it."""
    global _ran
    before, _ran, found = _ran, set(), list[Root]()
    try:
        yield found
    finally:
        found += _ran
        _ran = before


WITH_OPTIONAL: weakref.WeakSet[Root] = weakref.WeakSet()  # roots that have optional units


def _refuse_forward_within(root: Root) -> None:
    """Raise if a forward starts within the forward of another model that has optional units."""
    for other in WITH_OPTIONAL:
        if other is not root and other.entry is not None:
            raise RuntimeError(
                "a sharded model is called within the forward of another one that has optional units: ranks that skip "
                "a unit would launch collectives in another order. Call it before or after that forward"
            )


def _refuse_backward_of_two(root: Root) -> None:
    """Raise if a backward that starts also goes through another model with optional units that it may skip."""
    for other in WITH_OPTIONAL:
        # It has reached that model, but not yet its root.
        if other is not root and other._end is not None and other.task == root.task and 0 not in other.program.left:
            raise RuntimeError(
                "one backward goes through two sharded models, and the first that it reaches has optional units: ranks "
                "that skip a unit would launch collectives in another order. Make both submodules of one module and "
                "call fully_shard on that, or call backward for each"
            )


_PHASE = {kind: PHASES.index(kind.value) for kind in Pass}


@_torch.uncompiled
def _end_backward(ref: weakref.ref[Root]) -> None:
    root = ref()
    if root is not None:
        with _torch.Untransformed() if _torch.transforming() else nullcontext():
            root.end_backward()
