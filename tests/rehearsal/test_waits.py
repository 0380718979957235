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
    recorded, page, trace = (tmp_path / name for name in ("record.json", "page.html", "trace.json"))
    command = ["rehearse", "--world", "4", "--inside-latency", "3000", "--no-baseline", "--json", str(result)]
    command += ["--record", str(recorded)]
    status = main([*command, str(script)])
    printed, errors = capfd.readouterr()
    assert status == 0, errors
    waits = json.loads(result.read_text())["waits"]
    assert {"forward gather 0", "forward gather 2", "backward gather 0", "reduce 1"} <= set(waits)
    assert max(waits.values()) > 0.001  # a launch of 3 ms cannot hide behind four rows of compute
    assert "compute waited for" in printed
    assert "forward gather" in printed or "backward gather" in printed or "reduce" in printed

    # The same, as a report.
    record = json.loads(recorded.read_text())
    assert len(record["steps"]) == 2
    # By their beginnings: a thread notes the ends, and may do so a moment after those who waited for them went on.
    spans = [span for span in record["spans"] if span["begin"] < record["steps"][0]["end"]]
    gathers = [span["unit"] for span in spans if span["lane"] == "gather"]
    # Of three units, the last of forward is gathered once more in backward, as all are whose weights are released.
    assert sorted(gathers) == ["0", "0", "1", "1", "2", "2"]
    assert sorted(span["unit"] for span in spans if span["lane"] == "reduce") == ["0", "1", "2"]
    computed = [(span["kind"], span["unit"]) for span in spans if span["lane"] == "compute" and span["unit"] in "012"]
    assert list(dict.fromkeys(each for each in computed if each[1])) == [
        *(("forward", unit) for unit in "012"),
        *(("backward", unit) for unit in "210"),
    ]
    assert all(span["begin"] <= span["end"] for span in record["spans"])
    assert [unit["unit"] for unit in record["units"]] == ["0", "1", "2"]
    one = 64 * 65 * 4
    assert max(sample["gathered"] for sample in record["memory"]) == 2 * one  # the one in use, and one ahead
    gradients = [sample["gradients"] for sample in record["memory"]]
    assert (min(gradients), max(gradients)) == (0, 3 * one // 4)  # a rank's part, until zero_grad
    assert main(["report", str(recorded), str(recorded), "-o", str(page), "--trace", str(trace)]) == 0
    assert page.read_text().count("h100-nvlink with own numbers") == 2
    events = json.loads(trace.read_text())["traceEvents"]
    named = [event["name"] for event in events if event["ph"] == "X"]
    assert len([name for name in named if name.startswith("all_gather")]) == len(
        [span for span in record["spans"] if span["kind"] == "all_gather"]
    )
    assert "waits: forward 0" in named
