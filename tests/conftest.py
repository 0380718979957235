"""Options and fixtures of all tests: `--full`, `--stand-in`; those that run a function on rank processes: `ranks`,
`interpreters`, and `nccl_ranks`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

import tests.patient  # noqa: F401

if TYPE_CHECKING:  # the process that hands out tests to others needs no torch
    from tests.bench import RankPool

_LIMIT = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption("--stand-in", action="store_true", help="run tests of NCCL ranks over Gloo, on the CPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest tests, those that start Python anew, go first: at the end one of them would run alone.
    items.sort(key=lambda item: item.path.parent.name not in ("train", "rehearsal", "order"))
    if config.getoption("--full"):
        return
    left_out = {item for item in items if item.get_closest_marker("full")}
    if not config.option.keyword:
        left_out |= _not_sampled([item for item in items if item not in left_out])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _not_sampled(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of tests marked `sampled`, all but every so many of one function's cases, the first among them."""
    found, seen = set(), Counter[str]()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            function = item.nodeid.partition("[")[0]
            if seen[function] % marker.args[0]:
                found.add(item)
            seen[function] += 1
    return found


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The session's rank processes. Most tests want `ranks`, which knows the test's limit and name."""
    from tests.bench import RankPool

    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreter_pool() -> Iterator[RankPool]:
    """As `rank_pool`; each process is an interpreter of its own, as torchrun starts them."""
    from tests.bench import RankPool

    pool = RankPool(interpreters=True)
    yield pool
    pool.close()


def nccl_choices(config: pytest.Config) -> dict[str, Any]:
    """For a pool of NCCL ranks, or of those that stand in for them and see no GPU."""
    standing_in = config.getoption("--stand-in")
    return {"environment": {"CUDA_VISIBLE_DEVICES": ""}} if standing_in else {"backend": "nccl"}


@pytest.fixture(scope="session")
def nccl_pools(request: pytest.FixtureRequest) -> Iterator[list[RankPool]]:
    """One of two interpreters and one of four: process groups are kept as long as the number of ranks is the same."""
    from tests.bench import RankPool

    pools = [RankPool(size, interpreters=True, serves=12, **nccl_choices(request.config)) for size in (2, 4)]
    for pool in pools:
        pool.begin(pool.size)
    yield pools
    for pool in pools:
        pool.close()


Run = Callable[..., list[Any]]


@pytest.fixture
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Run:
    """`ranks(world, body, *args, **kwargs)` runs `body(rank, world, *args, **kwargs)` on `world` processes, 1 to 8.

    More than 4 are for tests marked `full`.

    Returns the values in rank order. `body` is a top-level function; `torch.distributed` is initialised in it. The test
    is cut when a call takes longer than `@pytest.mark.limit(seconds)`, 60 s unless marked, and its ranks wait idly.
    """
    return _runner(request, rank_pool)


@pytest.fixture
def interpreters(request: pytest.FixtureRequest, interpreter_pool: RankPool) -> Run:
    """As `ranks`, on interpreters of their own: each has its own hash seed, always the same for one rank.

    For whatever communicates in an order. A test that fails costs ten seconds, those of starting new ones.
    """
    return _runner(request, interpreter_pool)


@pytest.fixture
def nccl_ranks(request: pytest.FixtureRequest, nccl_pools: list[RankPool]) -> Run:
    """As `interpreters`, 1 to 4 ranks over NCCL on the first GPU; over Gloo with `--stand-in`.

    In the body CUDA's current device is the first, and CPU tensors travel over Gloo.
    """
    return _runner(request, *nccl_pools)


def _runner(request: pytest.FixtureRequest, *pools: RankPool) -> Run:
    """On the first of the pools, from the smallest, that has ranks enough."""
    marker = request.node.get_closest_marker("limit")
    limit = float(marker.args[0]) if marker else _LIMIT

    def run(world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        pool = next((pool for pool in pools if world <= pool.size), pools[-1])
        return pool.run(world, body, args, kwargs, limit=limit, name=request.node.nodeid)

    return run
