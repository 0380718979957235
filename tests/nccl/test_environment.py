"""Training under settings of the environment that change when the host or the device waits: each in its own ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench import RankPool
from tests.conftest import nccl_choices
from tests.dist.test_engine import _against_one_process
from tests.nccl.device import on_device

SETTINGS = ["TORCH_NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING", "TORCH_CUDA_SANITIZER"]


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[dict[str, RankPool]]:
    """All of them start at once."""
    choices = nccl_choices(request.config)
    own = {name: choices.get("environment", {}) | {name: "1"} for name in SETTINGS}
    pools = {name: RankPool(2, interpreters=True, **{**choices, "environment": own[name]}) for name in SETTINGS}
    for pool in pools.values():
        pool.begin(2)
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("setting", [*SETTINGS[:2], pytest.param(SETTINGS[2], marks=pytest.mark.gpu)])
def test_training_equals_one_process(pools, setting):
    """The sanitizer raises where a kernel reads or writes what another stream may still be writing."""
    arguments = _against_one_process, "adamw", "non-reentrant", 3, True
    pools[setting].run(2, on_device, arguments, limit=90, name=setting)
    pools[setting].close()
