"""What `plan` promises, over random shapes, placements and numbers of shards."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout_waste import LAYERS, layer
from flatshard.layout import Holding, holding, least_padded_dim, plan, planner
from flatshard.layout.planner import ALIGN

dims = st.one_of(st.integers(0, 5), st.sampled_from([7, 16, 31, 64, 97, 127, 1009, 4096, 11008, 128256]))
shapes = st.lists(st.lists(dims, min_size=0, max_size=4).map(tuple), min_size=0, max_size=8)
shard_counts = st.one_of(st.integers(1, 9), st.sampled_from([16, 63, 64, 255, 1000, 1024, 4096]))
layouts = st.sampled_from(["tensor", "flat", "auto"])


@settings(max_examples=400, deadline=None)
@given(shapes, layouts, shard_counts)
def test_no_row_is_split_and_no_tensors_overlap(shapes, layout, num_shards):
    planned = plan(shapes, num_shards, layout=layout)
    taken: dict[int, list[tuple[int, int]]] = {}
    assert [slot.shape for slot in planned.slots] == shapes
    for slot in planned.slots:
        piece = planned.segments[slot.segment].piece
        assert slot.offset % ALIGN == 0
        assert slot.stop <= piece * num_shards or slot.numel == 0
        if slot.numel:
            taken.setdefault(slot.segment, []).append((slot.offset, slot.stop))
            first = slot.offset // piece + 1  # the first boundary after the start
            for boundary in {first, min(first + 1, (slot.stop - 1) // piece), (slot.stop - 1) // piece}:
                inside = boundary * piece - slot.offset
                assert inside <= 0 or inside >= slot.numel or inside % slot.row == 0
    for ranges in taken.values():
        ranges.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))


@settings(max_examples=200, deadline=None)
@given(shapes, layouts, st.integers(1, 12))
def test_windows_of_all_ranks_are_every_row_once(shapes, layout, num_shards):
    planned = plan(shapes, num_shards, layout=layout)
    found: list[list[tuple[int, int]]] = [[] for _ in shapes]
    for rank in range(num_shards):
        end = 0
        windows = sorted(zip(planned.windows(rank, 1), planned.slots, found), key=lambda each: each[0].offset)
        for window, slot, rows in windows:
            if math.prod(window.shape):
                assert window.offset >= end
                end = window.offset + math.prod(window.shape)
                first, count = planned.rows(slot, rank, 1)
                assert math.prod(window.shape) == count * slot.row
                rows.append((first, first + count))
        assert end <= planned.shard_numel
    for shape, rows in zip(shapes, found):
        rows.sort()
        assert [stop for _, stop in rows[:-1]] == [start for start, _ in rows[1:]]
        whole = shape[0] if shape else 1
        assert (rows[0][0], rows[-1][1]) == (0, whole) if rows else math.prod(shape) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), st.integers(1, 50))
def test_layout_tensor_gives_the_shards_of_torch_chunk(shape, num_shards):
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    chunks = list(torch.chunk(tensor, num_shards)) if tensor.numel() else []
    planned = plan([shape], num_shards)
    for rank in range(num_shards):
        held = tensor.narrow(0, *planned.rows(planned.slots[0], rank, 1))
        expected = chunks[rank].flatten() if rank < len(chunks) else torch.empty(0, dtype=tensor.dtype)
        assert torch.equal(held.flatten(), expected)


@settings(max_examples=100, deadline=None)
@given(shapes, layouts, st.integers(1, 4), st.integers(1, 4))
def test_on_two_axes_the_inner_shard_contains_the_outer_inner_shard(shapes, layout, outer, inner):
    planned = plan(shapes, outer * inner, layout=layout)
    pieces = []
    for o in range(outer):
        for i in range(inner):
            both = holding(planned.num_shards, (outer, inner), (o, i), (True, True))
            inner_only = holding(planned.num_shards, (outer, inner), (o, i), (False, True))
            assert inner_only.contains(both)
            assert (inner_only.count, both.count) == (outer, 1)
            pieces.append(both.first)
    assert sorted(pieces) == list(range(outer * inner))
    assert holding(planned.num_shards, (outer, inner), (0, 0), (False, False)) == Holding(0, outer * inner)


def test_an_outer_axis_is_cut_only_where_the_inner_one_is():
    with pytest.raises(ValueError, match="last axes first"):
        holding(4, (2, 2), (0, 0), (True, False))
    with pytest.raises(ValueError, match="cannot be split"):
        holding(3, (2, 2), (0, 0), (False, True))


@pytest.mark.parametrize("model", LAYERS)
def test_waste_of_flat_for_a_transformer_layer(model):
    for num_shards in range(1, 257):
        assert plan(LAYERS[model], num_shards, layout="flat").waste <= 0.02, num_shards
    for num_shards in (512, 1024):
        assert plan(LAYERS[model], num_shards, layout="flat").waste <= 0.06, num_shards


def test_flat_takes_one_run_where_that_costs_little_and_row_classes_where_it_costs_much():
    assert len(plan(layer(4096, 14336, 1024), 8, layout="flat").segments) == 1
    wide = plan(LAYERS["Llama-7B"], 1024, layout="flat")
    assert len(wide.segments) > 1
    one_run = 2 * math.lcm(4096, 11008) * 1024  # what a single run would take: 78% of padding
    assert wide.num_shards * wide.shard_numel < one_run / 1.7


def test_auto_is_flat_for_small_tensors_and_tensor_for_large_ones():
    small, large = [(8, 8)] * 20, [(4096, 4096)] * 3
    assert plan(small, 4, layout="auto") == plan(small, 4, layout="flat")
    assert plan(large, 4, layout="auto") == plan(large, 4, layout="tensor")


def test_planning_work_does_not_grow_with_the_number_of_shards(monkeypatch):
    """A 405B layer is laid out as often for 4096 shards as for 8, so 126 of them take milliseconds either way."""
    calls = 0

    def counting(*args):
        nonlocal calls
        calls += 1
        return lay(*args)

    lay = planner._lay
    monkeypatch.setattr(planner, "_lay", counting)
    shapes = tuple(layer(16384, 53248, 1024))
    planner._plan.__wrapped__(shapes, (0,) * len(shapes), 4096, "flat", (False,) * len(shapes))
    assert 0 < calls <= 40


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shapes": [(2, 2)], "num_shards": 0}, "num_shards"),
        ({"shapes": [(2, -2)], "num_shards": 1}, "negative"),
        ({"shapes": [(2, 2)], "num_shards": 1, "layout": "rows"}, "tensor, flat, auto"),
        ({"shapes": [(2, 2)], "num_shards": 1, "dims": [2]}, "2 is not a dim of shape"),
        ({"shapes": [(2, 2)], "num_shards": 1, "dims": [1], "layout": "flat"}, "need layout='tensor'"),
    ],
)
def test_bad_input_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan(**kwargs)


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((8, 4096, 14336), 64, 1),  # Mixtral: 8 rows would be padded to 64
        ((128, 2048, 1536), 64, 0),
        ((8, 4096, 14336), 8, 0),
        ((8, 4096, 14336), 6, 2),  # 12 rows, 4098 or 14340: the last pads least
        ((60, 1408, 2048), 64, 0),  # 64 rows for 60: not worth a copy
        ((1, 4096), 8, 0),  # small, so it is not worth a copy either
        ((128257, 4096), 1024, 0),
        ((1 << 20,), 3, 0),
        ((8, 0, 4), 64, 0),
        ((), 8, 0),
    ],
)
def test_a_tensor_is_cut_where_it_is_padded_little(shape, shards, dim):
    assert least_padded_dim(shape, shards) == dim


@settings(max_examples=200, deadline=None)
@given(st.lists(dims, min_size=1, max_size=4).map(tuple), shard_counts)
def test_the_dim_of_a_cut_pads_less_than_dim_0_by_more_than_a_copy_is_worth(shape, num_shards):
    chosen = least_padded_dim(shape, num_shards)
    waste = [plan([shape], num_shards, dims=[dim]).segments[0].piece * num_shards for dim in range(len(shape))]
    worth = max(planner.TURN_ABOVE * math.prod(shape), planner.AUTO_FLAT_BELOW)
    assert waste[chosen] <= waste[0] - worth if chosen else waste[0] <= min(waste) + worth
