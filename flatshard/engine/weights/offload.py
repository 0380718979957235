"""Where main weights and their gradients are stored: on the device, or in host memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from flatshard._sizes import format_bytes
from flatshard.buffer import DONE, DBuffer, Lane, Pool, Ticket
from flatshard.policy import CPUOffloadPolicy, OffloadPolicy

_PIECE = 1 << 24  # elements that are cast at a time, to limit temporary memory on the device
_POLL_INTERVAL = 2e-4  # seconds


def _leave_cores() -> None:
    """Let operations of this thread use fewer cores than those of others."""
    count = torch.get_num_threads()
    torch.set_num_threads(max(1, count - max(1, count // 8)))
    # Threads that start later inherit the last number that was set.
    others = threading.Thread(target=torch.set_num_threads, args=(count,))
    others.start()
    others.join()


# Adds gradients and casts weights in host memory while the device computes. It leaves cores to the threads that launch.
_worker = ThreadPoolExecutor(1, "flatshard-host", _leave_cores)


@dataclass(frozen=True)
class Home:
    """Where a group's main buffers are stored: on ``device``, where it computes, or with ``host`` in host memory.

    Host memory is ``pinned`` until this process has pinned ``limit`` bytes.
    """

    device: torch.device
    host: bool = False
    pinned: bool = False
    limit: int | None = None
    asker: str = "CPUOffloadPolicy"  # named in errors
    device_grad_bytes: int = 0  # of reduced gradients that may stay on the device

    @classmethod
    def of(cls, device: torch.device, policy: OffloadPolicy) -> Home:
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(device)
        pinned = policy.pin_memory and torch.accelerator.is_available()
        grads = policy.device_grad_bytes
        return cls(device, device.type != "cpu", pinned, policy.pin_limit, device_grad_bytes=grads)

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

    def write(
        self,
        reduced: DBuffer,
        lane: Lane,
        main_grad: DBuffer,
        ticket: Ticket,
        complete: Callable[[torch.Tensor], torch.Tensor],
    ) -> Ticket:
        """Copy reduced gradients to host memory. ``complete`` casts parts of them on the device: the host is slower.

        The copy comes after ``ticket``, and after all work that has been enqueued on the current stream. Waiting for
        the ticket that is returned blocks the host; afterwards the gradients can be read.
        """
        with lane.after_current_stream():
            copied = lane.follow(ticket, lambda: _copy(reduced.local, main_grad.local, complete))
        return Ticket(then=copied.synchronize)

    def add(self, reduced: DBuffer, ticket: Ticket, lane: Lane, main_grad: DBuffer, factor: float) -> Ticket:
        """Add reduced gradients, times a factor, to those in host memory. They are copied in the dtype of the reduce.

        Waiting for the ticket blocks the host; afterwards the gradients can be read.
        """
        staging = self.empty(main_grad.local.numel(), reduced.dtype)
        copied = lane.follow(ticket, lambda: _copy(reduced.local, staging))

        def add() -> None:
            copied.synchronize()
            main_grad.local.add_(staging, alpha=factor)

        added = _worker.submit(add)
        return Ticket(then=lambda: added.result())


def _copy(
    source: torch.Tensor, target: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> None:
    for part, to in zip(source.split(_PIECE), target.split(_PIECE)):
        to.copy_(part if change is None else change(part), non_blocking=True)


class HostCopy:
    """Copies main from host memory to the device. If the dtypes differ, a host thread casts main once per step.

    The cast may be slower than the bus. If ``may_send_main``, a gather waits for it only while the bus is busy, and
    otherwise sends main, which the device casts. Weights that are sent once per step are not cast on the host either.
    """

    def __init__(self, home: Home, main: DBuffer, dtype: torch.dtype) -> None:
        self.buffer: DBuffer | None = None  # main in the dtype of compute, from the first `prepare` on
        self.main = main
        self.may_send_main = False
        self._home, self._dtype = home, dtype
        self._is_stale = True
        self._sent = DONE  # the last copy of the buffer to the device
        self._cast: Future[None] | None = None
        self._is_postponed = False  # a gather has not waited for the cast, so other casts come first
        self._sends = 0  # since main may have changed
        self._is_sent_once = False  # between the last two changes of main

    def mark_stale(self) -> None:
        """Main may have changed."""
        if self._sends:
            self._is_sent_once, self._sends = self._sends == 1, 0
        self._is_stale = True

    def note_step(self) -> bool:
        """A step has written main and the cast alike. Returns whether the cast is up to date."""
        self._is_sent_once, self._sends = False, 0
        return self.buffer is not None and not self._is_stale

    @property
    def needs_cast(self) -> bool:
        """Whether the next gather may wait for a cast."""
        return not (self.may_send_main and self._is_sent_once and not self._sends)

    def prepare(self) -> None:
        """Start the cast, unless it is up to date."""
        if not self._is_stale or self.main.dtype == self._dtype:
            return
        if self._cast is not None:
            wait([self._cast])
        if self.buffer is None:
            with torch.inference_mode(False):  # training cannot use tensors of inference mode
                self.buffer = self.main.like(self._home.empty(self.main.local.numel(), self._dtype))
        self._is_postponed, cast = False, Future[None]()
        _worker.submit(self._run, self.buffer.local, cast)
        self._is_stale, self._cast = False, cast

    def settle(self) -> None:
        """Wait for the cast."""
        if self._cast is not None:
            self._cast.result()

    def send(self, targets: Sequence[torch.Tensor], pool: Pool) -> None:
        """Copy the weights to the device, inside the lane."""
        source = self.main
        if self.needs_cast:
            self.prepare()
            source = self.buffer or self.main
        self._sends += 1
        if source is self.buffer and self.may_send_main and self._cast is not None:
            while not self._cast.done() and not pool.sent.has_ended():
                wait([self._cast], _POLL_INTERVAL)
            if not self._cast.done():
                source, self._is_postponed = self.main, True
        if source is self.buffer:
            self.settle()
        for target, part in zip(targets, source.runs()):
            _copy(part, target)  # the device casts
        pool.sent = pool.lane.mark()
        if source is self.buffer:
            self._sent = pool.sent

    def _run(self, target: torch.Tensor, cast: Future[None]) -> None:
        if self._is_postponed:
            self._is_postponed = False
            _worker.submit(self._run, target, cast)
            return
        try:
            self._sent.synchronize()  # the device may still read what is to be overwritten
            target.copy_(self.main.local)
        except BaseException as error:
            cast.set_exception(error)  # who waits for the cast raises it
        else:
            cast.set_result(None)


def prepare_in_turns(copies: Sequence[HostCopy], may_send_main: bool) -> None:
    """Start the casts for a forward that sends ``copies`` in this order.

    If gathers may send main instead, some weights are cast last, the first ones among them, so that the host is ahead
    of the bus with the others. This assumes that the host casts as fast as the bus sends main, and that a cast is sent
    in half that time. Memory that is not pinned is slow to send, and is always cast.
    """
    may_send_main = may_send_main and all(copy.main.local.is_pinned() for copy in copies)
    first: list[HostCopy] = []
    last: list[HostCopy] = []
    cast, sent = 0.0, 0.0 if may_send_main else math.inf  # elements of main that can be cast or sent until then
    for copy in copies:
        copy.may_send_main = may_send_main
        numel = copy.main.local.numel()
        if not copy.needs_cast:
            sent += numel
        elif cast + numel <= sent:
            first.append(copy)
            cast, sent = cast + numel, sent + numel / 2
        else:
            last.append(copy)
            sent += numel
    for copy in (*first, *last):
        copy.prepare()


def pinned_bytes() -> int:
    """Bytes of host memory that tensors of this process have pinned."""
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))
