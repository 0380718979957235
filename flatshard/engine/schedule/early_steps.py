"""Steps of optimizers that a backward runs (``in_backward=True``), and when."""

from __future__ import annotations

from collections import deque

from flatshard.buffer import Ticket
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.main_grads import STAYING
from flatshard.engine.gradients.reduction import OnFinal, Reduction


class EarlySteps:
    """Steps are put off until the end of the backward, where they overlap the last reduce.

    Gradients that wait for their step take no more memory than the caller allows. Steps that copy weights or state run
    at once, on separate lanes, so that the copies overlap the backward.
    """

    def __init__(self) -> None:
        self.running: list[Ticket] = []  # of steps that have been launched
        self.waiting: deque[tuple[Gradients, int, Ticket, OnFinal]] = deque()  # complete gradients, and their bytes

    def add(self, reduction: Reduction, most: int) -> None:
        """Step the complete gradients of a reduce. Gradients that wait may take ``most`` bytes."""
        assert reduction.on_final is not None
        numbytes = reduction.gradients.main_grads.live_bytes
        self.waiting.append((reduction.gradients, numbytes, reduction.ticket, reduction.on_final))
        self.run(-1 if reduction.gradients.is_streamed else most)

    def add_on_host(self, reduction: Reduction) -> None:
        """The same for gradients that belong in host memory: step or leave them on the device, or copy them."""
        assert reduction.reduced is not None
        stepped = None if reduction.on_final is None else reduction.on_final([reduction.gradients], reduction.reduced)
        if stepped is not None:
            self.running.append(stepped)
        elif reduction.reduced in STAYING:
            reduction.gradients.main_grads.leave_on_device(reduction.reduced)
        else:
            reduction.reduced.copy_to_host().wait()

    def run(self, most: int = -1) -> None:
        """Step the gradients that wait, the oldest first, until they take at most ``most`` bytes."""
        taken: dict[OnFinal, list[Gradients]] = {}  # one call of an optimizer for all of its groups
        left = sum(numbytes for _, numbytes, *_ in self.waiting)
        while self.waiting and left > most:
            gradients, numbytes, ticket, on_final = self.waiting.popleft()
            left -= numbytes
            ticket.wait()  # again: that may have been on another stream
            taken.setdefault(on_final, []).append(gradients)
        stepped = [on_final(complete, None) for on_final, complete in taken.items()]
        self.running += [ticket for ticket in stepped if ticket is not None]

    def run_before(self, gradients: Gradients) -> None:
        """Run all steps if these gradients wait: the next reduce adds to them."""
        if any(waiting is gradients for waiting, *_ in self.waiting):
            self.run()

    def join(self) -> None:
        """Run all steps, and order the current stream after them."""
        self.run()
        running, self.running = self.running, []
        for ticket in running:
            ticket.wait()

    def drop(self) -> None:
        """Leave the gradients that wait to ``optimizer.step``."""
        self.waiting.clear()
