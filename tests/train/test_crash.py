"""Ranks of `flatshard train` that are killed: the job goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flatshard.cli import main
from flatshard.train.launch import fresh_store
from flatshard.train.log import Log, Step, check_log
from flatshard.train.settings import TrainSettings
from tests.bench.script import as_command, free_port
from tests.train import crash

_ROOT = Path(__file__).parents[2]
_TINY = ["train", "--batch", "4", "--context", "16", "--width", "16", "--layers", "2", "--ffn", "32", "--sample", "0"]


def flags(folder, steps):
    saved = ["--checkpoint", str(folder / "saved"), "--save-every", "2", "--losses", str(folder / "log")]
    return [*_TINY, "--steps", str(steps), *saved, "--timeout", "60"]


def _uninterrupted(rank, world, port, log, steps):
    as_command(rank, world, port, lambda: main([*_TINY, "--steps", str(steps), "--losses", str(log)]))


def _check(ranks, folder, plan, steps):
    """The log, the kills, what survivors said, and what is left."""
    kills = [json.loads(line) for line in Path(plan.record).read_text().splitlines()]
    assert [kill["incarnation"] for kill in kills] == list(range(plan.kills))
    ranks(plan.world, _uninterrupted, free_port(), folder / "whole", steps)
    whole = losses(folder / "whole")
    assert len(whole) == steps
    assert losses(folder / "log") == whole  # to the last bit, each step once
    left = {path.name for path in (folder / "saved").iterdir()}
    assert left == {f"step-{steps}", f"step-{steps - 2}", "settings.yaml"}
    for attempt, kill in enumerate(kills):
        (said,) = folder.glob(f"agent/*/attempt_{attempt}/{1 - kill['rank']}/stderr.log")
        assert "Traceback" not in said.read_text()
    assert not mentioning(str(folder))
    return kills


def losses(log):
    """The lines of a log, but for the speed."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def _in_session(number):
    """Processes of a session."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = each.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == number and state != "Z":
            found.append(each)
    return found


def mentioning(text):
    """Processes that were started with this word."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = each.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.full
@pytest.mark.limit(400)
def test_a_killed_rank_costs_a_restart_and_nothing_else(ranks, tmp_path):
    """Three kills, in backward, in the optimizer's step and during a save."""
    plan, steps = crash.Plan(str(tmp_path / "kills"), kills=3, seed=1), 14
    ranks(1, _nothing)  # the server that ranks are forked from has imported torch
    context = multiprocessing.get_context("forkserver")
    result = context.Queue()
    arguments = (plan, flags(tmp_path, steps), 3, tmp_path / "agent", result)
    agent = context.Process(target=crash.agent, args=arguments)
    agent.start()
    assert result.get(timeout=400) == ""
    agent.join(20)
    assert not _in_session(agent.pid)
    _check(ranks, tmp_path, plan, steps)


def _nothing(rank, world):
    pass


@pytest.mark.full
@pytest.mark.limit(1500)
def test_25_kills_under_torchrun(ranks, tmp_path):
    plan, steps = crash.Plan(str(tmp_path / "kills"), kills=25, seed=0), 90
    launcher = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "25"]
    command += [
        *launcher,
        "--redirects",
        "3",
        "--log-dir",
        str(tmp_path / "agent"),
        "-m",
        "tests.train.crash",
        crash.dump(plan),
    ]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [*command, *flags(tmp_path, steps)], cwd=_ROOT, env=environment, text=True, capture_output=True, timeout=1400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills = _check(ranks, tmp_path, plan, steps)
    assert {phase for kill in kills for phase in kill["phases"]} >= {"forward", "backward", "step", "save"}


HANGING = pytest.param(signal.SIGSTOP, id="hanging", marks=pytest.mark.full)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="killed"), HANGING])
def test_a_rank_whose_peer_is_gone_says_so_and_ends(ranks, tmp_path, number):
    """Without a launcher that would end it: by the closed connection, or at the time-out."""
    ranks(1, _nothing)
    context = multiprocessing.get_context("forkserver")
    plan, port = crash.Plan(str(tmp_path / "kills"), kills=1, seed=1, signal=number), free_port()
    hurried = [*flags(tmp_path, 10000)[:-1], "3"]
    processes = [
        context.Process(target=crash.rank_alone, args=(plan, hurried, (rank, 2), port, tmp_path)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    _, victim, *_ = plan.of(0)
    try:
        processes[1 - victim].join(40)
        assert processes[1 - victim].exitcode == 1
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = (tmp_path / f"err-{1 - victim}").read_text()
    assert f"flatshard train: rank {1 - victim} ends in step " in said
    assert (
        "another rank has ended or does not answer; start the job again to continue from the newest checkpoint in"
        in said
    )
    assert "Traceback" not in said


def _written(path, done, *numbers):
    log = Log(TrainSettings(losses=path), done)
    for number in numbers:
        log.add(Step(number, torch.tensor(number / 7), torch.tensor(1.0), 0.1))
    log.write()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_log_has_every_step_once(tmp_path):
    path = tmp_path / "new" / "log"
    assert _written(path, 0, 1, 2, 3) == [1, 2, 3]
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # of a write that was killed
    assert _written(path, 2, 3, 4) == [1, 2, 3, 4]
    assert torch.tensor(json.loads(path.read_text().splitlines()[2])["loss"]) == torch.tensor(3 / 7)
    assert _written(path, 4) == [1, 2, 3, 4]
    assert _written(path, 0) == []  # another run, or the same from its start


def test_what_is_no_log_is_not_overwritten(tmp_path):
    path = tmp_path / "notes"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"--losses .*notes: exists and is not the log of a run; give another file"):
        check_log(path)
    with pytest.raises(ValueError, match="Is a directory"):
        check_log(tmp_path)


def test_ranks_that_start_again_meet_in_a_part_of_the_store_of_their_own():
    """Also if some are early and find what those before them have left."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(4):
        found = {}

        def meet(rank, found=found, start=start):
            store = fresh_store(dist.TCPStore("127.0.0.1", server.port, is_master=False), rank, 3)
            if start % 2 == 0 or rank:  # every other time rank 0 is gone before it has said anything
                store.set(str(rank), str(start))
            found[rank] = store if start % 2 else [store.get(str(other)) for other in range(3)]

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads[:: -1 if start % 2 else 1]:
            thread.start()
        for thread in threads:
            thread.join()
        if start % 2:
            assert not found[1].check(["0"])
        else:
            assert found == dict.fromkeys(range(3), [str(start).encode()] * 3)
