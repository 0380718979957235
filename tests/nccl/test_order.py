"""What must happen in one order on every rank, over NCCL: ranks that differ are told, or take part; nobody waits."""

from __future__ import annotations

import pytest

from tests.order import test_patterns
from tests.order.test_agreement import (  # noqa: F401
    test_models_that_differ_are_refused_on_all_ranks_and_the_difference_is_named,
)
from tests.order.test_caught_exception import (  # noqa: F401
    test_accumulated_gradients_outlive_a_forward_that_raised,
    test_so_do_those_that_wait_for_the_outer_axis,
)
from tests.order.test_convoys import (  # noqa: F401
    test_a_group_that_one_rank_cannot_gather,
    test_a_launch_that_fails,
    test_one_launch_for_all_groups_of_a_unit,
)
from tests.order.test_copies import test_a_copy_trains_as_the_model_does  # noqa: F401
from tests.order.test_dropped_forward import test_a_forward_without_backward_does_not_count  # noqa: F401
from tests.order.test_gathered import (  # noqa: F401
    test_gradients_of_what_is_used_without_a_forward_are_reduced,
    test_parameters_are_sharded_again_under_every_strategy,
    test_parts_of_the_root_can_be_called_by_themselves,
    test_training_in_a_body_equals_one_process,
)
from tests.order.test_groups import test_experts_that_are_idle_on_some_ranks  # noqa: F401
from tests.order.test_heads import (  # noqa: F401
    test_branches_of_a_nested_unit_that_ranks_use_differently,
    test_heads_of_the_root_that_ranks_use_differently,
)
from tests.order.test_meshes import (  # noqa: F401
    test_all_ranks_raise_where_one_differs_on_one_axis,
    test_units_on_two_meshes_train_as_one_process,
)
from tests.order.test_norms import (  # noqa: F401
    test_infinities_are_named_alike_on_all_ranks,
    test_norms_by_name_are_the_same_on_all_ranks,
)
from tests.order.test_optional import (  # noqa: F401
    test_a_unit_that_was_run_twice_at_first_is_launched_once,
    test_parameters_that_are_frozen_while_a_rank_skips_them,
    test_what_ranks_that_skip_a_unit_could_not_follow_is_refused,
)
from tests.order.test_released_weights import test_a_late_gradient_is_right_or_its_unit_is_named  # noqa: F401
from tests.order.test_skipped_unit import test_a_unit_that_one_rank_skips_in_training_is_named_on_all  # noqa: F401

pytestmark = pytest.mark.sampled(3)

PATTERNS = [
    test_patterns._policy_and_reference,
    test_patterns._alternation,
    test_patterns._contrast,
    test_patterns._penalty_on_parameters,
    test_patterns._penalty_on_gradients,
    test_patterns._whole_matrix_search,
    test_patterns._factored,
    test_patterns._head_of_another_unit,
]


def _all(rank, world, patterns):
    for pattern in patterns:
        pattern(rank, world)


def test_patterns_equal_one_process(ranks):
    ranks(2, _all, PATTERNS)
