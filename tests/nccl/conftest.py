"""Tests of this folder run bodies of other folders over NCCL, on a GPU that the ranks share.

One command: ``pytest tests/nccl``. Without a GPU they are skipped, or run over Gloo with ``--stand-in``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nccl.device import on_device

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The hook sees the items of the whole session.
    here = [item for item in items if _HERE in item.path.parents]
    standing_in = config.getoption("--stand-in")
    missing = bool(here) and not torch.cuda.is_available()
    for item in here:
        item.add_marker(pytest.mark.xdist_group("nccl"))
        if item.get_closest_marker("gpu") if standing_in else missing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def ranks(nccl_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As everywhere, with the tensors and meshes of the body on the GPU."""

    def run(world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        return nccl_ranks(world, on_device, body, *args, **kwargs)

    return run


@pytest.fixture
def interpreters(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Those of this folder always are."""
    return ranks
