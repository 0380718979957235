"""The gradients of an embedding by rows, which are accumulated and sent as rows: `ParamGroup(kind=RowGradients)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatshard.buffer import DONE, DBuffer, Pool, Ticket
from flatshard.buffer.collectives import Tensors
from flatshard.buffer.tickets import Action, Tickets
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.reduction import Goal, Reduction, Stage, sum_dtype
from flatshard.engine.gradients.staging import Given
from flatshard.engine.weights.formats import Formats


@dataclass(frozen=True)
class LookUp:
    """Which rows went where. Counts are of rows, per rank."""

    tokens: torch.Tensor
    seats: torch.Tensor  # for each token, the place of its row among those that this rank asked for
    asked: list[int]
    wanted: torch.Tensor  # the rows of this rank that all ranks asked for, in the order of ranks
    served: list[int]


class RowGradients(Gradients):
    """The gradients of the one parameter of a group by rows."""

    padding: int | None = None  # a row that is not trained

    def __init__(self, *given: Any) -> None:
        self.came: list[tuple[torch.Tensor, LookUp]] = []  # by the running backward
        self._kept: list[tuple[torch.Tensor, LookUp]] = []  # by earlier ones, which stopped short, too
        super().__init__(*given)

    def take_settings(self, other: Gradients) -> None:
        super().take_settings(other)
        assert isinstance(other, RowGradients)
        self.padding = other.padding

    def _plan(self, formats: Formats) -> list[Stage]:
        first, *others = super()._plan(formats)
        axis = self.main.mesh.ndim - 1
        self._by_rows = RowStage(self.main.mesh, axis, first.placements)
        return [self._by_rows, *others]

    @property
    def what(self) -> str:
        return "reduce" if self.counts_unused else f"reduce {len(self._kept) + len(self.came)} look-ups of"

    @property
    def has_partial(self) -> bool:
        return bool(self._kept) or super().has_partial

    @property
    def waiting(self) -> bool:
        return bool(self.came) or super().waiting

    def take(self) -> list[torch.Tensor | None]:
        if self.came:
            self._used.add(0)
        self._kept += self.came
        self.came = []
        return super().take()

    def drop(self) -> None:
        self.came = []
        super().drop()

    def drop_partial(self) -> None:
        super().drop_partial()
        self._kept = []

    def _add_unreduced(self, gradients: Given) -> None:
        """They are kept as they are."""

    def reduce(self, pool: Pool, goal: Goal, name: str, is_last: bool = False) -> Reduction:
        if super().waiting:
            raise RuntimeError(
                f"parameter '{self.params[0].name}' is sharded with rows=True but has a gradient from a tied layer or "
                "from a use of the whole table. Call fully_shard without rows=True"
            )
        self._by_rows.is_encoded = not self.counts_unused
        return super().reduce(pool, goal, name, is_last)

    def _inputs(self, gradients: Given, pool: Pool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        kept, self._kept = self._kept, []
        if self.counts_unused:  # ranks may have used other look-ups, or none: all of the table is reduced
            whole = self._whole(kept) if kept else None
            runs, held = super()._inputs([whole], pool)
            return runs, [*held, *(tensor for grad, look_up in kept for tensor in (grad, look_up.tokens))]
        self._by_rows.waiting = [(grad.to(self.reduce_dtype), look_up) for grad, look_up in kept]
        self._by_rows.padding, self._by_rows.before = self.padding, self._before
        return [], [grad for grad, _ in [*kept, *self._by_rows.waiting]]

    def _whole(self, kept: Sequence[tuple[torch.Tensor, LookUp]]) -> torch.Tensor:
        """The gradient of the table."""
        grads = torch.cat([grad.to(self.reduce_dtype) for grad, _ in kept])
        tokens = torch.cat([look_up.tokens for _, look_up in kept])
        padding = -1 if self.padding is None else self.padding
        return _added(grads, tokens, self.layout.slots[0].shape[0], padding)


class RowStage(Stage):
    """The reduce over the axis that the table is sharded on. Rows are sent in the reduce dtype, sums are in float32.

    With inputs, which are gradients of the whole table, it is an ordinary stage.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.is_encoded = True
        self.waiting: list[tuple[torch.Tensor, LookUp]] = []
        self.padding: int | None = None
        self.before = 1.0  # what sums, which are in float32, are multiplied by before another stage rounds them

    def launch(self, inputs: Tensors, out: DBuffer, of: Reduction, after: Tickets = (), then: Action = None) -> Ticket:
        if inputs:
            return super().launch(inputs, out, of, after, then)
        lane = of.pool.lane
        group = self._among(lane)
        waiting, self.waiting = self.waiting, []
        width = out.layout.slots[0].shape[1]
        tickets: list[Ticket] = []
        received: list[torch.Tensor] = []
        with lane.entered(after):
            for grad, look_up in waiting:
                sent = _added(grad, look_up.seats, sum(look_up.asked))
                got = sent.new_empty(sum(look_up.served), width)
                splits = [count * width for count in look_up.served], [count * width for count in look_up.asked]
                tickets.append(lane.all_to_all(group, got.view(-1), sent.view(-1), *splits, name=of.name))
                received.append(got)
                of.held += (sent, got, look_up.seats, look_up.wanted)  # these two are of another stream
        factor = self.before / group.size() if of.op == "avg" else self.before

        def add() -> None:
            for ticket in tickets:
                ticket.wait()
            rows = out.local_view(0)
            if rows.numel() != out.local.numel() or not waiting:
                out.local.zero_()
            if waiting and len(rows):
                wanted = torch.cat([look_up.wanted for _, look_up in waiting])
                terms = torch.cat(received).to(sum_dtype(received[0].dtype))
                torch.mul(_added(terms, wanted, len(rows)), factor, out=rows)
            self._leave_padding(out, rows)
            if then is not None:
                then()

        return lane.follow(tickets[-1] if tickets else DONE, add)

    def _leave_padding(self, out: DBuffer, rows: torch.Tensor) -> None:
        if self.padding is None:
            return
        first = out.layout.rows(out.layout.slots[0], out.held.first, out.held.count)[0]
        if first <= self.padding < first + len(rows):
            rows[self.padding - first].zero_()


def _added(grads: torch.Tensor, places: torch.Tensor, count: int, left_out: int = -1) -> torch.Tensor:
    """Gradients of rows, added into ``count`` places except ``left_out``, in the order given."""
    if not len(grads):
        return grads.new_zeros(count, grads.shape[-1])
    added: torch.Tensor = torch.ops.aten.embedding_dense_backward(grads, places, count, left_out, False)
    return added
