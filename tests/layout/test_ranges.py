"""Flat ranges as rectangles."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatshard.layout import rectangles


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=0, max_size=4), st.data())
def test_rectangles_cover_the_range_once_and_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).reshape(shape)
    boxes = rectangles(shape, start, stop)
    parts = [tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].flatten() for offsets, sizes in boxes]
    covered = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
    assert torch.equal(covered, torch.arange(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_whole_rows_are_one_rectangle():
    assert rectangles((8, 3, 2), 12, 30) == [((2, 0, 0), (3, 3, 2))]
    assert rectangles((), 0, 1) == [((), ())]
    assert rectangles((4, 4), 5, 5) == []
