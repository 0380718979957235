"""Where main weights and their gradients are stored: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from flatshard._sizes import format_bytes
from flatshard.buffer import DBuffer, Lane, Pool, Ticket
from flatshard.policy import CPUOffloadPolicy, OffloadPolicy

# Works on gradients and weights in host memory while the device goes on, on one after the other.
_worker = ThreadPoolExecutor(1, "flatshard-host")
_PIECE = 1 << 24  # elements of a gradient that are cast at a time: the device needs room for no more


@dataclass(frozen=True)
class Home:
    """``device`` is where a group computes and communicates. With ``host``, its main buffers are in host memory."""

    device: torch.device
    host: bool = False
    pinned: bool = False
    asker: str = "CPUOffloadPolicy"  # named in errors

    @classmethod
    def of(cls, device: torch.device, policy: OffloadPolicy) -> Home:
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(device)
        return cls(device, device.type != "cpu", policy.pin_memory and torch.accelerator.is_available())

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor where main weights and gradients are stored."""
        if not self.host:
            return torch.empty(numel, dtype=dtype, device=self.device)
        try:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pinned)
        except RuntimeError as error:
            size = f"{format_bytes(numel * dtype.itemsize)} of host memory"
            if not self.pinned:
                raise RuntimeError(f"{self.asker}: {size} could not be allocated: {error}") from error
            remedy = "use CPUOffloadPolicy(pin_memory=False), " if self.asker == Home.asker else ""
            raise RuntimeError(
                f"{self.asker}: {size} could not be pinned ({error}); {remedy}"
                "raise the limit of locked memory (`ulimit -l`), or run fewer ranks on this node"
            ) from error

    def take(self, main: DBuffer) -> DBuffer:
        """A main buffer, moved to where main weights are stored."""
        if not self.host or main.device.type == "meta":
            return main
        kept = self.keep(main.local)
        return main if kept is main.local else main.like(kept)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor, or a copy of it, where main weights are stored."""
        if tensor.device.type == "cpu" and (not self.pinned or tensor.is_pinned()):
            return tensor
        return self.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def on_device(self, main: DBuffer, pool: Pool) -> DBuffer:
        """Main, or a copy of it from host memory, which must be kept until the lane has read it."""
        if not self.host:
            return main
        return main.like(pool.temporary(main.local.numel(), main.dtype).copy_(main.local, non_blocking=True))

    def beside(self, action: Callable[[], object], after: Callable[[], None]) -> Ticket:
        """Call a function on a host thread once ``after`` has returned, while the device continues."""

        def run() -> None:
            after()
            action()

        done = _worker.submit(run)
        return Ticket(then=lambda: done.result())

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
        return self.beside(lambda: lies.add_(landing, alpha=factor), after=copied.synchronize)


def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """A gradient times a factor, in a dtype: in this order, because a sum may not fit in it."""
    return (gradient * factor if factor != 1.0 else gradient).to(dtype)
