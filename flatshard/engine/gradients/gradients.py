"""The gradients of one group: collected from autograd, reduced over some or all axes, and set on the parameters.

Gradients have up to three placements on a mesh:

    unreduced   (Partial, Partial)    every rank has its own, full size
    resting     Placements.gradient   between micro-batches, e.g. (Partial, Flat) under HSDP
    final       Placements.optimizer  what the optimizer reads, e.g. (Replicate, Flat)

A backward reduces its gradients to one of them. Gradients that are not final are accumulated in a buffer of their
placement, and are added to the next backward that reduces further. So every axis is reduced once for all micro-batches
before it.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeAlias

import torch

from flatshard import _torch
from flatshard.buffer import DONE, DBuffer, Pool, Ticket
from flatshard.buffer.collectives import one_after_other
from flatshard.buffer.tickets import Action
from flatshard.engine.gradients.collecting import Collected
from flatshard.engine.gradients.main_grads import STAYING, MainGrads, Reduced, call_finished, change_gradients, has_gaps
from flatshard.engine.gradients.reduction import Goal, OnFinal, Reduction, Stage, Uses, stages_to, sum_dtype
from flatshard.engine.gradients.staging import Direct, Given, add_to, fill_runs, sole_owners
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.weights.formats import Formats
from flatshard.engine.weights.offload import Home
from flatshard.layout import Placement, is_sharded
from flatshard.policy import MixedPrecisionPolicy, Placements

GradientScale: TypeAlias = Literal["mean", "sum"] | float
_accumulating: weakref.WeakSet[Gradients] = weakref.WeakSet()  # those of which a backward was not reduced all the way


def partial_gradients() -> list[Gradients]:
    """The `Gradients` of all models that have unreduced gradients of earlier backwards."""
    return [gradients for gradients in _accumulating if gradients.has_partial]


class Gradients(Collected):
    """Reduces the gradients of the params of a group, and sets them as ``.grad``.

    The result is the mean over ranks (``scale="mean"``), the sum, or the sum times a number.
    """

    on_final: OnFinal | None = None  # called when the gradients of the last micro-batch are complete
    is_streamed = False  # `on_final` copies weights or optimizer state, on separate lanes

    def __init__(
        self,
        params: Sequence[ShardedParam],
        main: DBuffer,
        placements: Placements,
        policy: MixedPrecisionPolicy,
        compute: torch.dtype,
        home: Home,
        formats: Formats,
    ) -> None:
        super().__init__(params, main, home)
        self.placements = placements
        self.scale: GradientScale = "mean"
        self.sums_only = False  # collectives sum; the mean is computed afterwards
        self.counts_unused = False  # a missing gradient is zero, and is shown
        self.takes_part = False  # it may be reduced although this rank has used none of its params
        self.comm: Any = None  # a `ReduceScatter` of torch's to use
        # `FSDPModule.set_all_reduce_hook`, and the stream to call it on.
        self.hook: tuple[Callable[[torch.Tensor], None], torch.Stream | None] | None = None
        # Per segment, the tensor that fills it, if one does, and its number of elements.
        sizes = [segment.piece * main.layout.num_shards for segment in main.layout.segments]
        self._segments = list(zip(sole_owners(main.layout), sizes))
        # After this many stages, gradients have `Placements.gradient`.
        self._rests_after = sum(is_sharded(placement) for placement in placements.gradient)
        self._resting: DBuffer | None = None
        self._rested = DONE  # of the last reduce into it
        self._rest_factor = 1.0  # times the sum over the ranks that it is reduced over
        self._uses = Uses(len(params))
        self.set_dtypes(policy, compute, formats)

    def configure(self, **settings: object) -> None:
        """Replace settings of the reduces, given as attributes."""
        self.__dict__.update(settings)
        self._derive()

    def take_settings(self, other: Gradients) -> None:
        """Copy the settings of the object that this one replaces."""
        names = ("on_arrival", "scale", "sums_only", "counts_unused", "takes_part", "comm", "hook")
        self.configure(**{name: getattr(other, name) for name in names})
        self.direct = None if other.direct is None else Direct()
        self.main_grads.take_settings(other.main_grads)

    def set_dtypes(self, policy: MixedPrecisionPolicy, compute: torch.dtype, formats: Formats) -> None:
        """Reduce and keep gradients in the dtypes of a policy; ``compute`` is the dtype of full parameters."""
        self.grad_dtype = policy.grad_of(self.main.dtype, compute)
        self.reduce_dtype = policy.reduce_of(compute, self.grad_dtype)
        self.rests_in = policy.resting_of(self.grad_dtype, self.reduce_dtype)
        self._stages = self._plan(formats)
        # Elements behind reduced gradients, for the uses.
        self._room = len(self.params) * max(stage.room for stage in self._stages)
        self._derive()
        known: MainGrads | None = self.__dict__.get("main_grads")
        if known is None or known.dtype != self.grad_dtype or known.room < self._room:
            self.main_grads = MainGrads(self.params, self.main, self.grad_dtype, self.home, self._room)
            if known is not None:
                self.main_grads.take_settings(known)
            for param in self.params if known is not None and known.dtype != self.grad_dtype else ():
                _torch.allow_grad_of(param.sharded, self.main.dtype)  # `show` allows others

    def _plan(self, formats: Formats) -> list[Stage]:
        return stages_to(self.main.mesh, self.placements.optimizer, formats, self.reduce_dtype)

    @property
    def full_bytes(self) -> int:
        """The size of the input of a reduce."""
        return self.layout.buffer_numel(self.layout.num_shards) * self.reduce_dtype.itemsize

    @property
    def what(self) -> str:
        """What this rank announces before a reduce."""
        return "reduce"

    @property
    def is_encoded(self) -> bool:
        """Whether the reduce over some axis sends encoded gradients."""
        return any(stage.is_encoded for stage in self._stages)

    def _result(self, number: int, stages: Sequence[Stage]) -> torch.dtype:
        """The dtype of a stage's result: the sum of encoded gradients is in float32, unless a plain stage follows."""
        goes_on = number + 1 < len(stages) and not stages[number + 1].is_encoded
        return sum_dtype(self.reduce_dtype) if stages[number].is_encoded and not goes_on else self.reduce_dtype

    def _derive(self) -> None:
        """Derive the reduce operations and the factors of their inputs and results, which every reduce reads.

        In float16 the sum of a few large numbers is infinite, and a small number divided by all ranks is 0. So half of
        the division is done before the sum and half after it. The factor is a power of two, so that it adds no
        rounding.
        """
        half = self.reduce_dtype is torch.float16
        self._op: Literal["avg", "sum"] = "avg" if self.scale == "mean" and not (self.sums_only or half) else "sum"
        multiple = 1.0 / self.main.mesh.size() if self.scale == "mean" else 1.0  # of the sum over ranks
        if isinstance(self.scale, float):
            multiple = self.scale
        self._before = 2.0 ** -math.ceil(-math.log2(abs(multiple)) / 2) if half and 0.0 < abs(multiple) < 1.0 else 1.0
        self._factor = 1.0 if self._op == "avg" else multiple / self._before
        # Resting gradients are scaled again, like those of the next backwards.
        ranks = math.prod(self.main.mesh.shape[self.main.mesh.ndim - self._rests_after :])
        known, self._rest_factor = self._rest_factor, self._before / (ranks if self._op == "avg" else 1)
        if self._resting is not None and self._rest_factor != known:
            self._rested.wait()
            self._resting.local.mul_(self._rest_factor / known)

    @property
    def has_partial(self) -> bool:
        """Whether gradients of earlier backwards wait for a further reduce."""
        return self._unreduced is not None or self._resting is not None

    @property
    def partial_params(self) -> list[ShardedParam]:
        """The params that have such gradients, even if they are frozen now, or may get them."""
        pairs = enumerate(self.params)
        return [param for index, param in pairs if index in self._used or param.sharded.requires_grad]

    def drop_partial(self) -> None:
        """Also drop gradients that earlier backwards left unreduced."""
        self._unreduced = self._resting = None
        self._used.clear()
        self._drop_written()

    def goal(self, goal: Goal) -> Goal:
        """How far the gradients of this group are reduced for the ``goal`` of its unit."""
        if goal is Goal.REST and self.placements.gradient == self.placements.optimizer:
            return Goal.FINAL  # nothing rests on the way
        if goal is Goal.REST and not is_sharded(self.placements.gradient[-1]):
            return Goal.UNREDUCED  # the innermost axis rests unreduced, so all of it does
        return goal

    def reduce(self, pool: Pool, goal: Goal, name: str, is_last: bool = False) -> Reduction:
        """Start to reduce gradients that have arrived to ``goal``, one of `goal`. A missing gradient counts as zero.

        ``is_last``: of the micro-batches of a step, so that `on_final` may be called.

        A gradient that autograd left in the reduce dtype, and whose segment has no padding, is sent from where it is;
        the others are copied into a staging buffer first.
        """
        gradients = self.take()
        self._used |= {index for index, gradient in enumerate(gradients) if gradient is not None}
        if self.counts_unused:
            self._used.update(index for index, param in enumerate(self.params) if param.sharded.requires_grad)
        if self.direct is not None and self.direct.written:
            gradients = self._join_written(self.direct, gradients)
        if goal is not Goal.FINAL:
            _accumulating.add(self)
        if goal is Goal.UNREDUCED:
            self._add_unreduced(gradients)
            return Reduction(pool, name)
        reduction = Reduction(pool, name, self._op, self.comm)
        if goal is Goal.REST:
            self._reduce_to_rest(gradients, reduction)
        else:
            self._reduce_to_final(gradients, reduction, is_last)
        return reduction

    # Stopping short

    def _reduce_to_rest(self, gradients: Given, reduction: Reduction) -> None:
        pool, stages, lane = reduction.pool, self._stages[: self._rests_after], reduction.pool.lane
        resting, fresh = self._resting, self._resting is None
        if resting is None:
            resting = self._buffer(stages[-1].placements, self.rests_in, self._empty)
        with lane.after_current_stream():
            inputs, reduction.held = self._inputs(gradients, pool)
            target = self._buffer(stages[-1].placements, self._result(len(stages) - 1, stages), pool.temporary)
            write = functools.partial(_add_or_write, resting, target, fresh, 1.0)
            reduction.ticket = self._rested = self._run_stages(stages, inputs, target, reduction, write)
        self._resting = resting  # once the reduce into it has been launched
        reduction.held.append(target.local)

    # Going all the way

    def _reduce_to_final(self, gradients: Given, reduction: Reduction, is_last: bool = False) -> None:
        pool, lane = reduction.pool, reduction.pool.lane
        had_grad, changed, finished, adding = self.main_grads.grads_and_hooks()
        main_grad, fresh, replaced = self.main_grads.take(had_grad, lane, is_last)
        used, factor, unused, on_host = sorted(self._used), self._factor, list[int](), self.home.host
        # Send which params this rank has used, unless all ranks know it: a group of one param is reduced only if all
        # ranks have used it, and params without elements are not communicated.
        if self.main.layout.payload and not self.counts_unused and (self._uses.count > 1 or self.takes_part):
            reduction.uses = self._uses.flags(used, self._stages[0].copies, self.reduce_dtype, self.home.device)
            reduction.num_params = self._uses.count
            if len(used) < self.expected:
                unused = self._unused(had_grad, {*changed, *finished})
        result = sum_dtype(self.reduce_dtype) if self._stages[-1].is_encoded else self.reduce_dtype
        # Otherwise, hooks of users, what the backward adds itself, and the question which parameters other ranks have
        # used come before the step.
        is_final = is_last and not (finished or unused or adding or self.main_grads.undecided)
        stays = on_host and fresh and is_final and self.main_grads.may_stay_on_device(result)
        kept = self._buffer(self.main.placements, result, self._empty) if stays else None
        with lane.after_current_stream():
            inputs, reduction.held = self._inputs(gradients, pool)
            reduction.held += replaced if reduction.uses is None else (*replaced, reduction.uses)
            in_place = fresh and self.grad_dtype == result and not on_host
            target = main_grad if in_place else kept
            if target is None:
                target = self._buffer(self.main.placements, result, pool.temporary)
            if not on_host:
                reduction.held.append(target.local)
            # Called after the reduce, on the lane's stream.
            then: list[Callable[[], None]] = []
            counts: torch.Tensor | None = None
            if unused:  # a copy: the next reduce overwrites the counts
                counts = self._empty(len(self.params), result)
                then.append(functools.partial(reduction.copy_uses, counts))
            if self.hook is not None:
                then.append(functools.partial(_call_hook, *self.hook, target.local))
            hooked = functools.partial(self._used_of, used, unused, counts)
            if changed:
                of_these = functools.partial(hooked, changed)
                then.append(functools.partial(change_gradients, self.params, of_these, target, factor))
                factor = 1.0
            if on_host and fresh and factor != 1.0:
                then.append(functools.partial(_add_or_write, target, target, True, factor))  # before it is cast
            elif not on_host and (not in_place or factor != 1.0):
                then.append(functools.partial(_add_or_write, main_grad, target, fresh, factor))
            ticket = self._run_stages(self._stages, inputs, target, reduction, one_after_other(*then) if then else None)
            if is_final:
                reduction.on_final, reduction.gradients = self.on_final, self
            if on_host and fresh:
                write = functools.partial(self.home.write, target, lane, main_grad)
                reduced = Reduced(target, self.grad_dtype, write)
                if stays:
                    STAYING.add(reduced)
                if stays or reduction.on_final is not None:
                    reduction.reduced = reduced
                else:
                    ticket = reduced.copy_to_host(ticket)
                del reduced, write
            elif on_host:
                ticket = self.home.add(target, ticket, lane, main_grad, factor)
            if on_host:
                del target, then  # inside the lane, so that its next reduce uses the memory after the copy
        reduction.shown = [index for index in used if index not in had_grad] if had_grad else used
        self.main_grads.show(reduction.shown)
        if finished:
            reduction.then = functools.partial(self._finish, functools.partial(hooked, finished))
        if counts is not None:
            self.main_grads.undecided.update(unused)
            used_by_any = functools.partial(self._uses.used_by_any, counts, unused)
            reduction.resolve_uses = functools.partial(self.main_grads.decide, unused, used_by_any)
        self._used = set()
        self.main_grads.in_flight += 1
        reduction.ticket, reduction.writes = ticket, self.main_grads
        if adding:
            reduction.guard(adding, ticket.wait)

    def _finish(self, hooked: Callable[[], Sequence[int]]) -> None:
        """Call post-accumulate hooks. They may step an optimizer and set gradients to None, whose memory is freed."""
        call_finished(self.params, hooked)
        with _torch.PlainAttributes():
            self.main_grads.free_cleared()

    # Which params ranks have used

    def _unused(self, had_grad: Collection[int], hooked: Collection[int]) -> list[int]:
        """The params that this rank has not used, and that have no gradient yet, or have hooks.

        Hooks are called if another rank has used their param in this backward.
        """
        return [
            index
            for index, param in enumerate(self.params)
            if index not in self._used and param.sharded.requires_grad and (index not in had_grad or index in hooked)
        ]

    def _used_of(
        self, used: Sequence[int], unused: Sequence[int], counts: torch.Tensor | None, hooked: Sequence[int]
    ) -> list[int]:
        """The params with hooks that any rank has used."""
        known = set(used)
        if any(index in unused for index in hooked):
            assert counts is not None
            known.update(self._uses.used_by_any(counts, unused))
        return [index for index in hooked if index in known]

    def _run_stages(
        self, stages: Sequence[Stage], inputs: list[torch.Tensor], target: DBuffer, reduction: Reduction, then: Action
    ) -> Ticket:
        """Reduce full-size runs through some stages into ``target`` and call ``then``, inside the lane.

        Gradients that were accumulated before a later stage are added there.
        """
        pool, lane, held = reduction.pool, reduction.pool.lane, reduction.held
        after: tuple[Ticket, ...] = ()
        for number, stage in enumerate(stages[:-1], start=1):
            reduced = self._buffer(stage.placements, self._result(number - 1, stages), pool.temporary)
            held.append(reduced.local)
            runs = reduced.runs()  # before the launch: if this raised after it, the launch would not be waited for
            ticket = stage.launch(inputs, reduced, reduction, after)
            inputs, after, reduction.comm = runs, (ticket,), None
            if number == self._rests_after and self._resting is not None:
                resting, self._resting = self._resting, None
                if lane.stream is None:  # else the lane keeps their order
                    self._rested.wait()
                with lane.entered(after):
                    resting.local.add_(reduced.local)
                    reduced.local.copy_(resting.local)
                held.append(resting.local)
                after = ()
        return stages[-1].launch(inputs, target, reduction, after, then)

    # The input of a reduce

    def _inputs(self, gradients: Given, pool: Pool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per non-empty segment, the full-size input of the reduce; and tensors to keep until it has ended."""
        held = [gradient for gradient in gradients if gradient is not None]
        before = self._before
        unreduced, self._unreduced = self._unreduced, None
        if unreduced is not None:
            add_to(unreduced, gradients)
            held.append(unreduced.local)
            if before != 1.0:
                unreduced.local.mul_(before)
            if unreduced.dtype != self.reduce_dtype and not self._stages[0].is_encoded:  # encoding rounds by itself
                cast = pool.temporary(unreduced.local.numel(), self.reduce_dtype)
                cast.copy_(unreduced.local)
                unreduced = unreduced.like(cast)
                held.append(cast)
            return unreduced.runs(), held
        runs: list[torch.Tensor | None] = [None] * len(self._segments)
        # A gradient is sent from where it is, unless it must be scaled first or copied to registered memory.
        staged, sends = 0, before == 1.0 and not pool.groups
        dense = sends and all(map(torch.Tensor.is_contiguous, held))  # one loop in C for the usual case
        for number, (owner, numel) in enumerate(self._segments):
            gradient = gradients[owner] if sends and owner is not None else None
            if gradient is not None and gradient.dtype == self.reduce_dtype and (dense or gradient.is_contiguous()):
                runs[number] = gradient if gradient.ndim == 1 else gradient.view(-1)
            else:
                staged += numel
        if staged:
            staging = pool.temporary(staged, self.reduce_dtype)
            held.append(staging)
            fill_runs(self.main.layout, staging, runs, gradients)
            if before != 1.0:
                staging.mul_(before)
        return [run for run, (_, numel) in zip(runs, self._segments) if run is not None and numel], held

    # Buffers of reduced gradients

    def _buffer(
        self, placements: tuple[Placement, ...], dtype: torch.dtype, empty: Callable[[int, torch.dtype], torch.Tensor]
    ) -> DBuffer:
        """A buffer for reduced gradients, with zeros in the gaps between its runs, which reduces do not write."""
        main, room = self.main, self._room
        if placements == main.placements:
            made = main.like(empty(main.local.numel() + room, dtype)[: main.local.numel()])
        else:
            made = DBuffer.made(self.layout, main.mesh, placements, lambda numel: empty(numel + room, dtype)[:numel])
        if has_gaps(made):
            made.local.zero_()
        return made


def _call_hook(hook: Callable[[torch.Tensor], None], stream: torch.Stream | None, reduced: torch.Tensor) -> None:
    """Call a user's hook in the order of the lane, on its stream or on another one."""
    with torch.no_grad():
        if stream is None:
            hook(reduced)
            return
        streams = torch.get_device_module(reduced.device)  # hooks may read the current stream, on CPUs too
        lane = streams.current_stream()
        stream.wait_stream(lane)
        with streams.stream(stream):
            hook(reduced)
        lane.wait_stream(stream)


def _add_or_write(main_grad: DBuffer, reduced: DBuffer, fresh: bool, factor: float) -> None:
    """Write reduced gradients, times a factor, to a buffer, or add them; they may be in it already."""
    if reduced is main_grad:
        main_grad.local.mul_(factor)
    elif fresh and factor == 1.0:
        torch._foreach_copy_([main_grad.local], [reduced.local])  # casts large ones in less time than `copy_`
    elif fresh:
        torch.mul(reduced.local, factor, out=main_grad.local)
    else:
        main_grad.local.add_(reduced.local, alpha=factor)
