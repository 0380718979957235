"""Experts on meshes of their own, over NCCL, equal one process."""

from __future__ import annotations

import pytest

from tests.moe.test_checkpoints import LAYOUTS, _move
from tests.moe.test_context import test_a_sequence_over_ranks_equals_one_process  # noqa: F401
from tests.moe.test_norms import (  # noqa: F401
    test_an_expert_with_a_gradient_that_is_not_finite_is_named,
    test_one_norm_over_several_meshes_by_one_collective_each,
)
from tests.moe.test_strategies import test_accumulated_gradients_of_experts  # noqa: F401
from tests.moe.test_training import test_experts_over_meshes_equal_one_process  # noqa: F401

pytestmark = [pytest.mark.sampled(2), pytest.mark.limit(90)]


def test_weights_and_optimizer_state_move_between_layouts(ranks, tmp_path):
    ranks(4, _move, str(tmp_path), LAYOUTS[:2])
