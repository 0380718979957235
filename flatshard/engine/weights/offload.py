"""Where main weights and their gradients are stored: on the device, or in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from flatshard._sizes import format_bytes
from flatshard.buffer import DONE, DBuffer, Lane, Pool, Ticket
from flatshard.policy import CPUOffloadPolicy, OffloadPolicy

# Works on gradients and weights in host memory while the device goes on, on one after the other.
_worker = ThreadPoolExecutor(1, "flatshard-host")
_PIECE = 1 << 24  # elements that are cast at a time: the device needs room for no more
_GLANCE = 2e-4  # seconds between two looks at the bus


@dataclass(frozen=True)
class Home:
    """``device`` is where a group computes and communicates. With ``host``, its main buffers are in host memory.

    They are ``pinned`` until this process has pinned ``limit`` bytes.
    """

    device: torch.device
    host: bool = False
    pinned: bool = False
    limit: int | None = None
    asker: str = "CPUOffloadPolicy"  # named in errors

    @classmethod
    def of(cls, device: torch.device, policy: OffloadPolicy) -> Home:
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(device)
        pinned = policy.pin_memory and torch.accelerator.is_available()
        return cls(device, device.type != "cpu", pinned, policy.pin_limit)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor where main weights and gradients are stored."""
        if not self.host:
            return torch.empty(numel, dtype=dtype, device=self.device)
        pinned = self.pinned and self._may_pin(numel * dtype.itemsize)
        try:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            size = f"{format_bytes(numel * dtype.itemsize)} of host memory"
            if not pinned:
                raise RuntimeError(f"{self.asker}: {size} could not be allocated: {error}") from error
            remedy = "use CPUOffloadPolicy(pin_limit=...), " if self.asker == Home.asker else ""
            raise RuntimeError(
                f"{self.asker}: {size} could not be pinned ({error}); {remedy}"
                "raise the limit of locked memory (`ulimit -l`), or run fewer ranks on this node"
            ) from error

    def _may_pin(self, size: int) -> bool:
        block = 1 << max(size - 1, 0).bit_length()  # torch allocates powers of two
        return self.limit is None or pinned_bytes() + block <= self.limit

    def take(self, main: DBuffer) -> DBuffer:
        """A main buffer, moved to where main weights are stored."""
        if not self.host or main.device.type == "meta":
            return main
        kept = self.keep(main.local)
        return main if kept is main.local else main.like(kept)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor, or a copy of it, where main weights are stored."""
        if tensor.device.type == "cpu" and (not self.pinned or tensor.is_pinned() or not self._may_pin(tensor.nbytes)):
            return tensor
        return self.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def on_device(self, main: DBuffer, pool: Pool) -> DBuffer:
        """Main, or a copy of it from host memory, which must be kept until the lane has read it."""
        if not self.host:
            return main
        return main.like(pool.temporary(main.local.numel(), main.dtype).copy_(main.local, non_blocking=True))

    def bring(
        self, reduced: DBuffer, ticket: Ticket, lane: Lane, main_grad: DBuffer, fresh: bool, factor: float
    ) -> Ticket:
        """Copy reduced gradients, times a factor, to host memory, or add them to those in it.

        Gradients that are written are cast on the device, because host memory is slower than the bus. Gradients that
        are added are copied in the dtype of the reduce. Waiting for the ticket blocks the host; afterwards the
        gradients can be read.
        """
        lies = main_grad.local
        landing = lies if fresh else self.empty(lies.numel(), reduced.dtype)

        def copy() -> None:
            for part, target in zip(reduced.local.split(_PIECE), landing.split(_PIECE)):
                target.copy_(scaled(part, factor if fresh else 1.0, target.dtype), non_blocking=True)

        copied = lane.follow(ticket, copy)
        if fresh:
            return Ticket(then=copied.synchronize)

        def add() -> None:
            copied.synchronize()
            lies.add_(landing, alpha=factor)

        added = _worker.submit(add)
        return Ticket(then=lambda: added.result())


class HostCopy:
    """Main in the dtype of compute, in host memory: a host thread casts it once per step, and every pass sends it.

    The cast may be slower than the bus. A gather waits for it only while the bus is busy; otherwise it sends main, and
    the device casts.
    """

    def __init__(self, home: Home, main: DBuffer, dtype: torch.dtype) -> None:
        self.is_old = True  # main has changed since the last `prepare`
        self.buffer: DBuffer | None = None  # None until the first `prepare`, or if main has this dtype
        self.main = main
        self._home, self._dtype = home, dtype
        self._sent = DONE  # the last copy of the buffer to the device
        self._done: Future[None] | None = None  # the cast
        self._is_late = False  # a gather has not waited for the cast: others come first

    def prepare(self) -> None:
        """Start the cast, unless it is up to date."""
        if not self.is_old or self.main.dtype == self._dtype:
            return
        self.settle()
        if self.buffer is None:
            self.buffer = self.main.like(self._home.empty(self.main.local.numel(), self._dtype))
        self.is_old = self._is_late = False
        self._done = Future()
        _worker.submit(self._run, self.buffer.local, self._done)

    def settle(self) -> None:
        """Wait for the cast."""
        if self._done is not None:
            self._done.result()

    def send(self, targets: Sequence[torch.Tensor], pool: Pool) -> None:
        """Copy the weights to the device, inside the lane."""
        self.prepare()
        source = self.buffer if self.buffer is not None and self._is_in_time(pool) else self.main
        for target, part in zip(targets, source.runs()):
            for to, piece in zip(target.split(_PIECE), part.split(_PIECE)):
                to.copy_(piece, non_blocking=True)  # the device casts
        pool.sent = pool.lane.mark()
        if source is self.buffer:
            self._sent = pool.sent

    def _is_in_time(self, pool: Pool) -> bool:
        """Whether the cast ends before the bus is idle. What is not pinned is slow to send, so it is always cast."""
        done = self._done
        assert done is not None
        while not done.done() and not pool.sent.has_ended():
            wait([done], _GLANCE)
        self._is_late = not done.done() and self.main.local.is_pinned()
        if not self._is_late:
            done.result()
        return not self._is_late

    def _run(self, target: torch.Tensor, done: Future[None]) -> None:
        if self._is_late:
            self._is_late = False
            _worker.submit(self._run, target, done)
            return
        try:
            self._sent.synchronize()  # the device may still read what is to be overwritten
            target.copy_(self.main.local)
        except BaseException as error:
            done.set_exception(error)  # who waits for the cast raises it
        else:
            done.set_result(None)


def prepare_in_turns(copies: Sequence[HostCopy]) -> None:
    """Start the casts for a forward that sends ``copies`` in this order.

    Half of the weights, the first ones among them, come last and may be left to the device: so the host is ahead of the
    bus with the casts of the others. If some are not pinned, their gathers wait for them in any case.
    """
    first: list[HostCopy] = []
    last: list[HostCopy] = []
    ahead = 0 if all(copy.main.local.is_pinned() for copy in copies) else math.inf
    for copy in copies:
        numel = copy.main.local.numel()
        is_first = numel <= ahead
        (first if is_first else last).append(copy)
        ahead += -numel if is_first else numel
    for copy in (*first, *last):
        copy.prepare()


def pinned_bytes() -> int:
    """Bytes of host memory that tensors of this process have pinned."""
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """A gradient times a factor, in a dtype: in this order, because a sum may not fit in it."""
    return (gradient * factor if factor != 1.0 else gradient).to(dtype)
