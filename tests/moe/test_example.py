"""The example trains: on four ranks, its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.limit(600)
def test_the_example_of_a_mixture_trains():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    run = subprocess.run(
        [*torchrun, "examples/moe.py"], cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-2000:]
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    assert "same 2" in run.stdout
