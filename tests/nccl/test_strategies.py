"""Strategies, HSDP, HFSDP and accumulation over NCCL equal one process."""

from __future__ import annotations

import pytest
import torch

from tests.dist.test_accumulation import (  # noqa: F401
    test_a_loss_per_token_equals_one_process_with_uneven_token_counts,
    test_accumulated_gradients_equal_one_process_however_it_is_said,
    test_microbatch_nests_over_wrapped_and_unwrapped_parents,
    test_what_rests_is_waited_for,
)
from tests.dist.test_choices import _trains, legal
from tests.dist.test_clip import (  # noqa: F401
    test_meshes_and_dtypes_mix,
    test_nonfinite_gradients_are_named_with_their_rank,
    test_the_norm_is_that_of_the_unsharded_model,
)
from tests.dist.test_engine import (  # noqa: F401
    test_bf16_gives_the_losses_of_fsdp2,
    test_fp32_is_exact_where_arithmetic_allows,
    test_gradients_are_the_means_over_ranks,
    test_training_equals_one_process,
)
from tests.dist.test_no_shard import (  # noqa: F401
    test_a_frozen_encoder_is_left_alone,
    test_trainable_marked_parameters_are_averaged_and_refreshed_once_per_step,
)
from tests.dist.test_optimizer import test_steps_equal_one_process_and_the_dtensor_path  # noqa: F401
from tests.dist.test_recovery import test_the_step_after_an_exception_equals_a_clean_one  # noqa: F401
from tests.dist.test_strategies import (  # noqa: F401
    INNER,
    STRATEGIES,
    _equivalence,
    test_collectives_of_three_microbatches,
    test_placements_given_directly,
    test_reshard_after_forward_to_a_smaller_group,
    world_of,
)
from tests.dist.test_tensor_parallel import (
    test_tensor_parallel_parameters_train_as_on_one_process,  # noqa: F401
)
from tests.dist.test_wgrads import MIXED
from tests.dist.test_wgrads import _equal as _direct_gradients

pytestmark = pytest.mark.sampled(3)

LAYOUTS = ["tensor", "flat"]
SAID = [(None, (1, True)), ("reentrant", (3, True)), ("non-reentrant", (3, False))]  # recompute, micro-batches


def _strategies(rank, world, cases, dtype):
    for number, case in enumerate(cases):
        recompute, micro = SAID[number % len(SAID)]
        _equivalence(rank, world, case, recompute, *micro, dtype, LAYOUTS[number % len(LAYOUTS)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axes", [1, 2])
def test_every_strategy_equals_one_process(ranks, axes, dtype):
    cases = [case for case in STRATEGIES if case[0] == axes]
    assert len(cases) >= len(INNER)
    ranks(world_of(cases[0]), _strategies, cases, dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [1, 2])
def test_legal_placements_equal_one_process(ranks, axes):
    ranks(2**axes, _trains, axes, list(range(0, len(legal(axes)), 1 if axes == 1 else 5)))


CLOSE, ROUNDED = {"rtol": 1e-4, "atol": 1e-6}, {"rtol": 3e-2, "atol": 2e-3}
DIRECT = [
    ("net", None, {}, True, CLOSE),
    ("tied", "non-reentrant", {}, False, CLOSE),
    ("twice", "non-reentrant", {"strategy": "optim"}, True, CLOSE),
    ("net", "reentrant", {"mp_policy": MIXED}, True, ROUNDED),
]


def _direct(rank, world, cases):
    for case in cases:
        _direct_gradients(rank, world, *case)


def test_direct_gradients_are_the_ordinary_ones(ranks):
    """Products into other memory may be added up in another order on a GPU."""
    ranks(2, _direct, DIRECT)
