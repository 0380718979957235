"""A plugin of pytest, for `upstream.py`: tests run in forks of the process that imported them.

Each of PyTorch's tests has a process of its own, which forks its ranks. Megatron's are for ranks that torchrun starts
once: a pool of such ranks runs one test after another, until one fails. CUDA never starts in the process that imports
the tests: it could not be used in forks of it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import mps
import numpy
import pytest
import torch
import torch.distributed as dist
import upstream_devices
from _pytest.runner import runtestprotocol

_SETTINGS: dict[str, Any] = json.loads(os.environ["UPSTREAM"])
_POOLED = _SETTINGS["suite"] == "megatron"
_TOGETHER = 16 if _POOLED else 1  # tests of a class that run between two starts of torch.distributed
_TRIES = 3  # of a test that failed beside another one, on the same Multi-Process Service
_GRACE = 5.0  # seconds for the other ranks when one has failed
_FAREWELL = 15.0  # seconds for ranks to destroy their process groups
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
_pipes: set[Connection] = set()  # this process's ends of those to all processes that run tests


class _Pool:
    """Processes that run tests one after another, and the tests that they are given: the first of them runs."""

    def __init__(self, items: list[pytest.Item], number: int, service: mps.Service | None) -> None:
        self.service = service
        self.tests: deque[int] = deque()
        self.ran = 0
        self._log = Path(_SETTINGS["logs"], f"{_SETTINGS['system']}-{number}.log")
        self._log.touch()
        ranks = range(_SETTINGS["devices"]) if _POOLED else range(1)
        self._pipes = dict(_fork(rank, items, self._log, service) for rank in ranks)  # by process
        self._ended: dict[int, int] = {}  # their exit codes

    def begin(self, tests: deque[int], port: int) -> None:
        """Run the first of these tests. The port is for process groups of all of them."""
        self.tests, self._port = tests, port
        self.run()

    def run(self) -> None:
        """Run the first of the tests that are left."""
        self._since, self._deadline = time.monotonic(), float("inf")
        self._told = False  # to show their stacks
        self._written = self._log.stat().st_size
        self._running, self._outcomes = list(self._pipes), list[tuple[str, str]]()
        for pipe in self._pipes.values():
            try:
                pipe.send((self.tests[0], self.tests[1] if len(self.tests) > 1 else None, self._port))
            except BrokenPipeError:
                continue  # it has ended, which is found below

    def ended(self) -> tuple[str, float, str] | None:
        """The outcome of the test, its seconds and its error, if it has ended. The first error of a rank counts."""
        took = time.monotonic() - self._since
        for pid in list(self._running):
            answer = self._answer(pid)
            if answer is not None:
                self._running.remove(pid)
                self._outcomes.append(answer)
                if answer[0] == "failed":
                    self._deadline = min(self._deadline, time.monotonic() + _GRACE)
        if not self._running or time.monotonic() > self._deadline:
            outcome, error = min(self._outcomes, key=lambda each: ("failed", "passed", "skipped").index(each[0]))
            return outcome, took, error
        if took < _SETTINGS["limit"]:
            return None
        if not self._told:
            self._told = True
            self._signal(signal.SIGUSR1)
        if took < _SETTINGS["limit"] + 1:  # for the stacks to be written
            return None
        return "timed out", took, f"TimeoutError: not done after {_SETTINGS['limit']:.0f} s"

    def _answer(self, pid: int) -> tuple[str, str] | None:
        self._reap(pid)
        try:
            if self._pipes[pid].poll():
                outcome, error = self._pipes[pid].recv()
                return outcome, error
        except (EOFError, ConnectionResetError):
            pass  # it has ended, or will have in a moment
        if pid not in self._ended:
            return None
        return "failed", f"RuntimeError: the process ended with status {self._ended[pid]}"

    def _reap(self, pid: int) -> None:
        if pid not in self._ended:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._ended[pid] = os.waitstatus_to_exitcode(status)

    def output(self) -> str:
        """What the test has written."""
        with self._log.open("rb") as log:
            log.seek(self._written)
            return log.read().decode(errors="replace")

    def close(self) -> None:
        """End the processes, and all that they have started. Those that wait for a test end by themselves."""
        for pipe in self._pipes.values():
            _pipes.remove(pipe)
            pipe.close()
        until = time.monotonic() + 1
        while len(self._ended) < len(self._pipes) and time.monotonic() < until:
            for pid in self._pipes:
                self._reap(pid)
            time.sleep(0.005)
        self._signal(signal.SIGKILL)
        for pid in self._pipes.keys() - self._ended:
            os.waitpid(pid, 0)

    def _signal(self, number: int) -> None:
        for pid in self._pipes:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                continue  # all of them have ended


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "not collected", 0.0, report.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip what needs packages that are not here."""
    try:
        return (yield)
    except ImportError as error:
        pytest.skip(f"{type(error).__name__}: {error}")


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run all tests, some at a time; a test that takes too long is killed with all of its processes."""
    if session.config.option.collectonly:
        return True
    upstream_devices.map_devices_of(session.config.rootpath, session.config.pluginmanager.get_plugins())
    gc.freeze()  # ranks collect garbage after each test
    waiting = _parts(session.items)
    pools, services, tries = list[_Pool](), _Services(), Counter[int]()
    started = given = 0
    until = time.monotonic() + (_SETTINGS["total"] or float("inf"))
    while pools or (waiting and time.monotonic() < until):
        while waiting and len(pools) < _SETTINGS["jobs"] and time.monotonic() < until:
            pools.append(_Pool(session.items, started := started + 1, services.whole()))
            pools[-1].begin(waiting.popleft(), _free_port(given := given + 1))
        for pool in list(pools):
            ended = pool.ended()
            if ended is None:
                continue
            test, good = pool.tests.popleft(), ended[0] in ("passed", "skipped")
            name = session.items[test].nodeid
            pool.ran, tries[test] = pool.ran + 1, tries[test] + 1
            if not good and pool.ran > 1:  # what ran before it may be the reason
                print(f"again, in new ranks: {name.rpartition('/')[2]}: {first_error(ended[2])[:160]}", flush=True)
                pool.tests.appendleft(test)
            elif not good and services.blames_another(pool.service) and tries[test] < _TRIES:
                waiting.append(deque([test]))  # after all others
            else:
                _write(name, *ended, pool)
            if good and _POOLED and time.monotonic() < until and (pool.tests or waiting):
                pool.run() if pool.tests else pool.begin(waiting.popleft(), _free_port(given := given + 1))
                continue
            pools.remove(pool)
            pool.close()
            services.release(pool.service)
            if pool.tests:
                waiting.appendleft(pool.tests)
        time.sleep(0.005)
    services.close()
    if waiting:
        print(f"{sum(map(len, waiting))} tests not run: {_SETTINGS['total']:.0f} s have passed", flush=True)
    return True


class _Services:
    """The Multi-Process Services that tests run on: a test that fails may break its service for others.

    Each pool of ranks has its own. Other tests share one after another.
    """

    def __init__(self) -> None:
        self._all: list[mps.Service] = []

    def whole(self) -> mps.Service | None:
        if not _SETTINGS["mps"]:
            return None
        if _POOLED or not self._all or not self._all[-1].is_whole:
            self._all.append(mps.Service())
        return self._all[-1]

    def blames_another(self, service: mps.Service | None) -> bool:
        """Whether a test that has failed on this service is to run again, since another one had failed beside it."""
        if service is None:
            return False
        was_whole, service.is_whole = service.is_whole, False
        return not was_whole

    def release(self, service: mps.Service | None) -> None:
        if _POOLED and service is not None:
            self._all.remove(service)
            service.close()

    def close(self) -> None:
        for service in self._all:
            service.close()


def _fork(rank: int, items: list[pytest.Item], log: Path, service: mps.Service | None) -> tuple[int, Connection]:
    """A process that runs tests, and the pipe over which it is told which."""
    here, there = multiprocessing.Pipe()
    _pipes.add(here)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        there.close()
        return pid, here
    try:
        for pipe in _pipes:  # which would hide from others that the process that forked them has ended
            pipe.close()
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        if service is not None:
            os.environ.update(service.environment)
        if _POOLED:
            upstream_devices.be_rank(rank, _SETTINGS["devices"])
            upstream_devices.write_checkpoints_to(log.with_suffix(""))
        _serve(items, there)
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # without anything that tests have registered


def _serve(items: list[pytest.Item], orders: Connection) -> NoReturn:
    """Run tests as told, until nobody is there who could tell."""
    restore = _restorer()
    while True:
        number, following, port = orders.recv()
        os.environ["MASTER_PORT"] = str(port)
        orders.send(_outcome(items[number], None if following is None else items[following]))
        if not _POOLED:
            os._exit(0)
        if following is None and dist.is_initialized():
            faulthandler.dump_traceback_later(_FAREWELL, exit=True)
            dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
        restore()


def _outcome(item: pytest.Item, following: pytest.Item | None) -> tuple[str, str]:
    """The outcome of a test in this process, and what it said. Fixtures that the following one shares stay."""
    try:
        reports = runtestprotocol(item, nextitem=following, log=False)
    except BaseException:
        return "failed", traceback.format_exc()
    for outcome in ("failed", "skipped"):
        for report in reports:
            if report.outcome == outcome:
                return outcome, report.longreprtext or str(report.longrepr)
    return "passed", ""


def _restorer() -> Callable[[], None]:
    """What sets the global state that tests change to what it is now."""
    environment, arguments, dtype = dict(os.environ), list(sys.argv), torch.get_default_dtype()
    seed, states = torch.initial_seed(), (random.getstate(), numpy.random.get_state())

    def restore() -> None:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = arguments
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.manual_seed(seed)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    return restore


def _write(test: str, outcome: str, took: float, error: str, pool: _Pool | None = None) -> None:
    line = {"test": test, "outcome": outcome, "seconds": round(took, 1), "error": first_error(error)}
    if outcome not in ("passed", "skipped"):
        line |= {"text": error[-6000:], "output": pool.output()[-12000:] if pool is not None else ""}
    with Path(_SETTINGS["results"]).open("a") as results:
        results.write(json.dumps(line) + "\n")
    mark = {"passed": "", "skipped": ""}.get(outcome, f": {line['error'][:160]}")
    print(f"{outcome} {took:.1f} s {test.rpartition('/')[2]}{mark}", flush=True)


def first_error(text: str) -> str:
    """The first line that names an exception, not the one by which a rank's is reported."""
    lines = [found.group(1) for line in text.splitlines() if (found := _ERROR.match(line))]
    told = [line for line in lines if not _WRAPPER.search(line)]
    return (told or lines or text.strip().splitlines()[-1:] or [""])[0]


