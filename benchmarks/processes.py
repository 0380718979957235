"""Run a function on W real processes of this machine, and get what each returned."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

# With a name of its own for its host, NCCL lets several ranks have one GPU; they meet over sockets.
_ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def on_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    gloo: bool = True,
    device: str = "cpu",
    seconds: float | None = None,
) -> list[Any]:
    """``body(rank, world, *args)`` on each process, one compute thread each; ``gloo`` joins them in a process group.

    ``device="cuda"``: all of them use the first GPU, and NCCL. After ``seconds``, or soon after one of them has raised,
    those that are left are killed; they say where they were.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_main, args=(rank, world, port if gloo else None, device, seconds, queue, body, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    end = None if seconds is None else time.monotonic() + seconds + 2
    while len(results) < world:
        try:
            rank, result = queue.get(timeout=1)
            results[rank] = result
            if isinstance(result, Exception) and end is not None:
                end = min(end, time.monotonic() + 3)
        except Empty:
            if end is not None and time.monotonic() > end:
                for process in processes:
                    process.kill()
                errors = [value for value in results.values() if isinstance(value, Exception)]
                raise errors[0] if errors else TimeoutError(f"{world} ranks, not done after {seconds} s") from None
            # a rank that raised has said so; one that died cannot, and the others may wait for it forever
            dead = [rank for rank, process in enumerate(processes) if rank not in results and process.exitcode]
            if dead:
                for process in processes:
                    process.kill()
                raise RuntimeError(f"rank {dead[0]} of {world} ended with {processes[dead[0]].exitcode}") from None
    for process in processes:
        process.join(None if end is None else max(1.0, end - time.monotonic()))
        process.kill()
    errors = [value for value in results.values() if isinstance(value, Exception)]
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def _main(
    rank: int,
    world: int,
    port: int | None,
    device: str,
    seconds: float | None,
    queue: Any,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        if device == "cuda":
            os.environ.update(_ON_ONE_GPU, NCCL_HOSTID=f"rank{rank}")
            torch.cuda.set_device(0)
        if port is not None:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"tcp://localhost:{port}", rank=rank, world_size=world)
        result = body(rank, world, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        result = error
    queue.put((rank, result))
