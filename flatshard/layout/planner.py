"""Plans layouts from shapes: segments, offsets, shard length, padding.

A layout splits a group's tensors over N shards. It is a list of segments; each is a contiguous run of N equal pieces,
and shard ``s`` is piece ``s`` of every segment. Two tensors of 6 and 2 rows of 2 elements, over N = 4 shards:

    layout "tensor": one segment per tensor                      piece
        segment 0   |a0 a1|a2 a3|a4 a5|  pad  |                    4 elements
        segment 1   |b0|b1|pad|pad|                                2
    layout "flat": one segment for both
        segment 0   |a0 a1|a2 a3|a4 a5|b0 b1|                      4
        shard 0: a0 a1      shard 3: b0 b1                         (offsets are not rounded in this picture)

A buffer stores its pieces segment after segment. The run of each segment starts at a multiple of ``ALIGN``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

LayoutName: TypeAlias = Literal["tensor", "flat", "auto"]
Shape: TypeAlias = tuple[int, ...]
Parts: TypeAlias = tuple[list[int], list[bool]]  # parts of a flat tensor: their sizes, and which of them are wanted

# In elements. Vectorised kernels load 16 bytes at once; 16 elements are enough even for one-byte dtypes.
ALIGN = 16
# `auto` chooses `flat` below this average number of elements per tensor: there the launch cost of one more segment
# (about 2 microseconds) exceeds the time that its bytes take on a fast network.
AUTO_FLAT_BELOW = 1 << 18
# Sharding on another dim than 0 costs a copy of the tensor in each gather and reduce, and memory while it is in use.
# Padding of more than this fraction of the tensor costs more.
TURN_ABOVE = 0.1
# `flat` prefers fewer segments if they need at most this fraction of the payload in padding beyond the best choice.
FEWER_SEGMENTS_WORTH = 0.002
# A piece is rounded up to a multiple of ALIGN if that lengthens it by at most this fraction.
ALIGNED_PIECE_WORTH = 0.01
# All partitions are tried for up to this many row classes (Bell(5) = 52); for more, only neighbours are merged.
EXHAUSTIVE_CLASSES = 5


@dataclass(frozen=True)
class Segment:
    """A run of equal pieces, ``piece`` elements each."""

    piece: int


@dataclass(frozen=True)
class Slot:
    """The place of one tensor: ``numel`` elements from ``offset`` in the run of segment ``segment``."""

    segment: int
    offset: int
    shape: Shape
    row: int  # elements of one row, which are never split
    dim: int = 0  # rows are slices of this dim

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


class Window(NamedTuple):
    """The rows of one tensor in a buffer: a contiguous view of the flat local tensor."""

    offset: int
    shape: Shape
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The tensors of one group, split over ``num_shards``. Made by `plan`."""

    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]
    num_shards: int
    _starts: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict, compare=False, repr=False)
    _windows: dict[tuple[int, int], tuple[Window, ...]] = field(default_factory=dict, compare=False, repr=False)
    _parts: dict[tuple[int, int, int], Parts] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> Any:
        """Without what has been computed since."""
        return Layout, (self.slots, self.segments, self.num_shards)

    def run_starts(self, pieces: int) -> tuple[int, ...]:
        """The offset of each segment's run in a buffer that holds ``pieces`` consecutive pieces of every segment."""
        return self._runs(pieces)[0]

    def buffer_numel(self, pieces: int) -> int:
        """The number of elements of a buffer that holds ``pieces`` consecutive pieces of every segment."""
        return (self._starts[pieces] if pieces in self._starts else self._runs(pieces))[1]

    def _runs(self, pieces: int) -> tuple[tuple[int, ...], int]:
        if pieces not in self._starts:
            starts, end = [], 0
            for segment in self.segments:
                starts.append(end)
                end = round_up(end + pieces * segment.piece, ALIGN)
            self._starts[pieces] = tuple(starts), end
        return self._starts[pieces]

    def run_parts(self, held: int, first: int, pieces: int) -> Parts:
        """How to split a buffer with ``held`` pieces of every segment, to get ``pieces`` of them from ``first``.

        Returns the sizes of the parts, and which of them are runs of non-empty segments; the others are gaps.
        """
        key = (held, first, pieces)
        if key not in self._parts:
            parts: list[tuple[int, bool]] = []
            end = 0
            for start, segment in zip(self.run_starts(held), self.segments):
                if segment.piece:
                    begin = start + first * segment.piece
                    parts += ((begin - end, False), (pieces * segment.piece, True))
                    end = begin + pieces * segment.piece
            parts.append((self.buffer_numel(held) - end, False))
            parts = [part for part in parts if part[0]]
            self._parts[key] = [size for size, _ in parts], [is_run for _, is_run in parts]
        return self._parts[key]

    def windows(self, first: int, pieces: int) -> tuple[Window, ...]:
        """The rows of each tensor in a buffer that holds ``pieces`` pieces from ``first`` of every segment.

        A tensor that is not in the buffer has a window of zero rows. A tensor that is sharded on another dim than 0 has
        a window only in a buffer of one piece, because only single pieces are contiguous (`turned`).
        """
        key = (first, pieces)
        if key not in self._windows:
            self._windows[key] = tuple(self._window(slot, first, pieces) for slot in self.slots)
        return self._windows[key]

    def _window(self, slot: Slot, first: int, pieces: int) -> Window:
        row, count = self.rows(slot, first, pieces)
        shape = (*slot.shape[: slot.dim], count, *slot.shape[slot.dim + 1 :]) if slot.shape or not count else ()
        stride = tuple(max(math.prod(shape[dim + 1 :]), 1) for dim in range(len(shape)))
        within = slot.offset + row * slot.row - first * self.segments[slot.segment].piece
        return Window(self.run_starts(pieces)[slot.segment] + within if count * slot.row else 0, shape, stride)

    def rows(self, slot: Slot, first: int, pieces: int) -> tuple[int, int]:
        """The first row, and the number of rows, of a tensor in ``pieces`` pieces from ``first``."""
        total = slot.shape[slot.dim] if slot.shape else 1
        if not slot.row:
            # Another dim is 0, so there are no elements. Rows are still split as torch.chunk does.
            chunk = -(-total // self.num_shards)
            low, high = first * chunk, (first + pieces) * chunk
        else:
            piece = self.segments[slot.segment].piece
            low, high = ((p * piece - slot.offset) // slot.row for p in (first, first + pieces))
        low, high = (min(max(row, 0), total) for row in (low, high))
        return low, high - low

    @cached_property
    def turned(self) -> frozenset[int]:
        """The tensors that are sharded on another dim than 0: a buffer of several pieces has them in another order."""
        return frozenset(index for index, slot in enumerate(self.slots) if slot.dim and self.num_shards > 1)

    @cached_property
    def run_numel(self) -> int:
        """The number of elements in one piece of every segment, without the gaps between them in a buffer."""
        return sum(segment.piece for segment in self.segments)

    @property
    def shard_numel(self) -> int:
        return self.buffer_numel(1)

    @cached_property
    def payload(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def waste(self) -> float:
        """Padding as a fraction of the payload: 0.02 means that all ranks together store 2% more than the tensors."""
        return (self.num_shards * self.shard_numel - self.payload) / self.payload if self.payload else 0.0


def least_padded_dim(shape: Sequence[int], num_shards: int) -> int:
    """The dim to shard a tensor on: 0, unless that needs much padding and another dim does not.

    Stacked experts, ``(experts, in, out)``, are sharded on dim 1 if there are fewer experts than shards. Small tensors
    are always sharded on dim 0: sending their padding takes less time than launching a copy.
    """
    numel = math.prod(shape)
    padding = [round_up(size, num_shards) * (numel // size) - numel for size in shape] if numel else []
    least = min(padding, default=0)
    worth = max(TURN_ABOVE * numel, AUTO_FLAT_BELOW)
    return padding.index(least) if padding and padding[0] - least > worth else 0


def plan(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    layout: LayoutName = "tensor",
    dims: Sequence[int] | None = None,
    apart: Sequence[bool] | None = None,
) -> Layout:
    """Split tensors of these shapes over ``num_shards``, each on its dim in ``dims`` (default: 0).

    In every layout, no row is split between shards; tensors do not overlap and each is contiguous in the run of its
    segment; all pieces of a segment have equal length. ``tensor`` gives each shard the rows of
    ``torch.chunk(tensor, num_shards, dim)``. 0-dim tensors count as one row of one element; empty tensors take no
    space. Dims other than 0 need layout ``tensor`` (``auto`` chooses it for them). Tensors marked in ``apart`` share
    segments only with each other, because they are sent in another format.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards!r}: must be at least 1")
    if layout not in get_args(LayoutName):
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(get_args(LayoutName))}")
    frozen = tuple(tuple(int(n) for n in shape) for shape in shapes)
    for shape in frozen:
        if any(n < 0 for n in shape):
            raise ValueError(f"shapes: {shape} has a negative size")
    rows_of = tuple(0 for _ in frozen) if dims is None else tuple(dims)
    for shape, dim in zip(frozen, rows_of, strict=True):
        if not 0 <= dim < max(len(shape), 1):
            raise ValueError(f"dims: {dim} is not a dim of shape {shape}")
    if any(rows_of) and layout == "flat":
        raise ValueError(f"dims={rows_of}: dims other than 0 need layout='tensor'")
    marks = tuple(False for _ in frozen) if apart is None else tuple(apart)
    return _plan(frozen, rows_of, num_shards, layout, marks)


@lru_cache(maxsize=4096)
def _plan(
    shapes: tuple[Shape, ...], dims: tuple[int, ...], num_shards: int, layout: LayoutName, marks: tuple[bool, ...]
) -> Layout:
    if layout == "auto":
        mean = sum(math.prod(shape) for shape in shapes) / max(len(shapes), 1)
        layout = "flat" if mean < AUTO_FLAT_BELOW and not any(dims) else "tensor"
    bare = [
        Slot(0, 0, shape, math.prod(shape[:dim]) * math.prod(shape[dim + 1 :]), dim) for shape, dim in zip(shapes, dims)
    ]
    if layout == "tensor":
        rows = [slot.numel // slot.row if slot.row else 0 for slot in bare]
        runs = [_Run(-(-rows[i] // num_shards) * slot.row, {i: 0}) for i, slot in enumerate(bare)]
    else:
        kinds = [[index for index, mark in enumerate(marks) if mark is kind] for kind in (False, True)]
        runs = [run for members in kinds if members for run in _tightest(bare, members, num_shards)]
        runs = runs or [_Run(0, {})]
    slots = list(bare)
    for number, run in enumerate(runs):
        for index, offset in run.offsets.items():
            slots[index] = replace(bare[index], segment=number, offset=offset)
    return Layout(tuple(slots), tuple(Segment(run.piece) for run in runs), num_shards)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass
class _Run:
    """One segment being planned: its piece, and the offset of each tensor (by index) in it."""

    piece: int
    offsets: dict[int, int]


def _tightest(slots: Sequence[Slot], members: Sequence[int], num_shards: int) -> list[_Run]:
    """Pack some of the tensors into few runs with little padding, by the size of their rows.

    If a tensor crosses piece boundaries, the piece must be a multiple of its row. The piece of a run for all tensors is
    then a multiple of the lcm of all rows, which can need much padding. With one run per row size, padding is less than
    one row per shard and run. Which is better depends on the shapes and on the number of shards.
    """
    classes = _classes(slots, members)
    if not classes:
        return [_Run(0, dict.fromkeys(members, 0))]
    partitions = _partitions(classes) if len(classes) <= EXHAUSTIVE_CLASSES else _merges(classes)
    best = [
        [_pack_rows(slots, [index for members in part for index in members], num_shards) for part in partition]
        for partition in partitions
    ]
    payload = sum(slots[index].numel for index in members)
    tight = min(_padded(runs, num_shards) for runs in best)
    good = [runs for runs in best if _padded(runs, num_shards) <= tight + FEWER_SEGMENTS_WORTH * payload]
    return min(good, key=lambda runs: (len(runs), _padded(runs, num_shards)))


def _padded(runs: Sequence[_Run], num_shards: int) -> int:
    return num_shards * sum(round_up(run.piece, ALIGN) for run in runs)


def _classes(slots: Sequence[Slot], members: Sequence[int]) -> list[list[int]]:
    """Tensors by the size of their rows, largest first. Empty tensors are in the first class.

    If there are many sizes, a class whose row divides that of another is merged into it, which does not change the
    condition for the piece.
    """
    by_row: dict[int, list[int]] = {}
    for index in sorted(members, key=lambda i: -slots[i].row):
        if slots[index].numel:
            by_row.setdefault(slots[index].row, []).append(index)
    if len(by_row) > EXHAUSTIVE_CLASSES:
        for row in sorted(by_row):
            host = next((other for other in sorted(by_row) if other > row and other % row == 0), None)
            if host is not None:
                by_row[host] += by_row.pop(row)
    classes = list(by_row.values())
    if classes:
        classes[0].extend(index for index in members if not slots[index].numel)
    return classes


def _partitions(items: list[list[int]]) -> Iterator[list[list[list[int]]]]:
    """All ways to divide ``items`` into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield [[first], *parts]
        for at in range(len(parts)):
            yield [*parts[:at], [first, *parts[at]], *parts[at + 1 :]]


def _merges(items: list[list[int]]) -> Iterator[list[list[list[int]]]]:
    """Every item alone, all items in one group, and each pair of neighbours merged."""
    alone = [[item] for item in items]
    yield alone
    yield [items]
    for at in range(len(items) - 1):
        yield [*alone[:at], items[at : at + 2], *alone[at + 2 :]]


def _pack_rows(slots: Sequence[Slot], members: list[int], num_shards: int) -> _Run:
    """One run of tensors, largest row first, with a piece that is long enough that no boundary splits a row.

    If the piece is a multiple of ``ALIGN``, every local view is aligned; odd row sizes may need too much padding.
    """
    order = sorted(members, key=lambda i: (-slots[i].row, i))
    step = math.lcm(*(slots[i].row for i in order if slots[i].numel))
    tight, aligned = (_fit(slots, order, num_shards, s) for s in (step, math.lcm(step, ALIGN)))
    return aligned if aligned.piece <= tight.piece * (1 + ALIGNED_PIECE_WORTH) else tight


def _fit(slots: Sequence[Slot], order: Sequence[int], num_shards: int, step: int) -> _Run:
    """The run with the shortest piece that is a multiple of ``step``."""
    piece = round_up(-(-sum(slots[i].numel for i in order) // num_shards), step)
    while True:
        offsets, end = _lay(slots, order, piece)
        if end <= num_shards * piece:
            return _Run(piece, offsets)
        piece += step


def _lay(slots: Sequence[Slot], order: Sequence[int], piece: int) -> tuple[dict[int, int], int]:
    """The offsets of the tensors in a run of pieces of this length, and the end of the last tensor."""
    offsets: dict[int, int] = {}
    end = 0
    for index in order:
        slot = slots[index]
        if slot.numel == 0:
            offsets[index] = 0
            continue
        offset = round_up(end, ALIGN)
        if offset // piece != (offset + slot.numel - 1) // piece:
            offset = round_up(end, math.lcm(slot.row, ALIGN))
        offsets[index] = offset
        end = offset + slot.numel
    return offsets, end