def _parts(items: list[pytest.Item]) -> deque[deque[int]]:
    """Numbers of the tests to run, in parts that run together, of all files in turns.

    Of a class, the first cases of all functions come first. So what a stop leaves is a part of every file and function.
    """
    files: dict[Path, list[deque[int]]] = {}
    classes: dict[pytest.Collector | None, int] = {}
    cases, order = Counter[tuple[object, str]](), list[tuple[int, int, int]]()
    for number, item in enumerate(items):
        function = item.parent, item.name.partition("[")[0]
        order.append((classes.setdefault(item.parent, len(classes)), cases[function], number))
        cases[function] += 1
    for *_, number in sorted(order):
        item = items[number]
        if item.nodeid not in _SETTINGS["left_out"]:
            parts = files.setdefault(item.path, [])
            if not parts or len(parts[-1]) == _TOGETHER or items[parts[-1][-1]].parent is not item.parent:
                parts.append(deque())
            parts[-1].append(number)
    ranked = [(at / len(parts), part) for parts in files.values() for at, part in enumerate(parts)]
    return deque(part for _, part in sorted(ranked, key=lambda pair: pair[0]))


def _free_port(number: int) -> int:
    """A port for tests that run together, below those that systems give to connections. Both systems may be running."""
    first = 12000 if _SETTINGS["system"] == "control" else 22000
    for port in range(first + 10 * number, 32000):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("no port is free")
