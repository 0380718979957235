"""NVIDIA's Multi-Process Service, for ranks that share one GPU.

Without it, kernels of two processes take turns of milliseconds, and a collective among ranks of one GPU takes as many
turns as it has ranks. With it they run side by side. A client that is killed while a kernel of it runs takes all other
clients of its service along: it is of no use any more then.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"


def is_available() -> bool:
    return shutil.which(_CONTROL) is not None


class Service:
    """A service that begins with this object. Processes that are started with `environment` are its clients."""

    is_whole = True  # until somebody knows better

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mps-"))
        pipes, logs = self._folder / "pipes", self._folder / "logs"
        pipes.mkdir()
        logs.mkdir()
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        # The daemon would hold on to a pipe of this process's output, also after that has been killed.
        command, silent = [_CONTROL, "-d"], subprocess.DEVNULL
        subprocess.run(command, env=os.environ | self.environment, check=True, stdout=silent, stderr=silent)

    def close(self) -> None:
        """End the service, after its clients have ended. One that has lost a client may not end when it is told to."""
        for found in (self._folder / "pipes").glob("*.pid"):
            control = int(found.read_text())
            servers = Path(f"/proc/{control}/task/{control}/children").read_text().split()
            for each in (control, *map(int, servers)):
                os.kill(each, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
