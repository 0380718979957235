"""Transitions: what is legal, and how."""

import pytest

from flatshard.layout.placement import Block, Flat, Partial, Replicate, Transition, transition

SHARDED = [Flat(), Block(4)]


@pytest.mark.parametrize("target", SHARDED, ids=str)
def test_sharded_axes_gather_reduce_and_scatter(target):
    assert transition(target, Replicate()) is Transition.ALL_GATHER
    assert transition(Replicate(), target) is Transition.SCATTER
    assert transition(Partial(), target) is Transition.REDUCE_SCATTER
    assert transition(target, target) is Transition.NONE


@pytest.mark.parametrize(
    ("source", "target"),
    [(Replicate(), Partial()), (Flat(), Partial("avg")), (Partial("sum"), Partial("avg")), (Block(2), Block(4))],
    ids=str,
)
def test_nothing_becomes_partial_or_is_cut_otherwise(source, target):
    with pytest.raises(ValueError, match="cannot go from"):
        transition(source, target)


def test_bad_placements_are_refused():
    with pytest.raises(ValueError, match="rows"):
        Block(0)
    with pytest.raises(ValueError, match="op"):
        Partial("max")  # type: ignore[arg-type]
