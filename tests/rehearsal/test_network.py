"""The arithmetic of the modelled network."""

import math

import pytest

from flatshard.rehearsal import PRESETS, Link, Network
from flatshard.rehearsal.network import Reach, get_network, wire_bytes

NETWORK = Network(Link(100e9, 10e-6), Link(10e9, 50e-6), ranks_per_node=4)


def test_level_follows_the_nodes_of_the_ranks():
    assert NETWORK.reach([0, 1, 3]).level == "inside"
    assert NETWORK.reach([4, 7]).level == "inside"
    assert NETWORK.reach([3, 4]).level == "between"
    assert NETWORK.reach([0, 4, 8]).level == "between"


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_reduce", 6 / 4), ("all_to_all", 3 / 4), ("broadcast", 1)],
)
def test_time_is_latency_plus_share_over_bandwidth(kind, factor):
    assert wire_bytes(kind, 4000, 4) == 4000 * factor
    assert NETWORK.seconds(kind, 1 << 20, Reach(4)) == pytest.approx(10e-6 + factor * (1 << 20) / 100e9)
    assert NETWORK.seconds(kind, 1 << 20, Reach(4, 2)) == pytest.approx(50e-6 + factor * (1 << 20) / 10e9)


def test_further_segments_cost_little_and_a_group_of_one_nothing():
    one, nine = (NETWORK.seconds("all_gather", 1 << 20, Reach(4), segments) for segments in (1, 9))
    assert nine - one == pytest.approx(8 * 2e-6)
    assert NETWORK.seconds("all_reduce", 1 << 30, Reach(1)) == 0
    assert NETWORK.seconds("barrier", 0, Reach(8, 2)) == 50e-6


def test_presets():
    assert PRESETS["h100-ib400"].seconds("all_gather", 64 * 45 * 10**9 // 63, Reach(64, 8)) == pytest.approx(1, 1e-4)
    assert PRESETS["free"].seconds("all_reduce", 1 << 40, Reach(512, 64), 10) == 0
    assert get_network("h100-nvlink", 4).ranks_per_node == 4
    with pytest.raises(ValueError, match="must be one of free, h100-nvlink"):
        get_network("token-ring")


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"bandwidth=0\): must be positive"):
        Link(0, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        Link(math.inf, -1)
    with pytest.raises(ValueError, match="ranks_per_node"):
        Network(Link(1, 0), Link(1, 0), ranks_per_node=0)
    with pytest.raises(ValueError, match=r"sms=\S+: must be from 0 to 64"):
        Network(Link(1, 0), Link(1, 0), sms=132)


PODS = Network(
    Link(100e9, 1e-6, 1e-6), Link(10e9, 2e-6, 10e-6), 4, across=Link(1e9, 3e-6, 100e-6), ranks_per_pod=16, rails=4
)


def test_three_levels_and_rails():
    assert PODS.reach(range(4)) == Reach(4, 1, 1)
    assert PODS.reach(range(0, 64, 4)) == Reach(16, 16, 4)
    assert [PODS.reach(range(count)).level for count in (4, 16, 17)] == ["inside", "between", "across"]
    assert PODS.bandwidth(Reach(16, 4, 1)) == 4 * 10e9  # each rank of a node sends over an adapter of its own
    assert PODS.bandwidth(Reach(4, 4, 1)) == 10e9  # one rank of each node has one
    assert PODS.bandwidth(Reach(16, 16, 4)) == 1e9


@pytest.mark.parametrize(
    ("algorithm", "microseconds"),
    [("constant", 0), ("ring", 48 + 10 * 12 + 100 * 3), ("tree", 2 + 10 * 2 + 100 * 2), ("hierarchical", 3 + 30 + 300)],
)
def test_latency_grows_by_the_algorithm(algorithm, microseconds):
    network = get_network(PODS, algorithm=algorithm)
    assert network.hops("all_gather", network.reach(range(64))) == pytest.approx(microseconds * 1e-6)
    assert network.hops("all_reduce", network.reach(range(64))) == pytest.approx(2 * microseconds * 1e-6)
    assert network.hops("all_gather", Reach(1)) == 0
    seconds = network.seconds("barrier", 0, network.reach(range(64)))
    assert seconds == pytest.approx((3 + microseconds) * 1e-6)


def test_pods_of_broken_nodes_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of ranks_per_node=8"):
        get_network("h100-pods", ranks_per_pod=100)
    with pytest.raises(ValueError, match=r"algorithm='star'\): must be one of"):
        get_network("h100-pods", algorithm="star")
