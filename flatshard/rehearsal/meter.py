"""Measures steps: where they end, how long they take, and the memory they use."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatshard._sizes import peak_resident_bytes
from flatshard.rehearsal.network import Kind, Network
from flatshard.rehearsal.report import Report
from flatshard.rehearsal.torch_private import cuda
from flatshard.rehearsal.traffic import Traffic, TrafficTotal, difference


class TooFewSteps(RuntimeError):
    """Too few steps were run to measure one."""


@dataclass
class _Mark:
    clock: float
    event: torch.cuda.Event | None
    traffic: dict[Kind, TrafficTotal]
    tokens: int | None
    flops: float | None


class Meter:
    """Collects the ends of steps.  The first ``warmup`` steps (at least one) are not measured."""

    def __init__(self, traffic: Traffic, warmup: int) -> None:
        if warmup < 1:
            raise ValueError(f"warmup={warmup!r}: must be at least 1, because the start of the first step is unknown")
        self._traffic = traffic
        self._warmup = warmup
        self._marks: list[_Mark] = []
        self._explicit = False
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._memory: dict[str, int] = {}

    def mark(self, tokens: int | None, flops: float | None) -> None:
        if not self._explicit:
            self._explicit = True
            self._marks.clear()
        self._add(tokens, flops)

    def _add(self, tokens: int | None, flops: float | None) -> None:
        event = None
        if cuda.is_initialized():
            event = cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(_Mark(time.perf_counter(), event, self._traffic.snapshot(), tokens, flops))
        if len(self._marks) == self._warmup and cuda.is_initialized():
            cuda.reset_peak_memory_stats()

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Within the context, a training step ends with each step of the optimizer that stepped first."""
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if len(self._marks) <= self._warmup:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._memory["parameters"] = _storage_bytes(params)
            self._memory["gradients"] = _storage_bytes(param.grad for param in params if param.grad is not None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if len(self._marks) <= self._warmup:
            states = (value for state in optimizer.state.values() for value in state.values())
            self._memory["optimizer state"] = _storage_bytes(v for v in states if isinstance(v, torch.Tensor))
        if not self._explicit and self._optimizer is not None and self._optimizer() is optimizer:
            self._add(None, None)

    def report(self, world: int, rank: int, network: Network) -> Report:
        marks = self._marks[self._warmup - 1 :]
        if len(marks) < 2:
            raise TooFewSteps(
                f"the script ran {len(self._marks)} step(s), of which the first {self._warmup} are warm-up: run more "
                "steps or, if it uses no torch optimizer, call mark_step at the end of each"
            )
        steps = len(marks) - 1
        traffic = difference(marks[-1].traffic, marks[0].traffic)
        seconds = _durations(marks)
        tokens = [mark.tokens for mark in marks[1:] if mark.tokens is not None]
        flops = [mark.flops for mark in marks[1:] if mark.flops is not None]
        return Report(
            world=world,
            rank=rank,
            network=network.name,
            ranks_per_node=network.ranks_per_node,
            device=cuda.get_device_name() if cuda.is_initialized() else f"CPU, {torch.get_num_threads()} threads",
            torch=torch.__version__,
            steps=steps,
            step_seconds=seconds,
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
