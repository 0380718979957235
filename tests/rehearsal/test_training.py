"""Training code that knows nothing of rehearsal runs under it: DDP, FSDP2, device meshes, scripts."""

import contextlib
import io
import json
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flatshard.cli import main
from flatshard.rehearsal import current, rehearse
from flatshard.rehearsal.run import _child


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 8))


def train(model, steps=4, fused=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 32)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_ddp_trains_as_one_process_does():
    expected = train(build())
    with rehearse(8, "h100-nvlink"):
        assert train(nn.parallel.DistributedDataParallel(build())) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_fsdp2_runs_and_stays_finite(shape):
    with rehearse(8, "h100-ib400", ranks_per_node=4) as rehearsal:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = build()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # DTensor has no rule of its own for a fused SGD
        losses = train(fully_shard(model, mesh=mesh, mp_policy=policy), steps=5, fused=False)
    assert losses[-1] < losses[0]
    report = rehearsal.report()
    shards = shape[-1]
    size = 2 * (3 * (32 * 32 + 32) + 32 * 8 + 8)  # bf16 bytes of all units
    assert report.steps == 3
    assert report.traffic["all_gather"]["bytes"] == 2 * size
    assert report.traffic["reduce_scatter"]["bytes"] == size
    assert ("all_reduce" in report.traffic) == (len(shape) == 2)
    assert report.memory["parameters"] == 2 * size / shards
    assert report.memory["gradients"] == report.memory["parameters"]


def test_any_backend_name_is_accepted_and_the_environment_is_torchruns(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with rehearse(16, rank=9) as rehearsal:
        dist.init_process_group("nccl", device_id=torch.device("cpu"))
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (9, 16, "rehearsal")
        assert dist.get_backend(dist.new_group([8, 9], backend="gloo")) == "rehearsal"
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        assert dist.get_world_size() == 16
        assert current() is rehearsal
    assert not dist.is_initialized()
    assert current() is None


def test_explicit_marks_replace_optimizer_steps():
    with rehearse(2) as rehearsal:
        train(build(), steps=3)
        for _ in range(4):
            train(build(), steps=2)
            rehearsal.mark_step(tokens=100, flops=1e9)
    report = rehearsal.report()
    assert report.steps == 2
    assert report.tokens_per_step == 100
    assert report.to_dict()["derived"]["world_tokens_per_second"] == pytest.approx(200 / report.median)


def test_too_few_steps_are_said():
    with rehearse(2) as rehearsal:
        train(build(), steps=2)
    with pytest.raises(RuntimeError, match="run more steps"):
        rehearsal.report()


def test_needs_its_network(monkeypatch):
    with pytest.raises(ValueError, match="rank=4: must be from 0 to 3"), rehearse(4, rank=4):
        pass
    with (
        rehearse(2, "free"),
        pytest.raises(RuntimeError, match="a process group already exists"),
        rehearse(2, "free"),
    ):
        pass


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(int(sys.argv[1])):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained on", dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.fixture
def here(monkeypatch):
    """Scripts run in this process: most of what one of its own does is to import torch. test_waits.py has one."""

    def run(command, stdout):
        assert command[:-2] == [sys.executable, "-m", "flatshard.rehearsal.run"]
        code = 0
        with contextlib.redirect_stdout(io.StringIO()) if stdout else contextlib.nullcontext():
            try:
                _child(*command[-2:])
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])


def test_command_line(tmp_path, capfd, here):
    script, result = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(textwrap.dedent(SCRIPT))
    command = ["rehearse", "--world", "512", "--network", "h100-ib400", "--between-latency", "20000"]
    status = main([*command, "--json", str(result), "--tokens", "4", str(script), "6"])
    printed, errors = capfd.readouterr()
    assert status == 0, errors
    assert printed.count("trained on 512") == 1
    assert "all_reduce" in printed
    derived = json.loads(result.read_text())["derived"]
    assert derived["wire_seconds"] == pytest.approx(20e-3, rel=0.01)
    assert "exposed_seconds" in derived  # how many they are depends on how busy this machine is
    assert derived["tokens_per_second"] == pytest.approx(4 / derived["step_seconds_median"])


def test_a_script_that_fails_fails_the_command(tmp_path, here):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    assert main(["rehearse", "--world", "2", str(script)]) == 3
