"""Running scripts and commands on the ranks of the pool, which have torch imported, as torchrun would start them."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import random
import runpy
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist


def free_port() -> int:
    """A port that nobody listens on: not of those that the system gives away, which Gloo may get in the meantime."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def as_script(rank: int, world: int, path: str, port: int) -> str:
    """A body for `ranks`: runs the script and returns what it printed. ``port`` is the same on all ranks."""
    return as_command(rank, world, port, lambda: runpy.run_path(path, run_name="__main__"))


def as_interpreter(path: Path, arguments: list[str], environment: dict[str, str], said: Path) -> None:
    """For a process of its own that has torch imported: ``python path arguments``, and what that says in a file."""
    os.environ.update(environment)
    output = os.open(said, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [str(path), *arguments]
    atexit._clear()
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # as an interpreter does, and after its threads have ended:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.exit(1)


def as_command(rank: int, world: int, port: int, call: Callable[[], Any]) -> str:
    """What ``call`` prints, on the CPU and with the environment that torchrun gives a rank."""
    dist.barrier()  # who leaves at once closes connections that others are still making
    dist.destroy_process_group()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    printed = io.StringIO()
    no_device = mock.patch("torch.accelerator.current_accelerator", return_value=None)
    no_cuda = mock.patch("torch.cuda.device_count", return_value=0)
    with no_device, no_cuda, contextlib.redirect_stdout(printed):
        call()
    return printed.getvalue()
