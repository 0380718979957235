"""``rehearse``: within it this process is one rank of W, whatever process groups the code below makes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from flatshard.rehearsal.backend import BACKEND, Medium, RehearsalGroup
from flatshard.rehearsal.meter import Meter
from flatshard.rehearsal.network import Network, get_network
from flatshard.rehearsal.report import Report
from flatshard.rehearsal.torch_private import HashStore, register_backend, replaced_group_constructors

_current: Rehearsal | None = None


class Rehearsal:
    """A running rehearsal: marks steps and, once its context has ended (or at any step boundary), reports."""

    def __init__(self, world: int, rank: int, network: Network, warmup: int) -> None:
        self.world = world
        self.rank = rank
        self.network = network
        self.medium = Medium(network)
        self.meter = Meter(self.medium.traffic, warmup)
        self._unclaimed: object = None

    def mark_step(self, tokens: int | None = None, flops: float | None = None) -> None:
        """End of a step.  ``tokens`` and ``flops`` are this rank's of that step (model FLOPs, not recomputed ones).

        Without any call the end of ``optimizer.step`` is the boundary; the first call makes these the only ones.
        """
        self.meter.mark(tokens, flops)

    def report(self) -> Report:
        """Figures of the steps after the warm-up; waits for the device."""
        return self.meter.report(self.world, self.rank, self.network)

    def init_process_group(self, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """In place of torch's: the script's backend, rendezvous, rank and size give way to the rehearsal's."""
        if dist.is_initialized() and dist.group.WORLD is self._unclaimed:
            self._unclaimed = None
            return
        real(BACKEND, store=HashStore(), rank=self.rank, world_size=self.world)

    def new_group(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of torch's: a group on another backend is rehearsed too."""
        bound = inspect.signature(real).bind(*args, **kwargs)
        for name in ("backend", "pg_options", "device_id"):
            bound.arguments.pop(name, None)
        return real(**bound.arguments)

    def open(self, real: Callable[..., None]) -> None:
        self.init_process_group(real)
        self._unclaimed = dist.group.WORLD


@contextmanager
def rehearse(
    world: int,
    network: str | Network = "h100-nvlink",
    *,
    ranks_per_node: int | None = None,
    rank: int = 0,
    warmup: int = 2,
) -> Iterator[Rehearsal]:
    """Be rank ``rank`` of ``world`` on this process's devices until the context ends.

    Within, the default process group exists, ``init_process_group`` with any backend is accepted and finds it, and
    ``torchrun``'s environment variables are set (``LOCAL_RANK`` is 0: there is one device).  ``network`` is a preset's
    name or a :class:`Network`.  The first ``warmup`` steps are left out of the report.
    """
    global _current
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, {world}), got {rank}")
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; rehearse() must come before init_process_group")
    register_backend(BACKEND, _create)
    rehearsal = _current = Rehearsal(world, rank, get_network(network, ranks_per_node), warmup)
    real_init = dist.init_process_group
    with ExitStack() as stack:
        stack.callback(_leave)
        stack.enter_context(_environment(rehearsal))
        stack.enter_context(replaced_group_constructors(rehearsal.init_process_group, rehearsal.new_group))
        rehearsal.open(real_init)
        stack.enter_context(rehearsal.meter.watching_optimizers())
        yield rehearsal


def current() -> Rehearsal | None:
    """The rehearsal this process is in, or None: how a script marks its own steps when there is one."""
    return _current


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    if _current is None:
        raise RuntimeError(
            "the backend 'rehearsal' needs a modelled network: call init_process_group inside "
            "`with flatshard.rehearsal.rehearse(world, network):` or run the script by `flatshard rehearse`"
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
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: str(value) for name, value in wanted.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
