"""torch.compile over NCCL: blocks and models that are compiled train as those that are not."""

from __future__ import annotations

import pytest

from tests.fsdp2 import test_compile
from tests.fsdp2.test_compile import (  # noqa: F401
    test_a_compiled_function_with_the_backward_inside,
    test_a_compiled_model_compiles_what_lies_between_the_hooks,
    test_compiled_in_bf16,
    test_the_compiler_resumes_after_units,
)

pytestmark = pytest.mark.limit(240)


@pytest.mark.parametrize(("way", "recompute"), list(zip(test_compile.BLOCK_WAYS, test_compile.RECOMPUTE)))
def test_compiled_blocks_train_as_eager_ones(ranks, way, recompute):
    test_compile.test_compiled_blocks_train_as_eager_ones(ranks, way, recompute, 2)


@pytest.mark.gpu
def test_compiled_by_inductor(ranks):
    graphs = 2 * test_compile.GRAPH
    way = test_compile.BLOCK_WAYS[2]
    assert ranks(2, test_compile._as_eager, way, "non-reentrant", backend="inductor", tolerance=1e-4) == [graphs] * 2
