"""`scripts/upstream.py` with suites of a few tests, on CPU ranks: what runs where, and what is written and printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest")  # torch's test cases import it
pytestmark = pytest.mark.full  # each starts a dozen interpreters
_CPU = ("--device", "cpu", "--devices", 3)
_SCRIPT = Path(__file__).parents[1] / "scripts" / "upstream.py"

_FSDP2 = """
import sys
import time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread

class TestRanks(FSDPTest):
    @property
    def world_size(self):
        return min(2, torch.get_device_module("cpu").device_count())

    @skip_if_lt_x_gpu(2)
    def test_trains(self):
        model = fully_shard(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        assert isinstance(model, FSDPModule) and dist.get_world_size() == 2

    def test_control_only(self):
        if self.rank == 1:
            assert fully_shard.__module__.startswith("torch"), fully_shard.__module__

    def test_hangs(self):
        time.sleep(600 if fully_shard.__module__.startswith("flatshard") else 0)

class TestThreads(FSDPTestMultiThread):
    def test_threads(self):
        assert dist.get_world_size() == 3
        model = fully_shard(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        alarm = sys.modules.get("flatshard.trust.alarm")
        assert alarm is None or alarm.alarm._of is None  # threads share a process, which has one

    def test_skipped(self):
        self.skipTest("not here")
"""

_MEGATRON = """
import os
import pytest
import torch
import torch.distributed as dist
import megatron_fsdp

def test_ranks():
    dist.init_process_group("nccl")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 3

def test_ranks_again():
    test_ranks()  # there is a default group from the test before

def test_one_rank_fails():
    assert os.environ["RANK"] != "1" or megatron_fsdp.__name__ == "megatron_fsdp"

def test_one_rank_dies():
    if os.environ["RANK"] == "2":
        os._exit(3)

def test_needs_a_package():
    import is_not_here

class TestTogether:
    draws = []

    @pytest.fixture(scope="class")
    def shared(self):
        yield [os.getpid()]
        assert len(self.draws) == 2

    def test_first(self, shared):
        self.draws.append(torch.rand(()))
        os.environ["LEFT"] = "here"
        torch.set_default_dtype(torch.float64)

    def test_second(self, shared):
        self.draws.append(torch.rand(()))
        assert shared == [os.getpid()] and self.draws[0] == self.draws[1]
        assert "LEFT" not in os.environ and not dist.is_initialized()
"""


def _run(*arguments: object) -> str:
    command = [sys.executable, _SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _outcomes(path: Path) -> dict[str, str]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["test"].rpartition("::")[2]: line["outcome"] for line in lines}


@pytest.mark.limit(300)
def test_a_suite_of_fsdp2(tmp_path):
    folder = tmp_path / "checkout" / "test" / "distributed" / "_composable" / "fsdp"
    folder.mkdir(parents=True)
    (folder / "test_fully_shard_few.py").write_text(_FSDP2)
    _run("run", "fsdp2", tmp_path / "checkout", "--out", tmp_path, *_CPU, "--limit", 20)
    common = {"test_trains": "passed", "test_threads": "passed"}
    control = _outcomes(tmp_path / "fsdp2-control.jsonl")
    assert control == common | {"test_control_only": "passed", "test_hangs": "passed", "test_skipped": "skipped"}
    ours = _outcomes(tmp_path / "fsdp2-flatshard.jsonl")
    assert ours == common | {"test_control_only": "failed", "test_hangs": "timed out"}
    told = _run("compare", tmp_path)
    assert "the control passes 4 of 5 tests, flatshard 2\n" in told
    assert "TestRanks::test_control_only: failed: AssertionError: flatshard.api" in told
    assert "TestRanks::test_hangs: timed out: TimeoutError: not done after 20 s" in told


@pytest.mark.limit(300)
def test_a_suite_of_megatron(tmp_path):
    checkout = tmp_path / "checkout"
    folder = checkout / "tests" / "unit_tests" / "distributed" / "mfsdp_v1"
    core = checkout / "megatron" / "core"
    (core / "distributed" / "fsdp").mkdir(parents=True)
    folder.mkdir(parents=True)
    for made in (core / "distributed" / "fsdp" / "mcore_fsdp_adapter.py", core / "optimizer.py"):
        made.write_text("")
    (checkout / "megatron_fsdp.py").write_text("")
    (folder / "test_few.py").write_text(_MEGATRON)
    told = _run("run", "megatron", checkout, "--out", tmp_path, *_CPU, "--limit", 40, "--jobs", 1)
    passed = dict.fromkeys(("test_ranks", "test_ranks_again", "test_first", "test_second"), "passed")
    control = _outcomes(tmp_path / "megatron-control.jsonl")
    alike = passed | {"test_one_rank_dies": "failed"}
    assert control == alike | {"test_one_rank_fails": "passed", "test_needs_a_package": "skipped"}
    assert _outcomes(tmp_path / "megatron-flatshard.jsonl") == alike | {"test_one_rank_fails": "failed"}
    assert "again, in new ranks: test_few.py::test_ranks_again" in told
    assert "the process ended with status 3" in told
    assert "the control passes 5 of 7 tests, flatshard 4\n" in told


def test_a_folder_without_the_suite_is_refused(tmp_path):
    command = [sys.executable, _SCRIPT, "run", "fsdp2", tmp_path, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert "has none of test/distributed/_composable/fsdp" in done.stderr
