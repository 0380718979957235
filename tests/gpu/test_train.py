"""`flatshard train --capture` as a user starts it, on one GPU over NCCL: the losses are those of a run without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro")  # `flatshard train` needs it
_ROOT = Path(__file__).parents[2]
_SMALL = "--processes 1 --batch 4 --context 64 --warmup 2 --sample 8"
_TINY = f"{_SMALL} --width 64 --layers 3 --heads 4 --ffn 96"


def _train(flags: str, losses: Path, base: str = _TINY) -> tuple[str, list[dict[str, float]]]:
    command = [sys.executable, "-m", "flatshard", "train", *base.split(), *flags.split(), "--losses", str(losses)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout, [json.loads(line) for line in losses.read_text().splitlines()]


@pytest.mark.limit(300)
@pytest.mark.parametrize("more", ["", "--recompute --microbatches 2 --loss-chunk 64 --precision bfloat16"])
def test_captured_steps_have_the_losses_of_eager_ones(tmp_path, more):
    flags = f"--steps 12 --val-every 4 --val-rows 4 --sample-every 6 {more}"
    _, expected = _train(flags, tmp_path / "eager.jsonl")
    run = f"--checkpoint {tmp_path / 'run'} --save-every 3 --capture"
    _train(f"{flags} {run} --steps 7", tmp_path / "first.jsonl")
    printed, captured = _train(f"{flags} {run}", tmp_path / "captured.jsonl")
    assert "captured)" in printed.splitlines()[0]
    assert "continues after step 7" in printed
    assert [line["step"] for line in captured] == list(range(8, 13))
    _, whole = _train(f"{flags} --capture", tmp_path / "whole.jsonl")
    tolerance = 1e-2 if more else 1e-3
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in whole] == pytest.approx([line[name] for line in expected], rel=tolerance)
    assert [line["val_loss"] for line in whole if "val_loss" in line] == pytest.approx(
        [line["val_loss"] for line in expected if "val_loss" in line], rel=tolerance
    )


@pytest.mark.limit(300)
def test_a_model_of_transformers_is_captured_with_recompute(tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"--steps 8 --model {tmp_path} --recompute"
    losses = []
    for name, more in (("eager", ""), ("captured", "--capture")):
        _, log = _train(f"{flags} {more}", tmp_path / f"{name}.jsonl", _SMALL)
        losses.append([line["loss"] for line in log])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.limit(300)
def test_every_process_needs_a_gpu():
    command = [sys.executable, "-m", "flatshard", "train", *_TINY.replace("--processes 1", "--processes 2").split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run([*command, "--capture"], cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "flatshard train: --capture: needs a GPU for each of the 2 processes on this machine, which has 1; leave "
        "--capture out, or give fewer --processes"
    ]
