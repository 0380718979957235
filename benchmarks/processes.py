"""Run a function on W real processes of this machine, and get what each returned."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(world: int, body: Callable[..., Any], *args: Any, gloo: bool = True) -> list[Any]:
    """``body(rank, world, *args)`` on each process, one compute thread each; ``gloo`` joins them in a process group."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_main, args=(rank, world, port if gloo else None, queue, body, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    while len(results) < world:
        try:
            rank, result = queue.get(timeout=1)
            results[rank] = result
        except Empty:
            # a rank that raised has said so; one that died cannot, and the others may wait for it forever
            dead = [rank for rank, process in enumerate(processes) if rank not in results and process.exitcode]
            if dead:
                for process in processes:
                    process.kill()
                raise RuntimeError(f"rank {dead[0]} of {world} ended with {processes[dead[0]].exitcode}") from None
    for process in processes:
        process.join()
    errors = [value for value in results.values() if isinstance(value, Exception)]
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def _main(rank: int, world: int, port: int | None, queue: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        if port is not None:
            dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world)
        result = body(rank, world, *args)
        if port is not None:
            dist.destroy_process_group()
    except Exception as error:
        result = error
    queue.put((rank, result))
