"""Ranks that end, or hang: the others hear why within seconds, and the records say who stopped where."""

from __future__ import annotations

import errno
import functools
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from flatshard import fully_shard
from flatshard.buffer import Ticket
from flatshard.cli import main
from flatshard.trust import exits
from flatshard.trust.alarm import Alarm, PeerError, Watched
from flatshard.trust.blame import blame, read_records
from flatshard.trust.exits import ending_error
from flatshard.trust.loop import Loop
from flatshard.trust.record import CAPACITY, FlightRecord, decoded, parse_ranges, ranges, records_folder
from flatshard.trust.watch import Verdict, Watch
from tests.bench.script import as_interpreter, free_port

_ROOT = Path(__file__).parents[2]

# Rank 1 does in step 3 what it was told; the process groups would wait for ten minutes.
_SCRIPT = """
import atexit, datetime, os, sys, threading, time, torch, torch.distributed as dist
from torch import nn
import flatshard

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
if sys.argv[1] == "cleanup" and dist.get_rank() == 1:
    atexit.register(time.sleep, 0.5)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in model:
    flatshard.fully_shard(layer)
flatshard.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if sys.argv[1] == "early" and dist.get_rank() == 1:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("there is no data at all")
for step in range(1, 5):
    if step == 3 and dist.get_rank() == 1:
        what = sys.argv[1]
        if what == "raise":
            threading.Thread(target=time.sleep, args=(600,)).start()  # the process does not even end
            raise ValueError("there is no more data")
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "sleep":
            print("asleep", flush=True)
            time.sleep(600)
        if what in ("busy", "cleanup"):
            raise ValueError("there is no more data")
    if sys.argv[1] == "busy" and step == 3:
        time.sleep(600)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

# Rank 1 raises in step 3; rank 0 is in a barrier of its own, or catches its error and goes on alone.
_CALLER = """
import sys, torch, torch.distributed as dist
import flatshard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = flatshard.fully_shard(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(1, 4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 3 and dist.get_rank() == 1:
            raise ValueError("there is no more data")
        if step == 3 and sys.argv[1] == "barrier":
            dist.barrier()
    model(torch.ones(2, 8))
except flatshard.PeerError:
    dist.destroy_process_group()
    print("goes on alone")
"""


@pytest.fixture
def job(tmp_path):
    """Starts ranks, each an interpreter of its own; at the end none is left."""
    started: list[subprocess.Popen[str]] = []

    def start(what, world=3, script=_SCRIPT):
        (tmp_path / "train.py").write_text(script)
        port = str(free_port())
        for rank in range(world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = {**os.environ, **place, "FLATSHARD_RECORD": str(tmp_path / "records"), "PYTHONPATH": str(_ROOT)}
            call = [sys.executable, str(tmp_path / "train.py"), what]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(call, env=env, **pipes))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.limit(120)
def test_a_rank_that_raises_ends_the_others_with_its_error(job, tmp_path, capsys):
    process = job("raise", 2)[0]
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "PeerError: rank 1 raised ValueError: there is no more data. Rank" in said
    assert "the last collectives of rank 0" in said
    assert "reduce_scatter 0 (" in said
    assert "step 2, backward" in said
    assert main(["blame", str(tmp_path / "records"), "--last", "1"]) == 0
    told = capsys.readouterr().out
    assert "Rank 1 raised ValueError: there is no more data after reduce_scatter 0" in told
    assert json.loads((tmp_path / "records" / "rank-0.json").read_text())["header"]["rank"] == 0


@pytest.mark.limit(120)
def test_a_rank_in_a_collective_of_torch_names_the_rank_that_raised_last(job):
    """torch's error does not: a closed connection."""
    process = job("barrier", 2, _CALLER)[0]
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith("flatshard: rank 0 ends: rank 1 raised ValueError: there is no more data. Rank 0 was")
    assert "waiting for a collective of torch.distributed after reduce_scatter" in last
    assert "step 3, backward" in last


@pytest.mark.limit(120)
def test_a_rank_that_destroys_its_process_group_after_an_error_of_another_ends_well(job):
    process = job("caught", 2, _CALLER)[0]
    told, said = process.communicate(timeout=300)
    assert "goes on alone" in told
    assert process.returncode == 0, said


@pytest.mark.limit(120)
def test_the_rank_that_raises_ends_first(job):
    """torchrun calls the first rank that ends the root cause, and kills the others."""
    victim, culprit = job("cleanup", 2)
    victim.communicate(timeout=300)
    assert culprit.poll() == 1
    assert victim.returncode == 1


# Rank 1 destroys its process group because of an exception, which it handles or not; rank 0 has work of its own.
_LEAVER = """
import os, sys, time, torch, torch.distributed as dist
import flatshard

os.environ["FLATSHARD_GRACE"] = "0.5"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = flatshard.fully_shard(torch.nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
time.sleep(1)  # the ranks connect meanwhile
try:
    if sys.argv[1] == "unhandled":
        try:
            raise ValueError("there is no more data")
        finally:
            if dist.get_rank() == 0:
                time.sleep(600)
            dist.destroy_process_group()
    raise ValueError("there is no more data")
except (ValueError if sys.argv[1] == "handled" else ()):
    if dist.get_rank() == 0:
        time.sleep(4)
    dist.destroy_process_group()
    print("exported")
"""


@pytest.mark.limit(120)
def test_a_rank_that_leaves_with_an_exception_that_it_handles_ends_nobody(job):
    for process in job("handled", 2, _LEAVER):
        told, said = process.communicate(timeout=300)
        assert (process.returncode, told) == (0, "exported\n"), said


@pytest.mark.limit(120)
def test_a_rank_that_leaves_with_an_exception_that_it_does_not_handle_ends_the_others(job):
    process = job("unhandled", 2, _LEAVER)[0]
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "flatshard: rank 0 ends: rank 1 raised ValueError: there is no more data" in said


# Rank 1 is busy with something else when rank 0's wait times out.
_STUCK = """
import datetime, time, torch, torch.distributed as dist
import flatshard

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
torch.manual_seed(0)
model = flatshard.fully_shard(torch.nn.Linear(8, 8))
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        time.sleep(600)
    model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.limit(120)
def test_a_rank_that_is_busy_hears_of_the_wait_that_timed_out(job):
    for process in job("", 2, _STUCK):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 1
    assert "time.sleep(600)" in said
    assert "rank 1 ends: rank 0 raised PeerError: rank 0 was waiting for all_gather" in said
    assert "Rank 1 has launched nothing since reduce_scatter" in said


# The watch threads end processes that cannot write to stderr. One of these has lost its records as well.
_MUTE = """
import os, pathlib, shutil, sys, threading, time
from flatshard.trust import exits
from flatshard.trust.record import record

def lose():
    folder = pathlib.Path(sys.argv[1])
    record.keep_in(folder, 0)
    ended = type("Ended", (), {"is_on_device": False, "has_ended": lambda self: True})()
    record.append(record.group("gather 0,1", 30.0), 0, "a", 8, ended)
    shutil.rmtree(folder)
    sys.stderr.close()

def drop():
    sys.stderr = None

def fill():
    os.dup2(os.pipe()[1], 2)
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)

record.tell(rank=0)
children = []
for mute in (lose, drop, fill):
    children.append(os.fork())
    if not children[-1]:
        mute()
        threading.Thread(target=lambda: (exits.dump(), exits.end_stuck("the others are gone")), daemon=True).start()
        time.sleep(600)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_a_rank_that_cannot_print_ends_too(tmp_path):
    command = [sys.executable, "-c", _MUTE, str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout.endswith("[1, 1, 1]\n")


def test_an_error_that_another_hook_has_handled_ends_the_process_too(monkeypatch):
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back
    error = ValueError("no data").with_traceback(TracebackType(None, outermost, 0, 1))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr("flatshard.trust.exits._hook", sys.excepthook)
    assert ending_error() is None  # pytest keeps the errors of tests
    monkeypatch.setattr(sys, "excepthook", print)
    assert ending_error() is error
    error.__traceback__ = TracebackType(None, sys._getframe(), 0, 1)
    assert ending_error() is None  # a console in this function has caught it


def test_an_error_that_multiprocessing_has_yet_to_print_is_printed(monkeypatch, capsys):
    """It calls what is to be done at the exit of a process first, and then prints the current exception."""
    monkeypatch.setattr(exits, "leave", mock.Mock(side_effect=SystemExit))

    def fail():
        try:
            raise ValueError("no more data")
        finally:
            exits.end_failed()

    with pytest.raises(SystemExit):
        fail()
    exits.leave.assert_called_once_with(1)
    assert "ValueError: no more data" in capsys.readouterr().err


def _alarm_of_a_lost_rank(monkeypatch):
    """An alarm whose watch is a mock, and its flight record. Every error looks like that of a lost peer."""
    own = FlightRecord()
    monkeypatch.setattr("flatshard.trust.alarm.record", own)
    alarm = Alarm()
    alarm._pid, alarm._watch = os.getpid(), mock.Mock()
    return alarm, own


def test_an_error_raised_from_that_of_another_rank_is_not_told_as_one_of_this_rank(monkeypatch):
    alarm, own = _alarm_of_a_lost_rank(monkeypatch)
    try:
        try:
            raise PeerError("rank 1 raised ValueError: no data")
        except PeerError as error:
            raise KeyError("training failed") from error
    except KeyError as error:
        alarm._uncaught(error)
    alarm._watch.tell.assert_not_called()
    assert own.header["error"] == "PeerError: rank 1 raised ValueError: no data"


def test_an_error_that_is_raised_from_itself_is_told(monkeypatch):
    alarm, _ = _alarm_of_a_lost_rank(monkeypatch)
    alarm._watch.group.is_lost_peer.return_value = False
    error = ValueError("no data")
    error.__cause__ = error
    alarm._uncaught(error)
    alarm._watch.tell.assert_called_once_with("ValueError: no data")


def test_a_process_group_that_an_error_of_another_rank_ends_asks_for_its_reason_once(monkeypatch):
    alarm, _ = _alarm_of_a_lost_rank(monkeypatch)
    watch, store = alarm._watch, Alarm()
    alarm._of = weakref.ref(store)
    try:
        raise PeerError("rank 0 was waiting for all_gather: [gloo/transport/tcp/pair.cc] closed. Rank 1 has ended")
    except PeerError:
        alarm._group_is_gone(alarm._of)
    watch.explain.assert_not_called()
    watch.close.assert_called_once()


def test_a_rank_that_has_left_long_ago_is_not_the_reason_for_what_comes_later(monkeypatch):
    own, launched = FlightRecord(), _Done(ended=False)
    monkeypatch.setattr("flatshard.trust.watch.record", own)
    verdict = Verdict(grace=600.0)
    with mock.patch("time.monotonic", return_value=time.monotonic() - 700):
        verdict.add_lost(3)
    own.append(own.group("gather 0,1"), 0, "a", 8, launched)
    assert not verdict.is_current()
    verdict.add_lost(1)
    verdict.add_lost(2)  # because of rank 1
    assert (verdict.is_current(), verdict.culprit) == (True, 1)
    words = "rank 1 ended without a message: it was killed or crashed, then rank 2. Rank"
    assert str(verdict.error("all_gather a")).startswith(words)
    verdict._since -= 700
    verdict.add("rank 2 raised ValueError: no data", by=2)
    assert verdict.culprit == 1  # this rank still waits for it
    assert verdict.must_end(waits=True)


@pytest.mark.parametrize("waits_for", [1, 2])
def test_ranks_that_end_together_end_those_who_wait_for_one_of_them(monkeypatch, waits_for):
    own = FlightRecord()
    monkeypatch.setattr("flatshard.trust.watch.record", own)
    verdict = Verdict(grace=600.0)
    own.append(own.group(f"reduce 0,{waits_for}"), 0, "a", 8, _Done(ended=False))
    for lost in (1, 2, 1):
        verdict.add_lost(lost)
    assert not verdict.must_end(waits=True)
    verdict._since -= 700
    assert verdict.must_end(waits=True)
    assert verdict.reason == "rank 1 ended without a message: it was killed or crashed, then rank 2"


def test_a_rank_that_is_lost_after_it_has_raised_is_the_reason_by_what_it_has_raised(monkeypatch):
    monkeypatch.setattr("flatshard.trust.watch.record", FlightRecord())
    verdict = Verdict(grace=600.0)
    verdict.add("rank 2 raised ValueError: no data", by=2)
    verdict.add_lost(2)
    assert verdict.reason == "rank 2 raised ValueError: no data"


def test_a_rank_that_ends_gives_the_others_their_grace_if_an_earlier_one_has_left(monkeypatch):
    monkeypatch.setattr("flatshard.trust.watch.record", FlightRecord())
    verdict = Verdict(grace=600.0)
    with mock.patch("time.monotonic", return_value=time.monotonic() - 700):
        verdict.add_lost(3)
    verdict.add("rank 2 raised ValueError: no data", by=2)
    assert verdict.culprit == 2
    assert not verdict.must_end(waits=True)


def test_an_unconnected_rank_says_who_it_is_and_what_it_has_waited_for(monkeypatch):
    own = FlightRecord()
    monkeypatch.setattr("flatshard.trust.watch.record", own)
    watch = Watch(Watched(store=lambda name: None, kept=None, rank=2, world=4), "", mock.Mock(), Verdict())
    error = watch.explain("all_gather a (step 3, forward)", RuntimeError("Connection closed by peer"))
    assert str(error) == "rank 2 was waiting for all_gather a (step 3, forward): Connection closed by peer"
    assert own.header["error"] == f"PeerError: {error}"


# Rank 1 is killed; a process that it has forked, like those of a DataLoader, keeps its connections of Gloo open.
_ORPHAN = """
import os, time, torch, torch.distributed as dist
import flatshard

os.environ["FLATSHARD_GRACE"] = "0.5"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = flatshard.fully_shard(torch.nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if dist.get_rank() == 1:
    time.sleep(1)  # the ranks connect meanwhile
    if os.fork() == 0:
        while os.path.exists(f"/proc/{pids[0]}"):
            time.sleep(0.1)
        os._exit(0)
    os.kill(os.getpid(), 9)
model(torch.ones(2, 8))
"""


@pytest.mark.limit(120)
def test_a_rank_that_is_killed_ends_the_others_though_its_children_live(job):
    process = job("", 2, _ORPHAN)[0]
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "PeerError: rank 1 ended without a message: it was killed or crashed. Rank 0 was waiting" in said


@pytest.mark.full
@pytest.mark.limit(120)
def test_a_rank_that_is_busy_ends_with_the_others(job):
    """It waits for no collective of ours; what it does, its user sees in the stack."""
    process = job("busy", 2)[0]
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "time.sleep(600)" in said
    last = said.strip().splitlines()[-1]
    assert last.startswith(
        "flatshard: rank 0 ends: rank 1 raised ValueError: there is no more data. Rank 0 was waiting"
    )


@pytest.mark.full
@pytest.mark.limit(120)
def test_a_rank_that_raises_before_its_first_forward_ends_the_others_too(job):
    processes = job("early")
    for rank in (0, 2):
        _, said = processes[rank].communicate(timeout=300)
        assert processes[rank].returncode == 1
        assert "PeerError: rank 1 raised ValueError: there is no data at all" in said


def _spawned(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(4, 4))
    for step in range(3):
        if rank == 1 and step == 2:
            raise ValueError("there is no more data")
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.full
@pytest.mark.limit(120)
def test_ranks_of_multiprocessing_say_what_ends_them():
    """Which catches exceptions of its processes: none comes to a hook."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="ValueError: there is no more data"):
        torch.multiprocessing.spawn(_spawned, (free_port(),), nprocs=2)


def _nothing(rank, world):
    pass


@pytest.mark.limit(120)
def test_a_rank_that_is_killed_is_named_by_the_others_and_by_the_records(ranks, tmp_path):
    ranks(1, _nothing)  # the server that ranks are forked from has imported torch
    (tmp_path / "train.py").write_text(_SCRIPT)
    port, context = str(free_port()), multiprocessing.get_context("forkserver")
    processes = []
    for rank in range(3):
        place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = tmp_path / "train.py", ["kill"], {**place, "FLATSHARD_RECORD": str(tmp_path / "records")}
        processes.append(context.Process(target=as_interpreter, args=(*arguments, tmp_path / f"said-{rank}")))
        processes[-1].start()
    try:
        for rank in (0, 2):
            processes[rank].join(300)
            assert processes[rank].exitcode == 1
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = {rank: (tmp_path / f"said-{rank}").read_text() for rank in (0, 2)}
    assert all("PeerError: rank 1 ended without a message" in text for text in said.values()), said
    told = blame(read_records(tmp_path / "records"))
    assert "In group 'gather 0-2', launch" in told
    assert "rank 0,2 launched all_gather" in told
    assert "rank 1 launched nothing more in this group after all_gather" in told
    assert "step 2, backward" in told


@pytest.mark.full
@pytest.mark.limit(120)
def test_a_rank_that_hangs_shows_its_record_on_a_signal(job, tmp_path):
    processes = job("sleep")
    assert processes[1].stdout is not None
    assert processes[1].stdout.readline() == "asleep\n"
    waited, pending = tmp_path / "records" / "rank-0.json", []
    while not pending or pending[0]["step"] < 3:  # it may have to come there first
        processes[0].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        entries = json.loads(waited.read_text())["entries"] if waited.exists() else []
        pending = [entry for entry in entries if not entry["ended"]]
    assert processes[0].poll() is None
    processes[0].kill()
    _, said = processes[0].communicate(timeout=300)
    assert "the last collectives of rank 0" in said
    assert "pending   all_gather" in said
    assert "thread MainThread, the innermost call last" in said
    assert "in wait" in said


# The record by itself


class _Done:
    is_on_device = False
    alive: ClassVar[list[_Done]] = []  # a record does not keep what it has recorded

    def __init__(self, ended=True):
        self.ended = ended
        self.alive.append(self)

    def has_ended(self):
        return self.ended


def test_a_record_keeps_the_last_launches_and_can_be_read_from_its_file(tmp_path):
    record = FlightRecord()
    launches_of = record.group("gather 0-3")
    for number in range(CAPACITY + 10):
        record.step, record.phase = number, 1 + number % 3
        record.append(launches_of, number % 4, f"unit {number}", number, _Done(number % 2 == 0))
        if number == 5:
            record.keep_in(tmp_path, 3, world=4)
    record.settle()
    found = decoded((tmp_path / "rank-3.ring").read_bytes())
    assert found.header["rank"] == 3
    assert found.header["world"] == 4
    assert [entry.number for entry in found.entries] == list(range(11, CAPACITY + 11))
    last = found.entries[-1]
    assert (last.name, last.kind) == (f"unit {CAPACITY + 9}", "reduce_scatter")
    assert (last.group, last.of_group) == ("gather 0-3", CAPACITY + 10)
    assert (last.step, last.phase, last.numbytes) == (CAPACITY + 9, "forward without gradients", CAPACITY + 9)
    assert [bool(entry.ended) for entry in found.entries[-4:]] == [True, False, True, False]
    record.forget()
    assert not (tmp_path / "rank-3.ring").exists()


def test_a_second_job_in_a_folder_leaves_the_record_of_the_first_alone(tmp_path):
    first, second = FlightRecord(), FlightRecord()
    first.keep_in(tmp_path, 0, world=2)
    second.keep_in(tmp_path, 0, world=2)
    first.append(first.group("gather 0,1"), 0, "a", 8, _Done())  # writing to a file cut short is a SIGBUS
    assert not second.read().entries
    first.forget()
    assert read_records(tmp_path)[0] == second.read()
    second.forget()
    assert list(tmp_path.iterdir()) == []


_RECORDED_AT = """
import sys, torch, torch.distributed as dist
from flatshard import fully_shard
from flatshard.trust.record import record

dist.init_process_group("gloo", sys.argv[1], rank=int(sys.argv[2]), world_size=2)
fully_shard(torch.nn.Linear(4, 4), values="own")(torch.ones(1, 4))
print(record.folder)
dist.barrier()
"""


@pytest.mark.limit(120)
@pytest.mark.parametrize("form", ["tcp", "file"])
def test_ranks_that_meet_without_environment_variables_have_records_in_one_folder(tmp_path, form):
    meeting = f"tcp://127.0.0.1:{free_port()}" if form == "tcp" else f"file://{tmp_path}/meeting"
    unset = ("FLATSHARD_RECORD", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(_ROOT)}
    call = [sys.executable, "-c", _RECORDED_AT, meeting]
    started = [subprocess.Popen([*call, rank], env=env, stdout=subprocess.PIPE, text=True) for rank in "01"]
    first, second = (process.communicate(timeout=300)[0] for process in started)
    assert first == second
    assert first.startswith(str(tmp_path))


def test_ranks_that_are_forked_have_records_of_their_own():
    record = FlightRecord()
    record.tell(rank=1)
    child = os.fork()
    if not child:
        record.tell(rank=2)
        os._exit(0)
    os.waitpid(child, 0)
    assert record.read().header["rank"] == 1


def test_long_names_errors_and_many_groups_fit(tmp_path):
    record = FlightRecord()
    record.keep_in(tmp_path, 0, world=2)
    record.append(record.group("x" * 500), 0, "é" * 500 + "end", 1, _Done())
    for number in range(200):
        record.append(record.group(f"group {number}"), 0, "", 1, _Done())
    record.tell(error="!" * 100_000)
    found = record.read()
    assert found.entries[0].name.endswith("end")
    assert found.entries[-1].group == "others"
    assert "!" * 100 in found.header["error"]


def test_a_wait_that_ends_just_when_it_has_been_given_up_has_ended_well():
    class Late:
        waits = 0

        def is_completed(self):
            return True

        def wait(self, patience):
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")

    work = Late()
    Ticket(works=[work]).wait()
    assert work.waits == 2


def test_a_slow_wait_keeps_nothing_of_its_callers():
    class Slow:
        waits = 0

        def is_completed(self):
            return False

        def wait(self, patience):
            self.waits += 1
            if self.waits < 3:
                raise RuntimeError("Operation timed out!")

    def body():
        tensor = torch.zeros(8)
        Ticket(works=[Slow()]).wait()
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert body()() is None
    finally:
        gc.enable()


def test_an_error_of_a_signal_handler_is_nobody_elses():
    def handler(patience):
        raise RuntimeError("a worker has died")

    class Interrupted:
        wait = functools.partial(handler)  # as a call of C++, it has no frame of its own

    with pytest.raises(RuntimeError, match=r"^a worker has died$"):
        Ticket(works=[Interrupted()]).wait()


def test_a_record_that_cannot_be_in_its_folder_stays_in_memory(tmp_path, monkeypatch):
    record, written = FlightRecord(), mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch("mmap.mmap", written), pytest.raises(OSError, match="No space left"):
        record.keep_in(tmp_path, 0, world=2)
    assert list(tmp_path.iterdir()) == []
    record.append(record.group("gather 0,1"), 0, "a", 8, _Done())
    assert record.read().header["world"] == 2
    (tmp_path / f"flatshard-{os.getuid()}").write_text("of somebody else")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("FLATSHARD_RECORD", raising=False)
    with pytest.raises(OSError, match="flatshard-"):
        records_folder()


def _recorded(tmp_path, launches, **told):
    """Records of ranks that have launched so many of the same units; a name in place of a number is another one."""
    for rank, names in enumerate(launches):
        record = FlightRecord()
        record.keep_in(tmp_path, rank, world=len(launches), **told)
        launches_of = record.group(f"gather {ranges(range(len(launches)))}")
        for name in names:
            record.append(launches_of, 0, name, 8, _Done(False))
        record.settle()


@pytest.mark.parametrize(
    ("launches", "said"),
    [
        (["abc", "abc", "abc"], ["3 ranks launched all_gather", "has not ended"]),
        (
            ["abc", "ab", "abc"],
            ["rank 0,2 launched all_gather c", "rank 1 launched nothing more", "after all_gather b"],
        ),
        (["abc", "axc", "abc"], ["launch 2", "rank 0,2 launched all_gather b", "rank 1 launched all_gather x"]),
        (["abc", "", "abc"], ["launch 1", "rank 1 launched nothing more in this group."]),
    ],
)
def test_blame_names_the_first_parting(tmp_path, launches, said):
    _recorded(tmp_path, launches)
    told = blame(read_records(tmp_path))
    for part in said:
        assert part in told


def test_blame_of_what_is_no_record(tmp_path, capsys):
    assert main(["blame", str(tmp_path)]) == 2
    assert "no flight records" in capsys.readouterr().err
    (tmp_path / "rank-0.ring").write_bytes(b"nothing")
    assert main(["blame", str(tmp_path)]) == 2
    assert "is not a flight record" in capsys.readouterr().err


def test_blame_skips_what_is_no_record_beside_records(tmp_path, caplog):
    _recorded(tmp_path, ["ab", "ab", "ab"])
    (tmp_path / "rank-2.ring").write_bytes(b"the disk was full")
    assert blame(read_records(tmp_path)).startswith("Records of 2 of 3 ranks. No record of rank 2")
    assert "rank-2.ring is not a flight record" in caplog.text


def test_blame_reads_the_records_of_the_last_job(tmp_path):
    _recorded(tmp_path, ["abc", "ab", "abc"])
    _recorded(tmp_path, ["a", "a"], started=time.time())
    assert blame(read_records(tmp_path)) == (
        "Records of 2 of 2 ranks. In every group all ranks launched the same collectives, as far as the records go "
        "back. 2 ranks launched all_gather a (8 bytes, step 0), which has not ended: check the network."
    )


def test_blame_says_what_a_rank_has_heard_if_records_do_not_differ(tmp_path):
    """A rank that is killed may have launched the collective that the others wait for."""
    _recorded(tmp_path, ["a", "a"], error="PeerError: rank 1 ended without a message: it was killed or crashed")
    told = blame(read_records(tmp_path))
    assert "Rank 0 ended: rank 1 ended without a message: it was killed or crashed." in told
    assert "network" not in told


@pytest.mark.parametrize("ranks", [[0], [0, 1], [0, 1, 2], [1, 3, 5], [0, 1, 5], [4, 3]])
def test_ranks_in_short(ranks):
    assert parse_ranges(ranges(ranks)) == ranks


def test_work_that_knows_no_limit_of_time_is_waited_for():
    """As a process group has it that is written in Python."""
    future = torch.futures.Future()
    done = threading.Timer(0.2, future.set_result, [[torch.ones(1)]])
    done.start()
    Ticket(works=[_create_work_from_future(future)]).wait()
    assert future.done()
    done.join()


class _Launched:
    """On a device."""

    is_on_device = True

    def __init__(self, ended=False):
        self.ended = ended

    def has_ended(self):
        return self.ended


@pytest.fixture
def own_record(monkeypatch):
    """A record, and an alarm that looks at it, of a rank whose process group waits for 30 seconds."""
    record, alarm = FlightRecord(), Alarm()
    for module in ("alarm", "watch"):
        monkeypatch.setattr(f"flatshard.trust.{module}.record", record)
    group = Watched(store=lambda prefix: dist.HashStore(), kept=None, rank=0, world=2)
    alarm._watch = Watch(group, "alarm", mock.Mock(spec=Loop), alarm.verdict)
    return record, alarm


def _until(true):
    for _ in range(200):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def test_a_launch_that_does_not_end_times_out(own_record):
    record, alarm = own_record
    launches_of = record.group("gather 0,1", 30.0)
    launches = [_Launched(True), _Launched(), _Launched()]
    for name, launched in zip("abc", launches):
        record.append(launches_of, 0, name, 8, launched)
    for look in range(20):
        alarm._tick(2.0)
        if look == 12:
            launches[1].ended = True  # late, and in time; the next one has waited behind it
    assert alarm.verdict.reason is None
    for _ in range(11):
        alarm._tick(2.0)
    _until(lambda: alarm.verdict.reason is not None)
    assert "all_gather c (8 bytes, step 0) has not ended within 30 s" in alarm.verdict.reason
    assert "No answer from rank 1" in alarm.verdict.reason
    assert "timed out all_gather c" in record.dump()
    assert "ended     all_gather b" in record.dump()


def test_what_is_captured_is_not_waited_for(own_record):
    record, _ = own_record
    launches_of = record.group("gather 0,1", 30.0)
    record.append(launches_of, 0, "a", 8, _Launched(True))
    record.captures = True
    record.append(launches_of, 0, "b", 8, None)
    record.captures = False
    assert record.oldest_pending() is None
    record.append(record.group("replay 0,1", 30.0), 4, "step", 0, _Launched())
    assert str(record.oldest_pending()) == "replay step (0 bytes, step 0)"


_LOST = ({"lost": 1}, "rank 1 ended without a message: it was killed or crashed")
_LEFT = ({"raised": "StopIteration: done", "rank": 1, "is_failure": False}, "rank 1 raised StopIteration: done")


@pytest.mark.parametrize(("message", "reason"), [_LOST, _LEFT], ids=["lost", "left"])
@pytest.mark.parametrize(("ranks", "ends"), [("0,2", False), ("0-2", True)])
def test_a_rank_that_is_gone_ends_only_those_who_wait_for_it(own_record, ranks, ends, message, reason):
    record, alarm = own_record
    record.append(record.group(f"gather {ranks}", 30.0), 0, "a", 8, _Launched())
    alarm._watch._hear(message)
    assert alarm.verdict.reason == reason
    alarm.verdict._since -= 60
    with mock.patch("flatshard.trust.exits.end_stuck") as end:
        alarm._tick(1.0)
        assert end.called == ends
        alarm._watch._hear({"raised": "ValueError: no data", "rank": 2, "is_failure": True})
        assert alarm.verdict.reason == (reason if ends else "rank 2 raised ValueError: no data")
        alarm._tick(1.0)
        assert end.called == ends  # otherwise it has time for its own cleanup
        alarm.verdict._since -= 60
        alarm._tick(1.0)
        assert end.called


def test_a_device_that_is_in_error_is_asked_in_vain(own_record):
    record, _ = own_record

    class Broken(_Launched):
        def has_ended(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    record.append(record.group("gather 0,1", 30.0), 0, "a", 8, Broken())
    record.settle()
    assert record.oldest_pending().name == "a"


# Throws an exception of torch.distributed, or of somebody else, on a thread that catches nothing.
_THROW = """
import ctypes, os, sys, threading, torch
from flatshard.trust.exits import TerminateHandler

def ends(is_distributed):
    print("told on", threading.current_thread().name, flush=True)
    if is_distributed:
        os._exit(7)

TerminateHandler(ends).install()
cpp, torch_cpu = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(os.path.dirname(torch.__file__) + "/lib/libtorch_cpu.so")
allocate, throw = cpp["__cxa_allocate_exception"], cpp["__cxa_throw"]
allocate.restype, throw.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * 3
kind = ctypes.addressof(ctypes.c_char.in_dll(cpp if sys.argv[1] == "_ZTIi" else torch_cpu, sys.argv[1]))
thread = threading.Thread(target=lambda: throw(allocate(ctypes.c_size_t(512)), kind, None), name="watchdog")
thread.start()
thread.join()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("thrown", "status", "said"),
    [
        ("_ZTIN3c1016DistBackendErrorE", 7, "told on watchdog\n"),
        ("_ZTIN4gloo13EnforceNotMetE", 7, "told on watchdog\n"),
        ("_ZTIi", -signal.SIGABRT, "told on watchdog\n"),
    ],
    ids=["torch.distributed's", "Gloo's", "another"],
)
def test_an_exception_of_torchs_watchdog_is_heard_before_the_process_is_aborted(thrown, status, said):
    done = subprocess.run(
        [sys.executable, "-c", _THROW, thrown], cwd=_ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (status, said)
