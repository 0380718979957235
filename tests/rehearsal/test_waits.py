"""Which unit compute waits for, from the command."""

import json
import subprocess
import sys

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

from flatshard import fully_shard

dist.init_process_group()
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_waits_are_reported_by_unit(tmp_path):
    script, result = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "flatshard.cli", "rehearse", "--world", "4", "--inside-latency", "3000"]
    command += ["--no-baseline", "--json", str(result), str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    waits = json.loads(result.read_text())["waits"]
    assert {"forward gather 0", "forward gather 2", "backward gather 0", "reduce 1"} <= set(waits)
    assert max(waits.values()) > 0.001  # a launch of 3 ms cannot hide behind four rows of compute
    assert "compute waited for" in run.stdout
    assert "forward gather" in run.stdout or "backward gather" in run.stdout or "reduce" in run.stdout
