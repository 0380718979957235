"""The command `flatshard train` and the examples, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatshard.cli import main
from tests.bench.script import as_command, as_script, free_port

_ROOT = Path(__file__).parents[2]
_TINY = ["--batch", "4", "--context", "32", "--width", "32", "--layers", "2", "--ffn", "64", "--sample", "8"]
_TRAIN = [sys.executable, "-m", "flatshard.cli", "train", *_TINY]


def _start(command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **variables}
    return subprocess.Popen(
        command, cwd=_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_train_starts_its_own_processes_and_an_interrupt_ends_them_quietly():
    process = _start([*_TRAIN, "--steps", "100000"])
    try:
        assert "on 2 processes (cpu, float32)" in process.stdout.readline()
        line = process.stdout.readline()
        assert line.split()[:2] == ["step", "1/100000"]
        assert "tokens/s" in line
        assert "iB" in line
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert time.monotonic() - began < 20


def _train_here(rank, world, port):
    """As a rank that torchrun has started."""
    return as_command(rank, world, port, lambda: main(["train", *_TINY, "--steps", "3"]))


def test_train_runs_to_its_end_and_writes_a_sample(ranks):
    printed, *others = ranks(2, _train_here, free_port())
    assert not any(others)
    lines = printed.splitlines()
    assert "on 2 processes (cpu, float32)" in lines[0]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[4].startswith("loss 5.")
    assert lines[6].startswith("Once ")


def test_the_minimal_example_trains(ranks):
    printed = ranks(2, as_script, str(_ROOT / "examples" / "minimal.py"), free_port())
    losses = [float(line.split()[-1]) for line in printed[0].splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


@pytest.fixture
def short_file(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("too short")
    return file


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--data no/such/file", "--data no/such/file: No such file or directory"),
        ("--data {folder}", "--data {folder}: not a file"),
        ("--data {short}", "{short} has 9 bytes; --context 128 needs more than that"),
        ("--processes 3", "--batch 8 cannot be divided among 3 processes"),
        ("--processes 0", "--processes 0: must be at least 1"),
        ("--steps -1", "--steps -1: must be at least 1"),
        ("--lr nan", "--lr nan: must be more than 0"),
        ("--clip -1", "--clip -1.0: must be 0 or more"),
        ("--heads 3", "width 128 must be an even multiple of heads 3"),
        ("--kv-heads 3", "heads 4 must be a multiple of kv-heads 3"),
        ("--prompt=", "--prompt : must be at least one character"),
        ("--timeout 0", "--timeout 0: must be at least 1"),
        ("--losses {folder}", "--losses {folder}: Is a directory"),
        ("--losses {short}", "--losses {short}: not the log of a run"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--schedule square", "argument --schedule: invalid choice: 'square'"),
        ("--stepz 3", "flatshard train: unrecognized arguments: --stepz 3 (see flatshard train --help)"),
    ],
)
def test_bad_input_is_one_line(flags, expected, short_file, capsys):
    paths = {"folder": short_file.parent, "short": short_file}
    try:
        status = main(["train", *flags.format(**paths).split()])
    except SystemExit as left:
        status = left.code
    assert status == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert expected.format(**paths) in err


def test_under_torchrun_the_launcher_says_how_many(monkeypatch, capsys):
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--processes", "2"]) == 2
    assert "torchrun has started 4" in capsys.readouterr().err
    assert main(["train", "--batch", "6"]) == 2
    assert "cannot be divided among 4 processes" in capsys.readouterr().err
