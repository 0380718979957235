"""A pool of rank processes that serves a whole test session.

Processes are forked from a server that has already imported torch, so a rank starts in tens of milliseconds, and are
kept between tests; each test gets a new process group and a cleaned-up process. A test that fails in any way costs
only the processes it used: they are ended, and the next test gets new ones.

Processes that are forked share the seed of their hashes, and with it the order in which sets are walked. A pool of
interpreters starts each rank as torchrun does, with a seed of its own. Over NCCL all ranks share the first GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch.distributed as dist

from scripts import mps

from . import report
from .report import Cut, Died, RankError
from .worker import Clean, Error, Finish, Job, Ready, Value, serve

__all__ = ["RankError", "RankPool"]

_START_LIMIT = 180.0  # importing torch with cold disk caches on a busy machine
_SETTLE = 0.5  # after a failure, what the other ranks have of their own to report comes within this
_LEAVING = 30.0  # for communicators to be destroyed
_GRACE = 5.0  # after a failure, ranks that still run are cut
_LOOK = 2.0  # how long ranks past their limit are watched, to tell a slow test from a hang ...
_IDLE = 0.05  # ... by the processor seconds that they use meanwhile
_SLOW = 10.0  # what still works after so many times its limit is cut like a hang

# What rank bodies import sooner or later; the server imports it once for all of them. Names that are not installed
# are passed over.
_PRELOAD = [
    "tests.patient",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "pytest",
    "hypothesis",
    "flatshard.megatron",  # with the engine, optimizers and checkpoints, which `flatshard` leaves for later
    "flatshard.train.launch",
]


def _nccl_environment(rank: int) -> dict[str, str]:
    """NCCL takes several ranks on one GPU if each seems to be a host of its own; data goes over loopback sockets."""
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # equal steps give equal bits
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


@dataclass
class _Process:
    rank: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stacks_path: str
    is_ready: bool = False

    def send(self, message: Job | Finish) -> None:
        with contextlib.suppress(OSError):  # it is dead then; `receive` will say so
            self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """The next message, or `Died` when the process is gone without one. Call when pipe or sentinel is ready."""
        try:
            if self.pipe.poll():
                return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        self.process.join(5.0)
        return Died(self.process.exitcode)

    def stack(self) -> str:
        """The Python stack of every thread, as it was at the call."""
        try:
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        size, patience = 0, time.monotonic() + 2.0
        while time.monotonic() < patience:
            time.sleep(0.05)
            now = os.path.getsize(self.stacks_path)
            if now and now == size:
                break
            size = now
        with open(self.stacks_path) as file:
            return file.read()

    def processor_seconds(self) -> float:
        """What its threads have used so far; 0 where the system does not say, or the process is gone."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as file:
                user, system = file.read().rpartition(")")[2].split()[11:13]
        except OSError:
            return 0.0
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5.0)


