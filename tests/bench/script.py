"""Running a script on the ranks of the pool, which have torch imported, as torchrun would start it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
from unittest import mock

import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def as_script(rank: int, world: int, path: str, port: int) -> str:
    """A body for `ranks`: runs the script on the CPU and returns what it printed. ``port`` is the same on all ranks."""
    dist.destroy_process_group()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    printed = io.StringIO()
    no_device = mock.patch("torch.accelerator.current_accelerator", return_value=None)
    with no_device, contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
