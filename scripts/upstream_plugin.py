"""A plugin of pytest, for `upstream.py`: every test in processes of its own, forked from the one that imported it.

CUDA never starts in the process that imports the tests: it could not be used in forks of it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mps
import pytest
import upstream_devices
from _pytest.runner import runtestprotocol

_SETTINGS: dict[str, Any] = json.loads(os.environ["UPSTREAM"])
_TRIES = 3  # of a test that failed beside another one, on the same Multi-Process Service
_GRACE = 5.0  # seconds for the other ranks when one has failed
_ERROR = re.compile(r"^(?:E\s+)?((?:\w+\.)*(?:\w*(?:Error|Exception|Warning|Exit|Interrupt|Unsupported)|Failed)\b.*)")
_WRAPPER = re.compile(r"(?:Process|Thread) \d+ (?:exited|terminated)")


def _place() -> None:
    """Let tests find what is under test: the control as it is, or flatshard."""
    upstream_devices.apply(_SETTINGS["device"], _SETTINGS["backend"], _SETTINGS["devices"])
    if _SETTINGS["system"] == "flatshard" and _SETTINGS["suite"] == "fsdp2":
        import flatshard

        flatshard.install()
    elif _SETTINGS["system"] == "flatshard":
        import flatshard.megatron.installing

        flatshard.megatron.installing.install()
    if _SETTINGS["suite"] == "megatron":  # imports Megatron-Core's adapter, which takes classes of what is under test
        upstream_devices.leave_out_transformer_engine()


_place()


@dataclass
class _Running:
    item: pytest.Item
    number: int
    tries: int
    service: mps.Service | None
    begun: float = field(default_factory=time.monotonic)
    told: bool = False  # to show its stacks

    @property
    def log(self) -> Path:
        return Path(_SETTINGS["logs"], f"{_SETTINGS['system']}-{self.number}-{self.tries}.log")

    @property
    def result(self) -> Path:
        return self.log.with_suffix(".json")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "not collected", 0.0, report.longreprtext)


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run all tests, some at a time; a test that takes too long is killed with all of its processes."""
    if session.config.option.collectonly:
        return True
    upstream_devices.map_devices_of(session.config.rootpath, session.config.pluginmanager.get_plugins())
    waiting = deque((item, number, 1) for number, item in enumerate(_interleaved(session.items)))
    running: dict[int, _Running] = {}
    services = _Services()
    begun, total = time.monotonic(), _SETTINGS["total"] or float("inf")
    while running or (waiting and time.monotonic() - begun < total):
        while waiting and len(running) < _SETTINGS["jobs"] and time.monotonic() - begun < total:
            one = _Running(*waiting.popleft(), services.whole())
            running[_start(one)] = one
        for pid in list(running):
            ended = _ended(pid, running[pid])
            if ended is not None:
                one = running.pop(pid)
                if services.blames_another(one, ended[0]):
                    waiting.append((one.item, one.number, one.tries + 1))  # after all others
                else:
                    _write(one.item.nodeid, *ended, one.log)
        time.sleep(0.02)
    services.close()
    if waiting:
        print(f"{len(waiting)} tests not run: {total:.0f} s have passed", flush=True)
    return True


class _Services:
    """The Multi-Process Services that tests run on, one after another: a test that fails may break it for others."""

    def __init__(self) -> None:
        self._all: list[mps.Service] = []

    def whole(self) -> mps.Service | None:
        if not _SETTINGS["mps"]:
            return None
        if not self._all or not self._all[-1].is_whole:
            self._all.append(mps.Service())
        return self._all[-1]

    def blames_another(self, one: _Running, outcome: str) -> bool:
        """Whether a test that has ended in this way is to run again, since another one had failed beside it."""
        if one.service is None or outcome in ("passed", "skipped"):
            return False
        was_whole, one.service.is_whole = one.service.is_whole, False
        return not was_whole and one.tries < _TRIES

    def close(self) -> None:
        for service in self._all:
            service.close()


def _start(one: _Running) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    output = os.open(one.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ["MASTER_PORT"] = str(_free_port(one.number))
    if one.service is not None:
        os.environ.update(one.service.environment)
    try:
        outcome, error = _on_ranks(one) if _SETTINGS["suite"] == "megatron" else _here(one.item)
    except BaseException:
        outcome, error = "failed", traceback.format_exc()
    _leave(one.result, outcome, error)


def _leave(result: Path, outcome: str, error: str) -> None:
    """Write the result, and end this process without anything that the test has registered."""
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps([outcome, error]))
    partial.rename(result)
    os._exit(0)


