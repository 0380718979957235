"""The test bench itself: values, reuse, and what a failing, hanging or dying rank leaves in the report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flatshard._torch import default_store
from tests.bench import RankError, RankPool


def _sum_of_ranks(rank: int, world: int, dtype: torch.dtype) -> dict[str, Any]:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    total = torch.full((3,), rank + 1, dtype=dtype)
    dist.all_reduce(total)
    return {
        "rank": rank,
        "total": total,
        "random": torch.rand(2),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_come_back_in_rank_order(ranks, world):
    results = ranks(world, _sum_of_ranks, torch.float64)
    torch.manual_seed(0)
    seeded = torch.rand(2)
    assert [result["rank"] for result in results] == list(range(world))
    for result in results:
        assert torch.equal(result["total"], torch.full((3,), world * (world + 1) / 2, dtype=torch.float64))
        assert torch.equal(result["random"], seeded)
        assert result["threads"] == 1


def test_processes_are_reused_across_world_sizes(ranks, rank_pool):
    four = [result["pid"] for result in ranks(4, _sum_of_ranks, torch.float32)]
    two = [result["pid"] for result in ranks(2, _sum_of_ranks, torch.bfloat16)]
    again = [result["pid"] for result in ranks(4, _sum_of_ranks, torch.float32)]
    assert two == four[:2]
    assert again == four == rank_pool.pids()
    assert os.getpid() not in four


def _values(rank: int, world: int, given: torch.Tensor, *, scale: int) -> tuple[torch.Tensor, ...]:
    weight = torch.nn.Parameter(given * scale)
    return weight, (weight * 2).sum(), given[:1], given.to(torch.bfloat16)


def test_tensors_travel_by_value(ranks):
    given = torch.arange(1000.0)
    ((weight, loss, view, half),) = ranks(1, _values, given, scale=3)
    assert torch.equal(weight, given * 3)
    assert not weight.requires_grad
    assert not loss.requires_grad
    assert view.untyped_storage().nbytes() == view.element_size()
    assert half.dtype == torch.bfloat16


def _leave_a_mess(rank: int, world: int) -> None:
    os.environ["FLATSHARD_LEFTOVER"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(10)
    dist.new_group([0])


def _state_of_process(rank: int, world: int) -> tuple[Any, ...]:
    environment = os.environ.get("FLATSHARD_LEFTOVER")
    return environment, os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(1).item()


def test_a_body_finds_a_clean_process(ranks):
    before = ranks(2, _state_of_process)
    ranks(2, _leave_a_mess)
    assert ranks(2, _state_of_process) == before


def _sum_over_mesh(rank: int, world: int, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    for axis in order:  # the same names of groups stand for different ranks from one test to the next
        dist.new_group([axis])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    sharded = distribute_tensor(torch.arange(8.0), mesh["inner"], [Shard(0)])
    return (sharded + 1).sum().full_tensor()


@pytest.mark.parametrize("order", [(), (0,), (0, 1), (0, 0)])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (1, 2)])
def test_meshes_of_earlier_tests_are_forgotten(ranks, shape, order):
    totals = ranks(shape[0] * shape[1], _sum_over_mesh, shape, order)
    assert [total.item() for total in totals] == [36.0] * len(totals)


def _recovers(pool: RankPool, world: int = 4) -> bool:
    return [result["rank"] for result in pool.run(world, _sum_of_ranks, (torch.float32,))] == list(range(world))


def _group_of_rank(rank: int, world: int, fail: bool = False) -> tuple[int, int]:
    if fail:
        raise ValueError("no more")
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world
    return os.getpid(), default_store().add(f"calls of rank {rank}", 1)  # each group has a part of it to itself


def test_a_process_group_serves_calls_in_a_row_of_one_world_size():
    pool = RankPool(3, serves=3)
    try:
        found = [pool.run(world, _group_of_rank)[0] for world in (2, 2, 2, 2, 3, 3, 2)]
        assert [calls for _, calls in found] == [1, 2, 3, 1, 1, 2, 1]
        assert len({pid for pid, _ in found}) == 1
        with pytest.raises(RankError, match="no more"):
            pool.run(2, _group_of_rank, (True,))
        assert pool.run(2, _group_of_rank)[0][1] == 1
    finally:
        pool.close()


def _unlucky_helper(rank: int) -> None:
    if rank == 1:
        raise ValueError("the number of rank 1 is unlucky")


def _fail_on_one(rank: int, world: int) -> None:
    dist.barrier()
    _unlucky_helper(rank)
    dist.barrier()


def test_a_failing_rank_shows_its_own_traceback(rank_pool):
    with pytest.raises(RankError) as caught:
        rank_pool.run(3, _fail_on_one, name="test_of_failure")
    message = str(caught.value)
    first, _, rest = message.partition("\n")
    assert first == "test_of_failure: rank 1 of 3 raised ValueError: the number of rank 1 is unlucky"
    assert "in _unlucky_helper" in rest
    assert "in _fail_on_one" in rest
    assert message.count("Traceback") == 1
    assert message.index("ValueError") < message.index("lost a peer, as a consequence:\n  rank 0: ")
    assert _recovers(rank_pool)


def _fail_on_all(rank: int, world: int) -> None:
    raise KeyError(f"key {rank}")


def test_every_failing_rank_is_shown(rank_pool):
    with pytest.raises(RankError) as caught:
        rank_pool.run(2, _fail_on_all)
    assert str(caught.value).count("Traceback") == 2
    assert "KeyError: 'key 0'" in str(caught.value)
    assert "KeyError: 'key 1'" in str(caught.value)
    assert _recovers(rank_pool)


def _fail_while_others_sleep(rank: int, world: int) -> None:
    if rank == 0:
        pytest.fail("an outcome of pytest is a failure as well")
    time.sleep(600)


def test_a_failure_does_not_wait_for_the_limit(rank_pool, monkeypatch):
    # The ranks sleep past any patience: the run ends because the grace period does.
    monkeypatch.setattr("tests.bench.pool._GRACE", 1.0)
    with pytest.raises(RankError, match=r"rank 0 of 2 raised .*an outcome of pytest") as caught:
        rank_pool.run(2, _fail_while_others_sleep, limit=500)
    assert "in _fail_while_others_sleep" in str(caught.value).partition("rank 1 of 2 was still running")[2]
    assert _recovers(rank_pool)


def _hang(rank: int, world: int) -> None:
    if rank == 2:
        return
    if rank == 1:
        _sleep_for_long()
    dist.all_reduce(torch.ones(1))


def _sleep_for_long() -> None:
    time.sleep(600)


def test_a_hang_is_cut_and_shows_every_stack(rank_pool):
    with pytest.raises(RankError) as caught:
        rank_pool.run(3, _hang, limit=3, name="test_of_hang")
    message = str(caught.value)
    assert message.startswith("test_of_hang: cut, rank 0, 1 of 3 did not return within the limit of 3 s")
    stacks = message.split("---- rank ")
    assert stacks[1].startswith("0 of 3")
    assert "in all_reduce" in stacks[1]
    assert stacks[2].startswith("1 of 3")
    assert "in _sleep_for_long" in stacks[2]
    assert message.endswith("returned: rank 2")
    assert "_leave_with_parent" not in message
    assert _recovers(rank_pool)


def _work_for_long(rank: int, world: int, seconds: float) -> int:
    end = time.process_time() + seconds
    while rank == 0 and time.process_time() < end:
        pass
    dist.barrier()
    return rank


def test_ranks_that_work_past_the_limit_are_slow_and_not_hung(rank_pool, monkeypatch):
    monkeypatch.setattr("tests.bench.pool._SLOW", 200.0)  # other work on the machine is not to end it
    assert rank_pool.run(2, _work_for_long, (3.0,), limit=0.5) == [0, 1]


def test_there_is_an_end_to_that_too(rank_pool, monkeypatch):
    monkeypatch.setattr("tests.bench.pool._SLOW", 2.0)
    with pytest.raises(RankError, match="in _work_for_long"):
        rank_pool.run(2, _work_for_long, (600.0,), limit=0.5)
    assert _recovers(rank_pool)


@pytest.mark.limit(2)
def test_the_limit_is_read_from_the_marker(ranks, request):
    with pytest.raises(RankError, match=r"test_the_limit_is_read_from_the_marker: cut, .* limit of 2 s"):
        ranks(2, _hang)


def _leave_a_collective_behind(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def test_a_collective_left_behind_does_not_reach_the_next_test(rank_pool):
    try:
        rank_pool.run(2, _leave_a_collective_behind, limit=10)
    except RankError as error:
        assert "while leaving the process group" in str(error)  # noqa: PT017  (whether it blocks is Gloo's choice)
    assert _recovers(rank_pool)


def _exit(rank: int, world: int, how: str) -> None:
    if rank == 1:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "reported"),
    [("exit", r"rank 1 of 4 died \(exit code 7\)"), ("kill", r"rank 1 of 4 died of SIGKILL \(exit code -9\)")],
)
def test_a_rank_that_dies_is_named(rank_pool, how, reported):
    with pytest.raises(RankError, match=reported):
        rank_pool.run(4, _exit, (how,))
    assert _recovers(rank_pool)


def test_a_rank_killed_between_tests_is_replaced(rank_pool):
    assert _recovers(rank_pool)
    os.kill(rank_pool.pids()[3], signal.SIGKILL)
    rank_pool._processes[3].process.join(10)
    assert _recovers(rank_pool)


def test_mistakes_in_the_call_are_named(rank_pool):
    with pytest.raises(TypeError, match="make it a top-level function"):
        rank_pool.run(1, lambda rank, world: None)
    with pytest.raises(ValueError, match="1 to 8"):
        rank_pool.run(9, _sum_of_ranks, (torch.float32,))


def _return_dtensor(rank: int, world: int) -> Any:
    return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (world,)), [Shard(0)])


def test_a_dtensor_is_refused_as_a_value(rank_pool):
    with pytest.raises(RankError, match=r"return `\.to_local\(\)` or `\.full_tensor\(\)`"):
        rank_pool.run(1, _return_dtensor)


_SESSION = """
import signal
from tests.bench import RankPool
from tests.dist.test_ranks import _print_pid_and_sleep
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with it ignored
    RankPool().run(2, _print_pid_and_sleep, limit=500)
"""


def _print_pid_and_sleep(rank: int, world: int) -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece: two ranks write to the same pipe
    time.sleep(600)


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_session(tmp_path, how):
    script = tmp_path / "session.py"
    script.write_text(_SESSION)
    root = Path(__file__).parents[2]
    session = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
    )
    try:
        pids = [int(session.stdout.readline()) for _ in range(2)]
        session.send_signal(how)
        session.wait(30)
    finally:
        session.kill()
        session.communicate()
    patience = time.monotonic() + 120
    while any(map(_exists, pids)):
        assert time.monotonic() < patience, f"still there: {[pid for pid in pids if _exists(pid)]}"
        time.sleep(0.05)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
