"""What runs inside a rank process: take a body, run it in a fresh process group, send its value back.

The pool and a worker speak over one pipe. Every message is bytes, so that tensors travel by value and never as shared
memory whose lifetime would depend on the process that made it:

    pool -> worker   Job (run this)          worker -> pool   Ready, then per job Value or Error
    pool -> worker   Finish (clean up)       worker -> pool   Clean, or Error
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# What an operation of Gloo, NCCL or the store says when the process at its other end is gone.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|connection was likely closed"
    r"|socket (?:timeout|closed)|bad file descriptor|application timeout caused pair closure"
    r"|remote process exited|communicator was aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ready:
    """The process has started and waits for work."""


@dataclass(frozen=True)
class Job:
    """Run `payload`, a pickled (body, args, kwargs), as one of `world` ranks that meet under `meeting` in the store."""

    world: int
    meeting: str
    import_path: tuple[str, ...]
    payload: bytes


@dataclass(frozen=True)
class Finish:
    """Every rank has returned: forget what the body left behind, and leave the process group."""

    leave: bool = True


@dataclass(frozen=True)
class Value:
    """The pickled return value of a body."""

    payload: bytes


@dataclass(frozen=True)
class Error:
    """A body raised. `lost_peer`: it looks like the consequence of another rank's end."""

    headline: str
    text: str
    lost_peer: bool


@dataclass(frozen=True)
class Clean:
    """The process waits for the next job."""


class _ValuePickler(pickle.Pickler):
    """Pickles tensors as detached copies in host memory, so that the receiver needs no device and no process group."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if hasattr(value, "device_mesh"):
            raise TypeError("a body returned a DTensor; return `.to_local()` or `.full_tensor()` of it")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        # The clone drops what a view does not show of its storage.
        return value.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def dump_value(value: Any) -> bytes:
    """Pickles a body's return value; tensors in it arrive as detached CPU tensors."""
    out = io.BytesIO()
    _ValuePickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    return out.getvalue()


def serve(rank: int, pipe: Connection, store_port: int, stacks_path: str, backend: str) -> None:
    """Serves jobs as `rank` until the pool closes the pipe. SIGUSR1 writes every thread's stack to `stacks_path`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the pool, which ends its workers itself
    if hasattr(os, "SCHED_BATCH"):
        # A thread of Gloo that is woken does not preempt the one that holds the lock it would then spin on: collectives
        # of many ranks on few cores take half the processor time.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    stacks = open(stacks_path, "w")  # noqa: SIM115  (open for the life of the process: a signal handler writes to it)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  (what a killed rank printed is shown)
    if backend == "nccl":
        torch.backends.cudnn.allow_tf32 = False  # as matrix products are by default: references are compared tightly
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # CUDA starts before the first test does
    worker = _Worker(rank, dist.TCPStore("127.0.0.1", store_port, is_master=False), backend)
    gc.freeze()  # a full collection between tests takes 200 ms with torch's own objects in it, 1 ms without
    _send(pipe, Ready())
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        _send(pipe, worker.run(message) if isinstance(message, Job) else worker.finish(message.leave))
    os._exit(0)  # nothing of a worker is worth an orderly end, and threads of a process group could delay it


def _send(pipe: Connection, message: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(message))


def _leave_with_parent() -> None:
    # A rank blocked in a collective reads no pipe, and would outlive a killed test session.
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Worker:
    def __init__(self, rank: int, store: dist.Store, backend: str) -> None:
        self.rank = rank
        self.store = store
        self.backend = "gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}"  # as without an argument
        self.environment = dict(os.environ)
        self.directory = os.getcwd()
        self.filters = list(warnings.filters)
        self.modules_known = len(sys.modules)

    def run(self, job: Job) -> Value | Error:
        try:
            sys.path[:] = job.import_path
            body, args, kwargs = pickle.loads(job.payload)
            self._freeze_new_modules()
            self._reset()
            if not dist.is_initialized():
                dist.init_process_group(
                    self.backend,
                    store=dist.PrefixStore(job.meeting, self.store),
                    rank=self.rank,
                    world_size=job.world,
                    timeout=timedelta(hours=1),  # the pool cuts a hang, and shows all stacks; Gloo shows only its own
                )
            value = body(self.rank, job.world, *args, **kwargs)
            return Value(dump_value(value))
        except BaseException as error:  # also SystemExit, and pytest's outcomes, which are no Exceptions
            return _describe(error)

    def finish(self, leave: bool) -> Clean | Error:
        try:
            gc.collect()
            if leave and dist.is_initialized():
                dist.destroy_process_group()
            _clear_mesh_caches()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            return Clean()
        except BaseException as error:
            return _describe(error)

    def _freeze_new_modules(self) -> None:
        if len(sys.modules) != self.modules_known:
            gc.freeze()
            self.modules_known = len(sys.modules)

    def _reset(self) -> None:
        """Puts back what a body may have changed for the whole process."""
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        os.chdir(self.directory)
        warnings.filters[:] = self.filters
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        random.seed(0)
        torch.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(0)
            torch.cuda.reset_peak_memory_stats()


def _describe(error: BaseException) -> Error:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    headline = traceback.format_exception_only(type(error), error)[-1].strip().split("\n")[0]
    lost_peer = isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None
    return Error(headline, text, lost_peer)


def _clear_mesh_caches() -> None:
    """Clears what DTensor remembers per mesh.

    A mesh of the next test equals one of this test when their shapes do, so a remembered result would carry this
    test's mesh, and with it the names of process groups that no longer exist or, worse, now name other ranks.
    """

    def clear_all(_: Any = None) -> None:
        for clear in _mesh_caches():
            clear()

    clear_all()
    if torch.cuda.is_initialized():  # one of the caches is per thread, and backward runs in a thread of the device
        probe = torch.zeros((), device="cuda", requires_grad=True)
        probe.register_hook(clear_all)
        probe.backward()


_caches: tuple[int, list[Callable[[], None]]] = (0, [])


def _mesh_caches() -> list[Callable[[], None]]:
    global _caches
    if _caches[0] == len(sys.modules):
        return _caches[1]
    found: dict[int, Callable[[], None]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                members = list(vars(value).values()) if isinstance(value, type) else []
                for cache in (value, *members):
                    cache = getattr(cache, "__func__", cache)  # a staticmethod hides the cache it wraps
                    if not isinstance(cache, type) and callable(getattr(cache, "cache_clear", None)):
                        found[id(cache)] = cache.cache_clear
    for module, name in (
        ("debug", "_clear_python_sharding_prop_cache"),
        ("debug", "_clear_fast_path_sharding_prop_cache"),
        # Holds meshes, so that their process groups would live on, and the threads of these.
        ("_redistribute", "clear_redistribute_planner_cache"),
    ):
        clear = getattr(importlib.import_module(f"torch.distributed.tensor.{module}"), name, None)
        if clear is not None:  # not every version of torch has each of them
            found[len(found)] = clear
    _caches = (len(sys.modules), list(found.values()))
    return _caches[1]
