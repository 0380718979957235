"""Weights and gradients that travel in fewer bytes, embeddings by rows, and optimizers of whole matrices, over NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.dist import test_rows, test_rows_use
from tests.dist.test_rows import test_rows_travel_and_the_table_does_not  # noqa: F401
from tests.formats import test_training, test_wire
from tests.formats.test_wire import (  # noqa: F401
    test_a_rank_that_passes_a_unit_over_keeps_its_part,
    test_accumulated_gradients_are_rounded_once,
    test_bytes_and_launches,
    test_checkpoints_know_nothing_of_formats,
    test_formats_can_be_switched_between_steps,
    test_no_more_is_gathered_ahead_than_can_be_decoded,
    test_ranks_that_encode_different_parameters_are_told,
    test_ranks_that_switch_to_different_formats_are_told,
    test_tables_by_rows_travel_as_they_are,
    test_the_mean_is_off_by_the_mean_of_half_the_scales,
    test_what_is_gathered_ahead_takes_the_bytes_that_travelled,
)
from tests.whole import test_equal, test_state
from tests.whole.test_equal import (  # noqa: F401
    test_experts_apart,
    test_hybrid_meshes,
    test_some_parameters_whole_and_the_rest_on_shards,
    test_tensor_parallel_parameters_are_gathered_over_both_axes,
)

pytestmark = pytest.mark.limit(120)


def _every(rank, world, body, cases):
    for case in cases:
        body(rank, world, *case)


def _formats_of(world):
    """Models on the meta device are left out: their bodies empty them on the CPU."""
    return [c for c in test_training.CASES if torch.Size(c[0]).numel() == world and c[-1].get("change") != "meta"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_in_fewer_bytes_equals_one_process(ranks, world):
    cases = _formats_of(world)
    assert len(cases) >= 3
    ranks(world, _every, test_training._train, cases)


@pytest.mark.parametrize("code", ["int8", "float8"])
def test_forward_recompute_and_backward_see_the_same_bits(ranks, code):
    ranks(2, test_wire._same_bits, "tensor", code)


def _rows_of(world):
    return [case for case in test_rows.CASES if torch.Size(case[0]).numel() == world]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_embeddings_by_rows_equal_one_process(ranks, world):
    cases = _rows_of(world)
    assert cases
    ranks(world, _every, test_rows._equals, cases)


# Without the one whose event is the CPU's, and the one that looks beyond the table, which is a device-side assert here.
_OF_CPU = (test_rows_use._after_the_optimizer, test_rows_use._even_and_beyond)
USES = [use for use in test_rows_use.USES if use not in _OF_CPU]


@pytest.mark.parametrize("part", [0, 1])
def test_embeddings_by_rows_used_otherwise(ranks, part):
    ranks(2, _each, USES[part::2])


def _each(rank, world, bodies):
    for body in bodies:
        body(rank, world)


@pytest.mark.parametrize("strategy", [3, 1])
def test_whole_matrices_equal_unsharded_ones(ranks, strategy):
    ranks(2, test_equal._equal, ["muon", "adafactor"], [{"layout": "tensor", "strategy": strategy}], 4)


def test_whole_matrices_move_between_numbers_of_ranks(ranks, tmp_path):
    ranks(4, test_state._save, tmp_path / "four", "muon", {})
    ranks(2, test_state._load, tmp_path / "four", "muon", {"strategy": 1})
