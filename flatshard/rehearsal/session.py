"""``rehearse``: a context in which this process is one rank of W, in all process groups that are created in it."""

from __future__ import annotations

import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatshard._sizes import peak_resident_bytes
from flatshard.rehearsal.backend import BACKEND, Medium, RehearsalGroup
from flatshard.rehearsal.network import Kind, Network, TrafficTotal, difference, get_network
from flatshard.rehearsal.report import Report
from flatshard.rehearsal.torch_private import HashStore, cuda, register_backend, replaced_group_constructors

_current: Rehearsal | None = None


class TooFewSteps(RuntimeError):
    """Too few steps were run to measure one."""


@dataclass
class _Mark:
    clock: float
    event: torch.cuda.Event | None
    traffic: dict[Kind, TrafficTotal]
    tokens: int | None
    flops: float | None


class Rehearsal:
    """A running rehearsal.  Marks steps, and reports at any step boundary or after its context has ended.

    The first ``warmup`` steps (at least one) are not measured.
    """

    def __init__(self, world: int, rank: int, network: Network, warmup: int) -> None:
        if warmup < 1:
            raise ValueError(f"warmup={warmup!r}: must be at least 1, because the start of the first step is unknown")
        self.world, self.rank, self.network = world, rank, network
        self.medium = Medium(network)
        self._warmup = warmup
        self._marks: list[_Mark] = []
        self._marks_explicitly = False  # only calls of `mark_step` end steps
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._memory: dict[str, int] = {}
        self._unclaimed_group: object = None  # the first default group, until init_process_group is called

    def mark_step(self, tokens: int | None = None, flops: float | None = None) -> None:
        """Mark the end of a step.  ``tokens``, ``flops``: of this rank in that step (model FLOPs, without recompute).

        If it is never called, steps end with ``optimizer.step``; after the first call, only calls end steps.
        """
        if not self._marks_explicitly:
            self._marks_explicitly = True
            self._marks.clear()
        self._mark(tokens, flops)

    def _mark(self, tokens: int | None = None, flops: float | None = None) -> None:
        event = None
        if cuda.is_initialized():
            event = cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(_Mark(time.perf_counter(), event, self.medium.traffic.snapshot(), tokens, flops))
        if len(self._marks) == self._warmup and cuda.is_initialized():
            cuda.reset_peak_memory_stats()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A hook of all optimizers. A training step ends with each step of the optimizer that stepped first."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if len(self._marks) <= self._warmup:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._memory["parameters"] = _storage_bytes(params)
            self._memory["gradients"] = _storage_bytes(param.grad for param in params if param.grad is not None)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if len(self._marks) <= self._warmup:
            states = (value for state in optimizer.state.values() for value in state.values())
            self._memory["optimizer state"] = _storage_bytes(v for v in states if isinstance(v, torch.Tensor))
        if not self._marks_explicitly and self._optimizer is not None and self._optimizer() is optimizer:
            self._mark()

    def report(self) -> Report:
        """The figures of the steps after the warm-up; waits for the device."""
        marks = self._marks[self._warmup - 1 :]
        if len(marks) < 2:
            raise TooFewSteps(
                f"the script ran {len(self._marks)} step(s), of which the first {self._warmup} are warm-up: run more "
                "steps or, if it uses no torch optimizer, call mark_step at the end of each"
            )
        steps = len(marks) - 1
        traffic = difference(marks[-1].traffic, marks[0].traffic)
        tokens = [mark.tokens for mark in marks[1:] if mark.tokens is not None]
        flops = [mark.flops for mark in marks[1:] if mark.flops is not None]
        return Report(
            world=self.world,
            rank=self.rank,
            network=self.network.name,
            ranks_per_node=self.network.ranks_per_node,
            device=cuda.get_device_name() if cuda.is_initialized() else f"CPU, {torch.get_num_threads()} threads",
            torch=torch.__version__,
            steps=steps,
            step_seconds=_durations(marks),
            tokens_per_step=sum(tokens) / steps if tokens else None,
            flops_per_step=sum(flops) / steps if flops else None,
            traffic={
                kind: {name: total / steps for name, total in asdict(entry).items()}
                for kind, entry in sorted(traffic.items())
            },
            memory=self._memory_categories(),
        )

    def _memory_categories(self) -> dict[str, int]:
        memory = dict(self._memory)
        if cuda.is_initialized():
            peak = cuda.max_memory_allocated()
            memory["rest at the peak"] = max(peak - sum(memory.values()), 0)
            memory["peak"] = peak
            memory["reserved"] = cuda.max_memory_reserved()
        else:
            memory["resident set, peak"] = peak_resident_bytes()
        return memory

    def init_process_group(self, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replaces torch's function: the rehearsal's backend, store, rank and size are used instead of the given."""
        if dist.is_initialized() and dist.group.WORLD is self._unclaimed_group:
            self._unclaimed_group = None
            return
        real(BACKEND, store=HashStore(), rank=self.rank, world_size=self.world)

    def new_group(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces torch's function: groups of every backend are rehearsed."""
        bound = inspect.signature(real).bind(*args, **kwargs)
        for name in ("backend", "pg_options", "device_id"):
            bound.arguments.pop(name, None)
        return real(**bound.arguments)


@contextmanager
def rehearse(
    world: int,
    network: str | Network = "h100-nvlink",
    *,
    ranks_per_node: int | None = None,
    rank: int = 0,
    warmup: int = 2,
) -> Iterator[Rehearsal]:
    """Within the context, this process is rank ``rank`` of ``world``, on its own devices.

    The default process group exists; ``init_process_group`` with any backend returns without creating another.  The
    environment variables of ``torchrun`` are set (``LOCAL_RANK`` is 0: there is one device).  ``network``: the name of
    a preset, or a :class:`Network`.  The report leaves out the first ``warmup`` steps.
    """
    global _current
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank!r}: must be from 0 to {world - 1} (world={world})")
    if dist.is_initialized():
        raise RuntimeError("a process group already exists; call rehearse() before init_process_group")
    register_backend(BACKEND, _create)
    rehearsal = _current = Rehearsal(world, rank, get_network(network, ranks_per_node), warmup)
    with ExitStack() as stack:
        stack.callback(_leave)
        stack.enter_context(_environment(rehearsal))
        stack.enter_context(replaced_group_constructors(rehearsal.init_process_group, rehearsal.new_group))
        dist.init_process_group()
        rehearsal._unclaimed_group = dist.group.WORLD
        stack.callback(register_optimizer_step_pre_hook(rehearsal.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(rehearsal.after_step).remove)
        yield rehearsal


def current() -> Rehearsal | None:
    """The running rehearsal, or None.  A script can use it to mark its steps."""
    return _current


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    if _current is None:
        raise RuntimeError(
            "the backend 'rehearsal' needs a modelled network: call init_process_group within "
            "`with flatshard.rehearsal.rehearse(world, network):`, or run the script with `flatshard rehearse`"
        )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return RehearsalGroup(options.group_rank, ranks, _current.medium)


def _leave() -> None:
    global _current
    _current = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _environment(rehearsal: Rehearsal) -> Iterator[None]:
    nodes = rehearsal.network.ranks_per_node
    wanted = {
        "RANK": rehearsal.rank,
        "WORLD_SIZE": rehearsal.world,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": min(nodes, rehearsal.world),
        "GROUP_RANK": rehearsal.rank // nodes,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }
    before = {name: os.environ[name] for name in wanted.keys() & os.environ.keys()}
    os.environ.update({name: str(value) for name, value in wanted.items()})
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)


def _durations(marks: list[_Mark]) -> list[float]:
    if all(mark.event is not None for mark in marks):
        cuda.synchronize()
        events = [mark.event for mark in marks if mark.event is not None]
        return [early.elapsed_time(late) * 1e-3 for early, late in pairwise(events)]
    return [late.clock - early.clock for early, late in pairwise(marks)]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of ``tensors``; for a DTensor, of its local tensor."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()  # not by data_ptr: that of a wrapper subclass is 0
    return sum(sizes.values())
