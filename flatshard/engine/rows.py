"""Embeddings by rows: a batch reads a few thousand rows of a large table, so only these rows are sent.

A look-up requests its rows from the ranks that hold them; its backward sends the gradient of each row back. With U
distinct tokens in a batch and rows of H numbers, U x H numbers are sent each way instead of the table:

    tokens      5 0 7 5            of this rank; ranks 0 and 1 hold rows 0-3 and 4-7
    requested   0 | 5 7            sorted, each once: the rows requested from each rank
    seats       1 0 2 1            the index of the row of each token among these
    rows        r0 | r5 r7         received in the order of the requests
    gradients   g2 | g1+g4 g3      sent back the same way, and added in rank order

The number of rows that a rank requests depends on its tokens, and collectives need it: the host waits for the counts of
all ranks, once per look-up. Even look-ups, with the same number of tokens on each rank, need no counts: every rank
requests as many rows from each rank as could be needed, which is never more than the table. Look-ups that a CUDA graph
captures are even.

A group is connected to this by its kind of gradients (`RowGradients`), a unit by `Unit.rows`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flatshard import _torch
from flatshard.buffer import DONE, DBuffer, Lane, Pool, Ticket
from flatshard.buffer.collectives import Tensors
from flatshard.buffer.tickets import Action, Tickets
from flatshard.engine.gradients.collecting import refuse_orphan
from flatshard.engine.gradients.gradients import Gradients
from flatshard.engine.gradients.reduction import Goal, Reduction, Stage, capturing, sum_dtype
from flatshard.engine.gradients.staging import Given
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.weights.formats import Formats


@dataclass(frozen=True)
class LookUp:
    """Which rows went where. Counts are of rows, per rank."""

    tokens: torch.Tensor
    seats: torch.Tensor  # for each token, the index of its row among those that this rank has requested
    requested: list[int]
    served_rows: torch.Tensor  # the rows of this rank that all ranks have requested, in the order of ranks
    served: list[int]


class Rows:
    """The look-ups of one embedding."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)
        layout, mesh = group.layout, group.mesh
        self._number = layout.slots[0].shape[0]
        starts = [layout.rows(layout.slots[0], rank, 1) for rank in range(layout.num_shards)]
        self._first = [start for start, _ in starts]
        self._most = max(count for _, count in starts)
        self._least = min(count for _, count in starts)
        self._axis = mesh.ndim - 1
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        # A backward reaches it after all look-ups, and then all their gradients have arrived.
        self._anchor = nn.Parameter(torch.empty(0, device=group.home.device))
        self._anchor.register_post_accumulate_grad_hook(functools.partial(_complete, weakref.ref(group)))

    def look_up(
        self, tokens: torch.Tensor, lane: Lane, name: str, announce: Callable[[str], None] | None
    ) -> torch.Tensor:
        """The rows of ``tokens``, in the compute dtype. ``announce``: called with what all ranks are about to do."""
        group = self._group()
        assert group is not None
        if _torch.transforming():
            raise RuntimeError(
                f"unit '{name}' is sharded with rows=True, which torch.func transforms do not support: "
                "call fully_shard on it without rows=True"
            )
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"embedding '{name}': token ids must be int32 or int64, not {tokens.dtype}")
        # Each rank requests as many rows from each rank as it could need: a capture cannot wait for counts.
        even = capturing(tokens)
        if even and not self._least:
            raise ValueError(
                f"embedding '{name}' has {self._number} rows over {len(self._first)} ranks, some of which hold none: "
                "its look-ups cannot be captured; call fully_shard on it without rows=True"
            )
        if announce is not None:
            announce(f"look up {tokens.numel()} rows of" if even else "look up rows of")
        trains = group.params[0].sharded.requires_grad
        if self._anchor.requires_grad != trains:
            self._anchor.requires_grad = trains
        group.gradients.expected = int(trains)
        found: torch.Tensor = _LookUp.apply(self._anchor, tokens, self, even, lane, name)  # type: ignore[no-untyped-call]
        return found

    def exchange(self, tokens: torch.Tensor, even: bool, lane: Lane, name: str) -> tuple[torch.Tensor, LookUp]:
        """Request rows, and send the rows that other ranks request."""
        group = self._group()
        assert group is not None
        among = lane.group(group.mesh, self._axis)
        table, dtype = group.main.local_view(0), group.codec.dtype
        mine = tokens.reshape(-1).clone()  # the caller may use the memory for the next batch
        requests, place, order, requested, served = self._sorted(mine, even, lane, among, name)
        served_rows = requests.new_empty(sum(served))
        ticket = lane.all_to_all(among, served_rows, requests, served, requested, after=(lane.mark(),), name=name)
        seats = torch.empty_like(place).scatter_(0, order, place)  # while the requests are sent
        ticket.wait()
        width = table.shape[1]
        if len(served_rows) < len(table):
            sent = table.index_select(0, served_rows).to(dtype)
        else:
            sent = table.to(dtype).index_select(0, served_rows)  # casts less
        got = sent.new_empty(sum(requested), width)
        splits = [count * width for count in requested], [count * width for count in served]
        lane.all_to_all(among, got.view(-1), sent.view(-1), *splits, after=(lane.mark(),), name=name).wait()
        # Not a view: autograd allows no in-place change of a view that a function returns.
        rows = torch.embedding(got, seats.view(tokens.shape))
        return rows, LookUp(mine, seats, requested, served_rows, served)

    def _sorted(
        self, tokens: torch.Tensor, even: bool, lane: Lane, among: ProcessGroup, name: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int]]:
        """The requested rows (by their numbers on the ranks that hold them), the seats of sorted tokens, where these
        tokens were before, and the counts per rank.
        """
        # All of these operations are deterministic, and none waits for the device.
        first, stop = self._on(tokens.device)
        ids, order = tokens.long().sort()
        holder = torch.bucketize(ids, stop, right=True).clamp_(max=len(self._first) - 1)
        is_new = torch.ones_like(ids, dtype=torch.bool)
        torch.ne(ids[1:], ids[:-1], out=is_new[1:])
        number = is_new.cumsum(0)  # of each different token, from 1 on
        until = torch.cat((number.new_zeros(1), number))[torch.searchsorted(ids, stop)]  # how many, up to each rank
        counts = until.diff(prepend=until.new_zeros(1))
        here = ids - first[holder]
        if even:
            most = min(len(ids), self._most)
            requested = served = [most] * len(self._first)
            place = holder * most + number - 1 - (until - counts)[holder]
            of_rank = torch.arange(most, device=ids.device)
            taken = ((until - counts)[:, None] + of_rank + 1).clamp_(max=len(ids))
            is_taken = of_rank < counts[:, None]
            found = torch.searchsorted(number, taken).clamp_(max=len(ids) - 1)
            # Unneeded requests are spread over rows: their zero gradients would be added to one row one by one.
            requests = torch.where(is_taken, here[found], of_rank % self._least).view(-1)
            if ids.is_cuda:
                _torch.assert_on_device(((ids >= 0) & (ids < self._number)).all())
            else:
                self._check_ends(_ends(ids).tolist(), name)
        else:
            requested, served = self._counted(ids, counts, lane, among, name)
            place = number - 1
            requests = here[torch.searchsorted(number, torch.arange(1, sum(requested) + 1, device=ids.device))]
        return requests, place, order, requested, served

    def _counted(
        self, ids: torch.Tensor, counts: torch.Tensor, lane: Lane, among: ProcessGroup, name: str
    ) -> tuple[list[int], list[int]]:
        theirs = torch.empty_like(counts)
        lane.all_to_all(among, theirs, counts, [], [], after=(lane.mark(),), name=name).wait()
        numbers = torch.cat((_ends(ids), counts, theirs)).tolist()  # the host waits here, once
        self._check_ends(numbers[:2], name)
        return numbers[2 : 2 + len(counts)], numbers[2 + len(counts) :]

    def _check_ends(self, tokens: Sequence[int], name: str) -> None:
        for token in tokens:
            if not 0 <= token < self._number:
                raise IndexError(f"token id {token} is out of range for embedding '{name}' of {self._number} rows")

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The first row of each rank, and the first row after those of each rank."""
        if device not in self._tables:
            first = torch.tensor(self._first, device=device)
            stop = torch.tensor([*self._first[1:], self._number], device=device)
            self._tables[device] = first, stop
        return self._tables[device]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tokens: torch.Tensor, rows: Rows, even: bool, lane: Lane, name: str
    ) -> torch.Tensor:
        found, ctx.look_up = rows.exchange(tokens, even, lane, name)
        group = rows._group()
        assert group is not None
        ctx.gradients = weakref.ref(group.gradients)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradients = ctx.gradients()
        if gradients is None:
            refuse_orphan()
        # A copy: autograd may give the memory to a leaf that was added to the rows, whose next gradient is added there.
        kept = grad.clone(memory_format=torch.contiguous_format)
        gradients.arrived_rows.append((kept.view(-1, grad.shape[-1]), ctx.look_up))
        return grad.new_empty(0), None, None, None, None, None


@_torch.uncompiled
def _complete(group: weakref.ref[ParamGroup], anchor: torch.Tensor) -> None:
    """A backward has gone through all of its look-ups."""
    anchor.grad = None
    known = group()
    if known is not None:
        known.gradients.arrived(0)


def _ends(ids: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest of sorted tokens."""
    return torch.stack((ids[0], ids[-1])) if len(ids) else ids.new_zeros(2)


