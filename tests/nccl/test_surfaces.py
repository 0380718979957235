"""The surfaces of FSDP2 and of Megatron-FSDP over NCCL."""

from __future__ import annotations

import pytest

from tests.fsdp2.test_communication import (  # noqa: F401
    test_collectives_of_a_step,
    test_set_reduce_scatter_max_input_buffers,
    test_set_separate_reduce_scatter_group,
    test_share_comm_ctx,
)
from tests.fsdp2.test_extensions import test_coded_weights_train_as_on_one_process  # noqa: F401
from tests.fsdp2.test_forward_methods import test_a_registered_method_is_a_forward  # noqa: F401
from tests.fsdp2.test_gathering import (  # noqa: F401
    test_explicit_prefetch,
    test_set_reshard_after_backward_keeps_weights_for_the_next_micro_batch,
    test_set_reshard_after_forward,
    test_the_next_forward_uses_what_was_unsharded,
)
from tests.fsdp2.test_gradients import (  # noqa: F401
    test_force_sum_reduction_for_comms,
    test_gradient_divide_factor,
    test_set_all_reduce_hook,
    test_set_is_last_backward_lets_reduces_overlap_the_next_forward,
    test_set_reduce_scatter_unused_params,
    test_set_requires_gradient_sync_and_all_reduce,
    test_sums_of_float16_stay_finite,
)
from tests.fsdp2.test_hooks import (  # noqa: F401
    test_post_accumulate_hooks_see_final_gradients_once,
    test_tensor_hooks_change_the_gradient_of_one_backward,
)
from tests.fsdp2.test_mesh_dims import test_axes_of_the_parameters_own_mesh  # noqa: F401
from tests.fsdp2.test_shard_placement import (  # noqa: F401
    test_a_parameter_can_have_a_mesh_of_its_own,
    test_any_dim_trains_as_on_one_process,
    test_experts_on_a_mesh_of_their_own,
)
from tests.fsdp2.test_tied import test_each_of_two_units_can_run_alone, test_training_equals_one_process  # noqa: F401
from tests.megatron import test_contracts, test_equality, test_mcore, test_surface
from tests.megatron.test_mcore import (  # noqa: F401
    test_the_loop_with_experts_by_marks,
    test_the_loop_with_tensor_parallelism_by_marks,
)

pytestmark = [pytest.mark.sampled(2), pytest.mark.limit(90)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(0, 6, 2))
@pytest.mark.parametrize("world", [2, 4])
def test_megatron_strategies_and_accumulation_equal_one_process(ranks, world, number):
    cases = test_equality.cases_for(world, number)
    assert len(cases) > 2
    ranks(world, test_equality._equal, cases[:: 1 if world == 2 else 2])


def _megatron(rank, world, bodies):
    for body in bodies:
        body(rank, world)


BODIES = [
    test_surface._optimizer,
    test_surface._repointed,
    test_surface._first_update,
    test_surface._decoupled,
    test_surface._graph_mode,
    test_surface._by_tokens,
    test_surface._weights,
    test_surface._gather_group,
    test_surface._schedule,
    test_mcore._orders,
]


def test_the_surface_of_megatron(ranks):
    ranks(2, _megatron, BODIES)


def test_the_quick_start_of_megatron(ranks, tmp_path):
    ranks(2, test_surface._quick_start, tmp_path / "saved")


def test_gradients_are_finished_by_hand_and_instances_are_an_outer_axis(ranks):
    ranks(4, _megatron, [test_surface._microbatches, test_surface._configured])


def test_models_of_many_kinds_under_all_strategies(ranks):
    cases = [
        (kind, strategy, outer, test_contracts.PLAIN)
        for kind, strategy, outer in zip(
            [*test_contracts.UNITS] * 2, test_contracts.STRATEGIES, (None, "no_shard", None, "no_shard"), strict=False
        )
    ]
    ranks(4, test_contracts._trains, (2, 2, 1, 1), cases)
