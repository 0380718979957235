"""Tests of this folder need a CUDA device; without one they are skipped, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook sees the items of the whole session.
    here = [item for item in items if _HERE in item.path.parents]
    missing = bool(here) and not torch.cuda.is_available()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one at a time: what they measure is the device
        if missing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def gpu_ranks(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As `ranks`, with every rank on device 0: Gloo carries CUDA tensors between processes that share a GPU."""

    def run(world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        return ranks(world, _on_first_device, body, *args, **kwargs)

    return run


def _on_first_device(rank: int, world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # CUDA starts here, in the rank; neither the fork server nor, for its sake, the test process has touched it.
    torch.cuda.set_device(0)
    return body(rank, world, *args, **kwargs)