class RowGradients(Gradients):
    """The gradients of the one parameter of a group by rows."""

    padding: int | None = None  # a row that is not trained

    def __init__(self, *given: Any) -> None:
        self.arrived_rows: list[tuple[torch.Tensor, LookUp]] = []  # in the running backward
        self._kept: list[tuple[torch.Tensor, LookUp]] = []  # since the last reduce
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
    def full_bytes(self) -> int:
        return super().full_bytes if self.counts_unused else 0  # otherwise the batch determines how many rows are sent

    @property
    def what(self) -> str:
        return "reduce" if self.counts_unused else f"reduce {len(self._kept) + len(self.arrived_rows)} look-ups of"

    @property
    def has_partial(self) -> bool:
        return bool(self._kept) or super().has_partial

    @property
    def waiting(self) -> bool:
        return bool(self.arrived_rows) or super().waiting

    def take(self) -> list[torch.Tensor | None]:
        if self.arrived_rows:
            self._used.add(0)
        self._kept += self.arrived_rows
        self.arrived_rows = []
        return super().take()

    def drop(self) -> None:
        self.arrived_rows = []
        super().drop()

    def drop_partial(self) -> None:
        super().drop_partial()
        self._kept = []

    def _add_unreduced(self, gradients: Given) -> None:
        """Gradients of rows stay in `_kept`."""

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
        if self.counts_unused:  # ranks may have made other look-ups, or none, so the whole table is reduced
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

    def launch(
        self, inputs: Tensors, out: DBuffer, reduction: Reduction, after: Tickets = (), then: Action = None
    ) -> Ticket:
        if inputs:
            return super().launch(inputs, out, reduction, after, then)
        lane = reduction.pool.lane
        group = self._among(lane)
        waiting, self.waiting = self.waiting, []
        width = out.layout.slots[0].shape[1]
        tickets: list[Ticket] = []
        received: list[torch.Tensor] = []
        with lane.entered(after):
            for grad, look_up in waiting:
                sent = _added(grad, look_up.seats, sum(look_up.requested))
                got = sent.new_empty(sum(look_up.served), width)
                splits = [count * width for count in look_up.served], [count * width for count in look_up.requested]
                tickets.append(lane.all_to_all(group, got.view(-1), sent.view(-1), *splits, name=reduction.name))
                received.append(got)
                reduction.held += (sent, got, look_up.seats, look_up.served_rows)  # the last two are of another stream
        factor = self.before / group.size() if reduction.op == "avg" else self.before

        def add() -> None:
            for ticket in tickets:
                ticket.wait()
            rows = out.local_view(0)
            if rows.numel() != out.local.numel() or not waiting:
                out.local.zero_()
            if waiting and len(rows):
                places = torch.cat([look_up.served_rows for _, look_up in waiting])
                terms = torch.empty(len(places), width, dtype=sum_dtype(received[0].dtype), device=places.device)
                torch._foreach_copy_(list(terms.split([len(got) for got in received])), received)
                torch.mul(_added(terms, places, len(rows)), factor, out=rows)
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
