"""Ranks over NCCL that raise, die, hang or part: all ranks end soon, in Python's words, and the records tell who.

All jobs start at once, most of two ranks each: what takes time is to wait for time-outs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flatshard.trust.blame import blame, read_records
from tests.bench.script import free_port
from tests.nccl import fault

pytestmark = [pytest.mark.gpu, pytest.mark.limit(200 + fault.PAUSE)]

_ROOT = Path(__file__).parents[2]
_SOON = 10.0  # seconds within which every rank ends
_FAILS = ["raise", "kill", "replicas kill", "stop", "skip", "check", "other model", "exit"]
_REPLAYS = ["replay raise", "replay kill", "replay stop"]
_WELL = ["nothing", "pause", "first ends", "last ends", "no destroy", "control"]
_REPLICAS = 10  # ranks of "replicas kill": the last one is connected to rank 1, which is killed, and not to rank 0


@dataclass
class Job:
    """Some ranks. ``ended``: when each did, by the clock."""

    what: str
    folder: Path
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)
    paused: float = 0.0

    @property
    def world(self) -> int:
        return _REPLICAS if "replicas" in self.what else 2

    def start(self) -> None:
        self.folder.mkdir()
        port = str(free_port())
        for rank in range(self.world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(self.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            nccl = {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            env = {**os.environ, **place, **nccl, "FLATSHARD_RECORD": str(self.folder)}
            if self.what == "check":
                env["FLATSHARD_CHECK"] = "1"
            with (self.folder / f"said-{rank}").open("wb") as said:
                call = [sys.executable, "-m", "tests.nccl.fault", self.what]
                self.ranks.append(subprocess.Popen(call, env=env, cwd=_ROOT, stdout=said, stderr=said))

    def look(self) -> None:
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = time.time()
        if self.what == "pause" and not self.paused and self.time_of("misbehaves", 1):
            self.paused = time.time()
            self.ranks[1].send_signal(signal.SIGSTOP)
        if self.paused and time.time() > self.paused + fault.PAUSE:
            self.ranks[1].send_signal(signal.SIGCONT)

    def said(self, rank: int) -> str:
        return (self.folder / f"said-{rank}").read_text(errors="replace")

    def time_of(self, what: str, rank: int) -> float:
        """When a rank has said that it does something; 0 if it has not."""
        lines = [line.split() for line in self.said(rank).splitlines() if line.endswith(what)]
        return float(lines[0][0]) if lines else 0.0

    def status(self, rank: int) -> int | None:
        return self.ranks[rank].returncode


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    folder = tmp_path_factory.mktemp("faults")
    found = {
        what: Job(what, folder / what.replace(" ", "-")) for what in (*_FAILS, *_REPLAYS, *_WELL, "peers", "finally")
    }
    for job in found.values():
        job.start()
    until = time.time() + 105 + fault.PAUSE
    try:
        while time.time() < until and not all(_is_over(job) for job in found.values()):
            time.sleep(0.1)
            for job in found.values():
                job.look()
        yield found
    finally:
        for job in found.values():
            for process in job.ranks:
                process.kill()
                process.wait()


def _is_over(job: Job) -> bool:
    """A rank that was stopped does not end by itself."""
    return len(job.ended) == (1 if "stop" in job.what else job.world)


def _check_ended(job: Job, since: float, allowed: float) -> None:
    for rank in range(job.world):
        if rank == 1 and ("kill" in job.what or "stop" in job.what or job.what == "exit"):
            continue
        said = job.said(rank)[-3000:]
        assert rank in job.ended, f"{job.what}: rank {rank} still runs\n{said}"
        took = job.ended[rank] - since
        assert took < allowed, f"{job.what}: rank {rank} has ended {took:.1f} s later\n{said}"
        assert job.status(rank) == 1, f"{job.what}: rank {rank} has ended with status {job.status(rank)}\n{said}"


def _last_words(job: Job, rank: int = 0) -> str:
    """The last paragraph that a rank has printed."""
    return job.said(rank).strip().splitlines()[-1]


@pytest.mark.parametrize("what", ["raise", "finally", "replay raise"])
def test_a_rank_that_raises_ends_the_others(jobs, what):
    job = jobs[what]
    _check_ended(job, job.time_of("misbehaves", 1), _SOON)
    assert "rank 1 raised ValueError: there is no more data" in _last_words(job)
    assert "step 10" in _last_words(job)
    assert "Rank 1 raised ValueError" in blame(read_records(job.folder))


@pytest.mark.parametrize("what", ["kill", "replay kill"])
def test_a_rank_that_is_killed_ends_the_others(jobs, what):
    job = jobs[what]
    _check_ended(job, job.time_of("misbehaves", 1), _SOON)
    assert "rank 1 ended without a message" in _last_words(job)
    assert "step 10" in _last_words(job)
    assert "rank 1 launched nothing more in this group" in blame(read_records(job.folder))


def test_ranks_that_wait_only_for_those_that_wait_for_a_killed_one_end_too(jobs):
    job = jobs["replicas kill"]
    _check_ended(job, job.time_of("misbehaves", 1), _SOON)
    for rank in (0, *range(2, job.world)):
        assert "rank 1 ended without a message" in _last_words(job, rank)


@pytest.mark.parametrize("what", ["stop", "replay stop"])
def test_a_rank_that_hangs_is_named_after_the_time_out(jobs, what):
    job = jobs[what]
    _check_ended(job, job.time_of("misbehaves", 1), fault.TIMEOUT + _SOON)
    last = _last_words(job)
    assert f"has not ended within {fault.TIMEOUT} s" in last
    assert "no answer from rank 1" in last.lower()
    assert "step 10" in last
    told = blame(read_records(job.folder))
    assert "timed out" in told
    assert "rank 1 launched nothing more in this group" in told


def test_a_rank_that_skips_a_block_is_told_from_the_others_after_the_time_out(jobs):
    job = jobs["skip"]
    _check_ended(job, job.time_of("misbehaves", 1), fault.TIMEOUT + _SOON)
    for rank in range(2):
        assert "blocks." in _last_words(job, rank)
        assert "step 10" in _last_words(job, rank)
    told = blame(read_records(job.folder))
    assert "blocks.2" in told
    assert "timed out" in told


def test_check_mode_names_a_skipped_block_at_once(jobs):
    job = jobs["check"]
    _check_ended(job, job.time_of("misbehaves", 1), _SOON)
    for rank in range(2):
        assert "ranks differ in what they do next" in job.said(rank)
        assert "rank 1: about to run unit 'blocks.3'" in job.said(rank)


def test_models_that_differ_are_named_at_once(jobs):
    job = jobs["other model"]
    assert len(job.ended) == 2
    assert abs(job.ended[0] - job.ended[1]) < _SOON
    for rank in range(2):
        assert job.status(rank) == 1
        assert "ranks differ in their models" in job.said(rank)
        assert "blocks.2" in job.said(rank)


def test_a_rank_that_leaves_is_named(jobs):
    job = jobs["exit"]
    _check_ended(job, job.time_of("misbehaves", 1), fault.TIMEOUT + _SOON)
    assert "ank 1 has ended" in _last_words(job)


@pytest.mark.parametrize("what", _WELL)
def test_jobs_that_end_well_say_nothing(jobs, what):
    job = jobs[what]
    for rank in range(2):
        said = job.said(rank)
        assert job.status(rank) == 0, said[-3000:]
        assert job.time_of("ended", rank)
        if what not in ("control", "no destroy"):  # torch complains of those itself
            lines = [line for line in said.splitlines() if not line.endswith(("trained", "ended", "misbehaves"))]
            assert not lines, "\n".join(lines[:30])


def test_peers_that_cannot_share_memory_are_told_what_is_needed(jobs):
    job = jobs["peers"]
    for rank in range(2):
        assert job.status(rank) == 1
        assert "WirePolicy(peers=True)" in job.said(rank)
