"""`flatshard train` over NCCL under torchrun, 25 kills: every job goes on, and ends as one that nobody has killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train import crash
from tests.train.test_crash import flags, losses, mentioning

pytestmark = [pytest.mark.gpu, pytest.mark.limit(500)]

_ROOT = Path(__file__).parents[2]
_JOBS, _KILLS, _STEPS = 5, 5, 24


def _start(folder: Path, plan: crash.Plan) -> subprocess.Popen[bytes]:
    folder.mkdir()
    launcher = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", str(_KILLS), "--redirects", "3", "--log-dir"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(folder / "agent")]
    command += ["-m", "tests.nccl.test_kills", crash.dump(plan), *flags(folder, _STEPS)]
    with (folder / "agent-says").open("wb") as says:
        return subprocess.Popen(command, cwd=_ROOT, stdout=says, stderr=says)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, crash.Plan]]:
    """All of them at once, after each other's starts. The first loses no rank."""
    pytest.importorskip("tyro")  # of the command
    home = tmp_path_factory.mktemp("kills")
    found, running = [], []
    for number in range(_JOBS + 1):
        folder = home / f"job-{number}"
        plan = crash.Plan(str(home / f"kills-{number}"), kills=_KILLS if number else 0, seed=number)
        found.append((folder, plan))
        running.append(_start(folder, plan))
        time.sleep(1.0)
    try:
        for (folder, _), job in zip(found, running):
            assert job.wait(450) == 0, (folder / "agent-says").read_text()[-3000:]
    finally:
        for job in running:
            job.terminate()
            job.wait()
    return found


def test_losses_are_those_of_a_job_that_nobody_killed(jobs):
    (whole, _), *others = jobs
    assert len(losses(whole / "log")) == _STEPS
    for folder, _ in others:
        assert losses(folder / "log") == losses(whole / "log")  # to the last bit, each step once


def test_each_incarnation_lost_a_rank_and_the_others_ended_quietly(jobs):
    phases = set()
    for folder, plan in jobs[1:]:
        kills = [json.loads(line) for line in Path(plan.record).read_text().splitlines()]
        assert [kill["incarnation"] for kill in kills] == list(range(_KILLS))
        for attempt, kill in enumerate(kills):
            phases.update(kill["phases"])
            (said,) = folder.glob(f"agent/*/attempt_{attempt}/{1 - kill['rank']}/stderr.log")
            assert "Traceback" not in said.read_text()
            assert "terminate called" not in said.read_text()
    assert phases >= {"forward", "backward", "step", "save"}


def test_nothing_is_left(jobs):
    for folder, _ in jobs:
        kept = {path.name for path in (folder / "saved").iterdir()}
        assert kept == {f"step-{_STEPS}", f"step-{_STEPS - 2}", "settings.yaml"}
        assert not mentioning(str(folder))


if __name__ == "__main__":
    # Each rank is a host of its own, for NCCL and for the command, which then takes the first GPU.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NCCL_HOSTID=f"host-{os.environ['RANK']}")
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    crash.rank(crash.Plan(**json.loads(sys.argv[1])), sys.argv[2:])
