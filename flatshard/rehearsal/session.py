"""``rehearse``: a context in which this process is one rank of W, in all process groups that are created in it."""

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
    """A running rehearsal.  Marks steps, and reports at any step boundary or after its context has ended."""

    def __init__(self, world: int, rank: int, network: Network, warmup: int) -> None:
        self.world = world
        self.rank = rank
        self.network = network
        self.medium = Medium(network)
        self.meter = Meter(self.medium.traffic, warmup)
        self._unclaimed: object = None  # the first default group, until init_process_group is called

    def mark_step(self, tokens: int | None = None, flops: float | None = None) -> None:
        """Mark the end of a step.  ``tokens``, ``flops``: of this rank in that step (model FLOPs, without recompute).

        If it is never called, steps end with ``optimizer.step``; after the first call, only calls end steps.
        """
        self.meter.mark(tokens, flops)

    def report(self) -> Report:
        """The figures of the steps after the warm-up; waits for the device."""
        return self.meter.report(self.world, self.rank, self.network)

    def init_process_group(self, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replaces torch's function: the rehearsal's backend, store, rank and size are used instead of the given."""
        if dist.is_initialized() and dist.group.WORLD is self._unclaimed:
            self._unclaimed = None
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
        rehearsal._unclaimed = dist.group.WORLD
        stack.enter_context(rehearsal.meter.watching_optimizers())
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
