"""Megatron-Core's GPTModel in Megatron-Core's own loop; `tests.megatron.gpt` is the command, with NVIDIA's beside."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.gpt import table, verdicts
from tests.megatron.gpt_rank import CASES

ROOT = Path(__file__).parents[2]
SOME = ["optim_grads_params", "gated, bf16, checkpoint", "EP 2"]
MISSING = [name for name in ("megatron", "einops") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.limit(1200)
def test_losses_are_those_of_one_process(request, tmp_path):
    cases = list(CASES) if request.config.getoption("--full") else SOME
    command = [sys.executable, "-m", "tests.megatron.gpt", "--out", str(tmp_path), "--limit", "120"]
    command += ["--systems", "one process", "flatshard", "--cases", *cases]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def _row(*losses, **further):
    return {"losses": list(losses), "norms": list(losses), "seconds": 1.0, **further}


def test_what_counts_as_equal():
    one, lost = {"one process": _row(4.0, 2.0)}, {"error": "lost"}
    found = {
        "optim": {**one, "NVIDIA": lost, "flatshard": _row(4.0, 2.0001)},
        "no_shard": {**one, "flatshard": _row(4.0, 2.1)},
        "gated, bf16, checkpoint": {**one, "flatshard": _row(4.0, 2.01, reloaded=[4.0, 2.02])},
        "TP 2": {**one, "NVIDIA": _row(4.0, 2.0), "flatshard": lost},
        "EP 2": {**one, "NVIDIA": lost, "flatshard": lost},
        "HSDP": {"one process": lost, "flatshard": _row(4.0, 2.0)},
        "4 ranks": {},
    }
    said = ["equal", "different", "different", "lost", "-", "lost", "was not run"]
    assert verdicts(found) == dict(zip(found, said))
    assert "5.0e-05" in table(found)
