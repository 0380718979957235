"""Run as one rank of a job that torchrun or srun started, or start the ranks on this machine."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from flatshard import _torch
from flatshard.buffer import Exchange
from flatshard.checkpoint import CheckpointError
from flatshard.checkpoint.errors import from_all_ranks, on_all_ranks
from flatshard.train.build import build_mesh
from flatshard.train.data import Text, load_text
from flatshard.train.environment import has_own_gpus, started_world
from flatshard.train.progress import run_with_display
from flatshard.train.settings import Mistake, TrainSettings, check_alike
from flatshard.train.stop import Stop
from flatshard.train.trainer import Trainer
from flatshard.trust.alarm import PeerError, alarm, leave

_PAUSE = 0.01  # seconds between two reads of the store


def run(settings: TrainSettings) -> int:
    """Train as one rank of a job that torchrun or srun started, or start the ranks here. Returns the exit status."""
    if started_world():
        return run_rank(settings)
    processes = settings.processes or torch.cuda.device_count() or 2
    settings.rows_per_rank(processes)
    _check_devices(settings, processes, torch.cuda.device_count())
    return _start(settings, processes)


def _check_devices(settings: TrainSettings, processes: int, count: int) -> None:
    """Mistake if steps are to be captured and not every process of this machine has a GPU."""
    if settings.capture and count < processes:
        raise Mistake(
            f"--capture: needs a GPU for each of the {processes} processes on this machine, which has {count}; leave "
            "--capture out, or give fewer --processes"
        )


def run_rank(settings: TrainSettings) -> int:
    """Train as the rank that torchrun's environment variables name. Returns the exit status, the same on all ranks.

    If a signal has ended the run, the status is 128 plus its number, as in shells.
    """
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    seen = torch.cuda.device_count()
    count = local_world if seen and has_own_gpus(os.environ) else seen
    kind = "cuda" if count >= local_world else "cpu"
    _check_devices(settings, local_world, count)
    if kind == "cuda":
        torch.cuda.set_device(local_rank % seen)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    patience = None if settings.timeout is None else timedelta(seconds=settings.timeout)
    trainer: Trainer | None = None
    try:
        init_process_group("nccl" if kind == "cuda" else "gloo", patience)
        text = _load_alike(settings)
        world = dist.get_world_size()
        mesh = build_mesh(settings, kind, world, int(os.environ.get("GROUP_WORLD_SIZE", world // local_world)))
        stop = Stop()
        trainer = Trainer(settings, text, mesh, stop)
        if threading.current_thread() is threading.main_thread():
            stop.listen()
        if dist.get_rank() == 0:
            run_with_display(trainer)
        else:
            for _ in trainer.steps():
                pass
            if settings.sample and not trainer.stopped:
                trainer.sample()
        if settings.export is not None and not trainer.stopped:
            trainer.export(settings.export)
        dist.destroy_process_group()
        return 128 + trainer.stopped if trainer.stopped else 0
    except (Mistake, CheckpointError) as mistake:  # raised on all ranks
        if dist.get_rank() == 0:
            print(f"flatshard train: {mistake}", file=sys.stderr, flush=True)
        dist.destroy_process_group()
        return 2
    except Exception as error:
        if not (isinstance(error, PeerError) or _torch.lost_a_peer(error)):
            raise
        _end_without_peer(settings, trainer, error)


def _load_alike(settings: TrainSettings) -> Text:
    """The data of the run. An error on all ranks if one of them cannot load it, or has other settings or data."""
    ranks = Exchange("control")
    check_alike(from_all_ranks(ranks, settings.common))
    text = on_all_ranks(ranks, lambda: load_text(settings), Mistake)
    check_alike(from_all_ranks(ranks, {"--data": text.fingerprint}))
    return text


def _end_without_peer(settings: TrainSettings, trainer: Trainer | None, error: Exception) -> NoReturn:
    """Print that another rank has failed or does not answer, and end this process."""
    where = "while it started" if trainer is None else f"in step {trainer.reached + 1}"
    folder = settings.checkpoint
    kept = "" if folder is None else f"; start the job again to continue from the newest checkpoint in {folder}"
    reason = str(error).strip().split("\n")[0]
    print(
        f"flatshard train: rank {os.environ['RANK']} ends {where}: another rank has ended or does not answer{kept}\n"
        f"  {type(error).__name__}: {reason}",
        file=sys.stderr,
        flush=True,
    )
    alarm.await_culprit()
    leave(1)  # an ordinary exit would wait for process groups, and NCCL may abort it meanwhile


def _start(settings: TrainSettings, processes: int) -> int:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="flatshard",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn",
        signals_to_handle="SIGHUP,SIGQUIT",  # `_Signals` passes SIGINT and SIGTERM on; ranks then end after a step
    )
    signals = _Signals()
    try:
        with _launching(signals):
            statuses = elastic_launch(config, _rank)(settings)
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except ChildFailedError as error:
        if signals.number:
            return 128 + signals.number
        # A killed rank reports no time and goes first: others fail because it is gone.
        killed = [(rank, failure) for rank, failure in error.failures.items() if failure.exitcode < 0]
        rank, failure = killed[0] if killed else error.get_first_failure()
        message: Any = failure.message
        if isinstance(message, dict):
            message = message.get("extraInfo", {}).get("py_callstack", message.get("message", ""))
        print(f"flatshard train: rank {rank} failed\n{message}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return max(int(status) for status in statuses.values())


class _Signals(Stop):
    """Passes SIGINT and SIGTERM on to the ranks. A second signal, more than a second later, kills them."""

    def __call__(self, number: int, frame: Any) -> None:
        again = self.record(number)
        for rank in multiprocessing.active_children():
            if rank.pid is not None:
                os.kill(rank.pid, signal.SIGKILL if again else number)


@contextmanager
def _launching(signals: _Signals) -> Iterator[None]:
    """A context to start ranks in: it silences the launcher's log and keeps Ctrl-C from ranks that are starting.

    A terminal sends SIGINT to every process. A process inherits the signal mask of the thread that starts it, so ranks
    start with SIGINT blocked, and unblock it when they can end without a traceback. This process still gets SIGINT:
    another thread receives it, and Python runs the handler in the main thread.
    """
    done = threading.Event()
    listener = threading.Thread(target=done.wait, daemon=True)
    listener.start()
    logging.disable(logging.ERROR)
    handlers = signals.listen()
    resource_tracker.ensure_running()  # Python would start it with the first rank, which would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
        done.set()
        listener.join()


def _rank(settings: TrainSettings) -> int:
    """Run one rank that `_start` has started."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return run_rank(settings)


