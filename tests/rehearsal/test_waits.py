"""Which unit compute waits for, from the command."""

import json

from flatshard.cli import main

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(5):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_waits_are_reported_by_unit(tmp_path, capfd):
    script, result = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    command = ["rehearse", "--world", "4", "--inside-latency", "3000", "--no-baseline", "--json", str(result)]
    status = main([*command, str(script)])
    printed, errors = capfd.readouterr()
    assert status == 0, errors
    waits = json.loads(result.read_text())["waits"]
    assert {"forward gather 0", "forward gather 2", "backward gather 0", "reduce 1"} <= set(waits)
    assert max(waits.values()) > 0.001  # a launch of 3 ms cannot hide behind four rows of compute
    assert "compute waited for" in printed
    assert "forward gather" in printed or "backward gather" in printed or "reduce" in printed
