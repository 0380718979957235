"""DBuffer against plain tensor arithmetic, on CPU ranks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flatshard.buffer import DBuffer, Lane
from flatshard.layout import Flat, Partial, Replicate, plan
from flatshard.megatron.experimental.redistribute import redistribute
from tests.dist import buffer_cases as cases

worlds = pytest.mark.parametrize("world", [2, 3, 4])
layouts = pytest.mark.parametrize("layout", ["tensor", "flat"])


@worlds
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_legal_transition_on_one_axis(ranks, world, layout, dtype):
    assert ranks(world, cases.every_legal_transition_1d, "cpu", layout, dtype) == [None] * world


@layouts
def test_every_legal_transition_on_two_axes(ranks, layout):
    assert ranks(4, cases.every_legal_transition_2d, "cpu", layout) == [None] * 4


@worlds
@layouts
def test_gather_in_place_keeps_the_identity_of_views(ranks, world, layout):
    assert ranks(world, cases.in_place_gather, "cpu", layout, torch.bfloat16) == [None] * world


def test_gather_in_place_over_two_axes(ranks):
    assert ranks(4, cases.in_place_gather_over_two_axes, "cpu") == [None] * 4


@worlds
def test_lanes_with_their_own_groups(ranks, world):
    assert ranks(world, cases.lanes_with_their_own_groups, "cpu") == [None] * world


def test_fp8_travels_as_bytes(ranks):
    assert ranks(2, cases.fp8_travels_as_bytes, "cpu") == [None] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_dtensors_are_the_shards_of_torch_chunk(ranks, world):
    assert ranks(world, cases.dtensors_are_canonical, "cpu") == [None] * world


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_of_ragged_shards_are_ragged(ranks, world):
    ranks(world, cases.gradients_of_ragged_shards)


def _refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    planned = plan([(4, 2)], world)
    buffer = DBuffer.distribute([torch.ones(4, 2)], planned, mesh, [Flat()])
    partial = DBuffer.distribute([torch.ones(4, 2)], planned, mesh, [Partial()])
    lane = Lane("test", torch.device("cpu"))
    attempts = {
        "cannot go from": lambda: redistribute(buffer, [Partial()]),
        "to Partial(op='avg')": lambda: redistribute(partial, [Partial("avg")]),
        "1 axes": lambda: redistribute(buffer, [Flat(), Flat()]),
        "not a gather": lambda: buffer.gather_in_place([Partial()], lane=lane),
        "was planned for": lambda: DBuffer.distribute([torch.ones(2, 2)], planned, mesh, [Flat()]),
        "need (": lambda: DBuffer(planned, mesh, [Flat()], torch.ones(3)),
    }
    said = {}
    for expected, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[expected] = str(error)
    return said


def test_mistakes_are_refused_with_what_was_expected(ranks):
    for said in ranks(2, _refusals):
        assert len(said) == 6
        for expected, message in said.items():
            assert expected in message


def _launches(rank, world):
    """One coalesced launch moves all segments of a buffer."""
    mesh = init_device_mesh("cpu", (world,))
    planned = plan([(8, 8)] * 10, world)
    buffer = DBuffer.distribute([torch.ones(8, 8)] * 10, planned, mesh, [Flat()])
    lane = Lane("test", torch.device("cpu"))
    redistribute(buffer, [Replicate()], lane=lane)
    return len(planned.segments), lane.launched, lane.history[-1].numbytes


def _gloo_operations(rank, world):
    """What torch is asked for in a gather and a reduction of several segments."""
    mesh = init_device_mesh("cpu", (world,))
    planned = plan([(8, 8)] * 3, world)
    lane = Lane("test", torch.device("cpu"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        buffer = DBuffer.distribute([torch.ones(8, 8)] * 3, planned, mesh, [Flat()])
        redistribute(buffer, [Replicate()], lane=lane)
        partial = DBuffer.distribute([torch.ones(8, 8)] * 3, planned, mesh, [Partial("sum")])
        redistribute(partial, [Flat()], lane=lane)
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("c10d::")})


def test_gloo_is_never_asked_to_gather_a_list(ranks):
    """A rank died of it once in thousands of tests; why is said in lanes.py."""
    for asked in ranks(2, _gloo_operations):
        assert "c10d::_allgather_base_" in asked
        assert "c10d::allgather_into_tensor_coalesced_" not in asked


def test_all_segments_go_in_one_launch(ranks):
    assert ranks(2, _launches) == [(10, 1, 10 * 64 * 4)] * 2