class RankPool:
    """Up to `size` rank processes on Gloo over loopback, or on NCCL too, which then carries what is on the GPU.

    `run(world, body, args)` calls `body(rank, world, *args)` on `world` of them and returns the values in rank order.
    Inside the body the default process group has exactly `world` ranks, generators are seeded with 0 on every rank,
    and torch runs one thread. Processes start on first use and are reused. With `interpreters`, each is a Python of its
    own, in seconds instead of milliseconds; rank r has the hash seed r + 1, so that a failure can be repeated.

    With `backend="nccl"`, which takes interpreters, all ranks are on the first GPU, and are cut at their limit: a rank
    that waits in NCCL looks busy. A process group serves up to `serves` calls in a row that are of one world size.
    `environment`: what the interpreters find in theirs when they start.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        interpreters: bool = False,
        backend: str = "gloo",
        serves: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        assert interpreters or backend == "gloo", "CUDA does not survive a fork"
        self.size = size
        self.interpreters = interpreters
        self.backend = backend
        self.serves = serves
        self.environment = dict(environment or {})
        self._processes: dict[int, _Process] = {}
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._jobs = 0
        self._started = 0
        self._kept: list[_Process] = []  # those whose process group is to serve the next call, too
        self._served = 0  # calls, by that group
        self._service: mps.Service | None = None  # of NCCL ranks, where there is one
        self._store, self._port = _loopback_store()
        os.environ.setdefault("FLATSHARD_RECORD", "off")  # inherited by the ranks, which are killed in the end
        self._context = multiprocessing.get_context("spawn" if interpreters else "forkserver")
        if not interpreters:
            self._context.set_forkserver_preload(_PRELOAD)

    def run(
        self,
        world: int,
        body: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        limit: float = 60.0,
        name: str = "",
    ) -> list[Any]:
        """Runs `body` on ranks 0 to `world` - 1 and returns their values, tensors as detached CPU tensors.

        Raises `RankError` when a rank raises, dies, or has not returned after `limit` seconds; `name` (of the test)
        leads its message. Ranks that are still at work then have a slow machine, not a hang, and go on. `body` must be
        a function at the top level of an importable module; what it depends on goes through `args` and `kwargs`.
        """
        __tracebackhide__ = True
        payload = _dump_call(body, args, dict(kwargs or {}))
        name = name or body.__qualname__
        slow = _SLOW if self.backend == "gloo" else 0.0
        if self._kept and len(self._kept) != world:
            self._leave(name)
        processes = self.start(world)
        self._jobs += 1
        job = Job(world, f"job-{self._jobs}", tuple(sys.path), payload)
        deadline = time.monotonic() + limit
        keep = self._served + 1 < self.serves
        try:
            replies = _exchange(processes, job, deadline, name, limit, slow)
            # Separate from the job: a rank that left the group early could break a peer's last collective.
            _exchange(processes, Finish(not keep), max(deadline, time.monotonic() + _GRACE), name, limit, slow)
        except BaseException:  # also a KeyboardInterrupt: the processes are in an unknown state
            self._discard(processes)
            raise
        self._kept, self._served = (processes, self._served + 1) if keep else ([], 0)
        return [pickle.loads(reply.payload) for reply in replies]

    def pids(self) -> list[int]:
        """The process ids of the ranks that are up, in rank order."""
        return [entry.process.pid or 0 for _, entry in sorted(self._processes.items())]

    def close(self) -> None:
        """Ends every process of the pool."""
        self._discard(list(self._processes.values()))
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, world: int) -> list[_Process]:
        """Starts those of the first `world` ranks that are not up, and returns when they are."""
        self.begin(world)
        found = [self._processes[rank] for rank in range(world)]
        for entry in found:
            if not entry.is_ready:
                ready = wait([entry.pipe, entry.process.sentinel], _START_LIMIT)
                message = entry.receive() if ready else Cut(entry.stack())
                if not isinstance(message, Ready):
                    self._discard(found)
                    raise RankError(f"rank {entry.rank} did not start: {message}")
                entry.is_ready = True
        return found

    def begin(self, world: int) -> None:
        """Lets those of the first `world` ranks start that are not up, and does not wait for them."""
        if not 1 <= world <= self.size:
            raise ValueError(f"world is {world}; this pool has ranks for 1 to {self.size}")
        for rank in range(world):
            if not self._alive(rank):
                self._start(rank)

    def _leave(self, name: str) -> None:
        """Has the process group that was kept destroyed; processes that cannot are ended."""
        kept, self._kept, self._served = self._kept, [], 0
        try:
            _exchange(kept, Finish(), time.monotonic() + _LEAVING, name, _LEAVING, 0.0)
        except RankError as error:
            self._discard(kept)
            warnings.warn(f"after earlier tests, before {name}: {error}", stacklevel=2)

    def _alive(self, rank: int) -> bool:
        return rank in self._processes and self._processes[rank].process.is_alive()

    def _start(self, rank: int) -> _Process:
        self._started += 1
        stacks_path = os.path.join(self._folder, f"stacks-{self._started}")
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_import_and_serve if self.interpreters else serve,
            args=(rank, theirs, self._port, stacks_path, self.backend),
            name=f"rank-{rank}",
            daemon=True,
        )
        own = self.environment | ({"PYTHONHASHSEED": str(rank + 1)} if self.interpreters else {})
        if self.backend == "nccl":
            own |= _nccl_environment(rank)
            if self._service is None and mps.is_available():
                self._service = mps.Service()
            own |= self._service.environment if self._service is not None else {}
        with mock.patch.dict(os.environ, own):
            process.start()
        theirs.close()  # with the only other end in the child, its death is seen as the end of the pipe
        entry = _Process(rank, process, ours, stacks_path)
        self._processes[rank] = entry
        return entry

    def _discard(self, processes: list[_Process]) -> None:
        if self._service is not None:
            processes = list(self._processes.values())  # a client that is killed may take the others along
        for entry in processes:
            entry.kill()
            self._processes.pop(entry.rank, None)
        if any(entry in self._kept for entry in processes):
            self._kept, self._served = [], 0
        if self._service is not None:
            self._service.close()
            self._service = None


def _import_and_serve(*args: Any) -> None:
    """What the server of the others has imported is imported here, so that no test pays for it."""
    for name in _PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    serve(*args)


def _exchange(
    processes: list[_Process], message: Job | Finish, deadline: float, name: str, limit: float, slow: float
) -> list[Any]:
    """Sends `message` to all and returns their answers in rank order; raises `RankError` if one is not a success.

    Ranks that are busy at the deadline get `slow` times the limit more.
    """
    __tracebackhide__ = True
    for entry in processes:
        entry.send(message)
    replies: dict[int, Any] = {}
    failures = _Failures(deadline)
    while len(replies) < len(processes):
        if time.monotonic() >= failures.cut_at:
            waiting = [entry for entry in processes if entry.rank not in replies]
            if failures.seen or time.monotonic() > deadline + slow * limit or not _at_work(waiting):
                break
        for entry in _answering(processes, replies, failures.next_event()):
            replies[entry.rank] = entry.receive()
            if not isinstance(replies[entry.rank], (Value, Clean)):
                failures.note()
        if failures.settled():
            _kill_failed(processes, replies)
    if not failures.seen and len(replies) == len(processes):
        return [replies[entry.rank] for entry in processes]
    for entry in processes:
        if entry.rank not in replies:
            replies[entry.rank] = Cut(entry.stack())
    raise RankError(report.describe(name, len(processes), replies, limit, finishing=isinstance(message, Finish)))


def _at_work(waiting: list[_Process]) -> bool:
    """Watches the ranks until one has answered, and says whether they are busy; in a hang, all wait for one another."""
    before = sum(entry.processor_seconds() for entry in waiting)
    if wait([entry.pipe for entry in waiting], _LOOK):
        return True
    return sum(entry.processor_seconds() for entry in waiting) - before >= _IDLE


class _Failures:
    """When to act on a failure: wake the other ranks once it has settled, cut them after the grace period."""

    def __init__(self, deadline: float) -> None:
        self.seen = False
        self.wake_at = self.cut_at = deadline

    def note(self) -> None:
        if not self.seen:
            self.seen = True
            self.wake_at, self.cut_at = time.monotonic() + _SETTLE, time.monotonic() + _GRACE

    def settled(self) -> bool:
        return self.seen and time.monotonic() >= self.wake_at

    def next_event(self) -> float:
        return self.cut_at if self.settled() else self.wake_at


def _answering(processes: list[_Process], replies: dict[int, Any], until: float) -> list[_Process]:
    """Those of the ranks without a reply that have one now, or have died; waits for the first until `until`."""
    waiting = [entry for entry in processes if entry.rank not in replies]
    handles = [handle for entry in waiting for handle in (entry.pipe, entry.process.sentinel)]
    ready = wait(handles, max(0.0, until - time.monotonic()))
    return [entry for entry in waiting if entry.pipe in ready or entry.process.sentinel in ready]


def _kill_failed(processes: list[_Process], replies: dict[int, Any]) -> None:
    # Its connections close with it, which wakes the ranks that wait for it in a collective.
    for entry in processes:
        if isinstance(replies.get(entry.rank), Error) and entry.process.is_alive():
            entry.process.kill()


def _dump_call(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((body, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot send {body!r} to the ranks ({error}); make it a top-level function of an importable module and "
            "pass what it depends on as arguments"
        ) from error


def _loopback_store() -> tuple[dist.TCPStore, int]:
    """A store in this process that listens on loopback only, and its port; also points Gloo at loopback."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # inherited by the ranks
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port