def _here(item: pytest.Item) -> tuple[str, str]:
    """The outcome of a test in this process, and what it said."""
    reports = runtestprotocol(item, nextitem=None, log=False)
    for outcome in ("failed", "skipped"):
        for report in reports:
            if report.outcome == outcome:
                return outcome, report.longreprtext or str(report.longrepr)
    return "passed", ""


def _on_ranks(one: _Running) -> tuple[str, str]:
    """As torchrun would: the same test in several processes, of which the first error counts."""
    ranks: dict[int, Path] = {}
    for rank in range(_SETTINGS["devices"]):
        result = one.log.with_name(f"{one.log.stem}-{rank}.json")
        pid = os.fork()
        if not pid:
            upstream_devices.be_rank(rank, _SETTINGS["devices"])
            try:
                outcome, error = _here(one.item)
            except BaseException:
                outcome, error = "failed", traceback.format_exc()
            _leave(result, outcome, error)
        ranks[pid] = result
    outcomes, deadline = [], float("inf")
    while ranks and time.monotonic() < deadline:
        for pid in list(ranks):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                outcomes.append(_outcome(ranks.pop(pid), status))
                if outcomes[-1][0] == "failed":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)
    for wanted in ("failed", "passed", "skipped"):
        for outcome, error in outcomes:
            if outcome == wanted:
                return outcome, error
    raise AssertionError("a test without ranks")


def _outcome(result: Path, status: int) -> tuple[str, str]:
    if not result.exists():
        return "failed", f"RuntimeError: the process ended with status {os.waitstatus_to_exitcode(status)}"
    outcome, error = json.loads(result.read_text())
    return outcome, error


def _ended(pid: int, one: _Running) -> tuple[str, float, str] | None:
    """The outcome of a test that has ended, its seconds and its error; what is left of its processes is killed then."""
    took = time.monotonic() - one.begun
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found and took < _SETTINGS["limit"]:
        return None
    if not found and not one.told:
        one.told = True
        _signal(pid, signal.SIGUSR1)
        return None
    if not found and took < _SETTINGS["limit"] + 1:  # for the stacks to be written
        return None
    _signal(pid, signal.SIGKILL)
    if found:
        outcome, error = _outcome(one.result, status)
        return outcome, took, error
    os.waitpid(pid, 0)
    return "timed out", took, f"TimeoutError: not done after {_SETTINGS['limit']:.0f} s"


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of them have ended


def _write(test: str, outcome: str, took: float, error: str, log: Path | None = None) -> None:
    line = {"test": test, "outcome": outcome, "seconds": round(took, 1), "error": first_error(error)}
    if outcome not in ("passed", "skipped"):
        output = log.read_text(errors="replace") if log is not None and log.exists() else ""
        line |= {"text": error[-6000:], "output": output[-12000:]}
    with Path(_SETTINGS["results"]).open("a") as results:
        results.write(json.dumps(line) + "\n")
    mark = {"passed": "", "skipped": ""}.get(outcome, f": {line['error'][:160]}")
    print(f"{outcome} {took:.1f} s {test.rpartition('/')[2]}{mark}", flush=True)


def first_error(text: str) -> str:
    """The first line that names an exception, not the one by which a rank's is reported."""
    lines = [found.group(1) for line in text.splitlines() if (found := _ERROR.match(line))]
    told = [line for line in lines if not _WRAPPER.search(line)]
    return (told or lines or text.strip().splitlines()[-1:] or [""])[0]


def _interleaved(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that have not been skipped before, of all files in turns: what a stop leaves is a part of every file."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid not in _SETTINGS["skipped"]:
            files.setdefault(item.path, []).append(item)
    ranked = [(at / len(found), item) for found in files.values() for at, item in enumerate(found)]
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def _free_port(number: int) -> int:
    """A port for a test, below those that systems give to connections. Both systems may be running."""
    first = 12000 if _SETTINGS["system"] == "control" else 22000
    for port in range(first + 10 * number, 32000):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("no port is free")
