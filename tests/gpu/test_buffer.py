"""The buffer cases with CUDA tensors and streams: two ranks on one GPU, over Gloo."""

import pytest
import torch

from tests.dist import buffer_cases as cases


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_legal_transition_on_one_axis(ranks, layout, dtype):
    assert ranks(2, cases.every_legal_transition_1d, "cuda", layout, dtype) == [None] * 2


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.limit(120)
def test_every_legal_transition_on_two_axes(ranks, layout):
    assert ranks(4, cases.every_legal_transition_2d, "cuda", layout) == [None] * 4


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_gather_in_place_keeps_the_identity_of_views(ranks, layout):
    assert ranks(2, cases.in_place_gather, "cuda", layout, torch.bfloat16) == [None] * 2


def test_lanes_with_their_own_groups(ranks):
    assert ranks(2, cases.lanes_with_their_own_groups, "cuda") == [None] * 2


def test_fp8_travels_as_bytes(ranks):
    assert ranks(2, cases.fp8_travels_as_bytes, "cuda") == [None] * 2


def test_dtensors_are_the_shards_of_torch_chunk(ranks):
    assert ranks(2, cases.dtensors_are_canonical, "cuda") == [None] * 2


def _pool_reuses_and_orders(rank, world):
    """A released block is given out again at the same address, and is not overwritten while it is still read."""
    from flatshard.buffer import Lane, Pool

    device = torch.device("cuda")
    lane = Lane("gather", device)
    pool = Pool(lane)
    size = 64 << 20
    first, second = pool.empty(size, torch.float32), pool.empty(size, torch.float32)
    pool.allocate(first)
    address = first.data_ptr()
    with lane.entered():
        first.fill_(1)
        ticket = lane.mark()
    ticket.wait()
    torch.cuda._sleep(50_000_000)  # compute reads late
    total = first.sum()
    pool.release(first)
    pool.allocate(second)
    with lane.entered():
        second.fill_(2)
    same = second.data_ptr() == address
    outside = torch.empty(size, device=device)  # the activation heap does not get the pool's blocks
    return same, total.item(), outside.data_ptr() == address, pool.peak_bytes


def test_storage_freed_on_one_stream_is_not_reused_early(ranks):
    assert ranks(1, _pool_reuses_and_orders) == [(True, 64 << 20, False, 4 * (64 << 20))]
