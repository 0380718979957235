"""The arithmetic of the modelled network."""

import math

import pytest

from flatshard.rehearsal import PRESETS, Link, Network
from flatshard.rehearsal.network import get_network, wire_bytes

NETWORK = Network(Link(100e9, 10e-6), Link(10e9, 50e-6), ranks_per_node=4)


def test_level_follows_the_nodes_of_the_ranks():
    assert NETWORK.level([0, 1, 3]) == "inside"
    assert NETWORK.level([4, 7]) == "inside"
    assert NETWORK.level([3, 4]) == "between"
    assert NETWORK.level([0, 4, 8]) == "between"


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_reduce", 6 / 4), ("all_to_all", 3 / 4), ("broadcast", 1)],
)
def test_time_is_latency_plus_share_over_bandwidth(kind, factor):
    assert wire_bytes(kind, 4000, 4) == 4000 * factor
    assert NETWORK.seconds(kind, 1 << 20, 4, "inside") == pytest.approx(10e-6 + factor * (1 << 20) / 100e9)
    assert NETWORK.seconds(kind, 1 << 20, 4, "between") == pytest.approx(50e-6 + factor * (1 << 20) / 10e9)


def test_further_segments_cost_little_and_a_group_of_one_nothing():
    one, nine = (NETWORK.seconds("all_gather", 1 << 20, 4, "inside", segments) for segments in (1, 9))
    assert nine - one == pytest.approx(8 * 2e-6)
    assert NETWORK.seconds("all_reduce", 1 << 30, 1, "inside") == 0
    assert NETWORK.seconds("barrier", 0, 8, "between") == 50e-6


def test_presets():
    assert PRESETS["h100-ib400"].seconds("all_gather", 64 * 45 * 10**9 // 63, 64, "between") == pytest.approx(1, 1e-4)
    assert PRESETS["free"].seconds("all_reduce", 1 << 40, 512, "between", 10) == 0
    assert get_network("h100-nvlink", 4).ranks_per_node == 4
    with pytest.raises(ValueError, match="presets are free, h100-nvlink"):
        get_network("token-ring")


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Link(0, 0)
    with pytest.raises(ValueError, match="latency must not be negative"):
        Link(math.inf, -1)
    with pytest.raises(ValueError, match="ranks_per_node"):
        Network(Link(1, 0), Link(1, 0), ranks_per_node=0)
    with pytest.raises(ValueError, match="sms must be from 0 to 64"):
        Network(Link(1, 0), Link(1, 0), sms=132)