def _leave(number: int, frame: Any) -> None:
    """End without a traceback; there is nothing to save yet. The terminal and the launcher may both send the signal."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def init_process_group(backend: str, patience: timedelta | None) -> None:
    """`torch.distributed.init_process_group`, for ranks that torchrun may have restarted.

    torchrun restarts ranks with the same store. It still has the addresses of the previous ranks, and a rank that
    starts early would connect to them (torch 2.4 and newer; pytorch issues 135712 and 167288).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=patience)
        return
    store, rank, world = next(rendezvous("env://", timeout=patience or default_pg_timeout))
    dist.init_process_group(
        backend, store=fresh_store(store, rank, world), rank=rank, world_size=world, timeout=patience
    )


def fresh_store(store: Store, rank: int, world: int) -> Store:
    """A part of the store with a new prefix, which all ranks that call this agree on. All ranks must call it.

    A count of restarts cannot be the prefix, because each node has its own count. Every rank writes a unique word.
    Rank 0 publishes the words that it has read, together with the prefix, until every rank has found its own word.
    """
    word = uuid.uuid4().hex
    others = range(1, world)
    if rank != 0:
        store.set(f"flatshard/word/{rank}", word)
        while True:
            common, heard = json.loads(store.get("flatshard/answer"))
            if heard[rank - 1] == word:
                break
            time.sleep(_PAUSE)
        store.set(f"flatshard/ready/{common}/{rank}", "")  # not in the part that ranks are about to use
    else:
        common = word
        while others:
            heard = [each.decode() for each in store.multi_get([f"flatshard/word/{other}" for other in others])]
            store.set("flatshard/answer", json.dumps([common, heard]))
            if store.check([f"flatshard/ready/{common}/{other}" for other in others]):
                break
            time.sleep(_PAUSE)
    return PrefixStore(f"flatshard/{common}", store)
