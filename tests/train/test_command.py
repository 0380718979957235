"""The command `flatshard train` and the examples, as a user starts them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest

import flatshard
from flatshard.cli import main
from flatshard.train.progress import Reading
from flatshard.train.settings import TrainSettings, parse, read
from tests.bench.script import as_command, as_script, free_port

_ROOT = Path(__file__).parents[2]
_TINY = ["--batch", "4", "--context", "32", "--width", "32", "--layers", "2", "--ffn", "64", "--sample", "8"]
_TRAIN = [sys.executable, "-m", "flatshard.cli", "train", *_TINY]


def _start(command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **variables}
    return subprocess.Popen(
        command, cwd=_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_train_starts_its_own_processes_and_a_signal_lets_them_save_and_end(sent, status, tmp_path, capsys):
    run = tmp_path / "run"
    process = _start([*_TRAIN, "--steps", "100000", "--checkpoint", str(run)])
    try:
        assert "on 2 processes (cpu, float32)" in process.stdout.readline()
        line = process.stdout.readline()
        assert line.split()[:2] == ["step", "1/100000"]
        assert "tokens/s" in line
        assert "iB" in line
        process.send_signal(sent)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == status, err
    assert not err
    last = out.splitlines()[-1]
    reached = int(last.partition("after step ")[2].split()[0])
    assert last.endswith(f"continue with: flatshard train --config {run}/settings.yaml")
    assert (run / f"step-{reached}").is_dir()
    assert main(["train", *_TINY, "--checkpoint", str(run), "--lr", "0.5"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"flatshard train: {run} was trained with --lr 0.003, not 0.5; give the same flags, or another --checkpoint"
    ]


_BLOCKED = """
import multiprocessing, signal
from flatshard.train.launch import _launching, _Signals
with _launching(_Signals()):
    rank = multiprocessing.get_context("spawn").Process(target=print)
    rank.start()
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    rank.join()
"""


@pytest.mark.full
def test_ctrl_c_does_not_reach_a_rank_that_is_still_importing():
    done = subprocess.run([sys.executable, "-c", _BLOCKED], cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.full
def test_under_srun_the_tasks_of_a_step_join():
    """Two tasks with the variables that srun sets, on this machine as the only node."""
    number = free_port()
    step = {"SLURM_JOB_ID": str(number - 20000), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    command = [*_TRAIN, "--steps", "3", "--strategy", "hsdp"]
    tasks = [_start(command, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    try:
        (out, err), (other, more) = [task.communicate(timeout=300) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], err + more
    assert "on 2 processes (cpu, float32)" in out
    assert "step 3/3" in out
    assert [other, err, more] == ["", "", ""]


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
        ("--data {short}", "{short} has 9 bytes; --context 128 needs more: give a smaller --context, or more data"),
        ("--processes 3", "--batch 8: must be a multiple of the number of processes, 3"),
        ("--processes 0", "--processes 0: must be at least 1"),
        ("--steps -1", "--steps -1: must be at least 1"),
        ("--lr nan", "--lr nan: must be more than 0"),
        ("--clip -1", "--clip -1.0: must be 0 or more"),
        (
            "--in-backward",
            "--in-backward with --clip 1.0: gradients are freed before their norm is known; give --clip 0",
        ),
        ("--device-grads 1", "--device-grads without --offload: they all stay; leave it out"),
        ("--offload --in-backward --clip 0 --device-grads 1", "--device-grads with --in-backward: it frees gradients"),
        ("--device-grads -1", "--device-grads -1.0: must be 0 or more"),
        ("--in-backward --clip 0 --optimizer muon", "--in-backward with --optimizer muon: Muon needs the gradients"),
        ("--heads 3", "width 128: must be an even multiple of heads, 3"),
        ("--kv-heads 3", "heads 4: must be a multiple of kv-heads, 3"),
        ("--prompt=", "--prompt : must be at least one character"),
        ("--timeout 0", "--timeout 0: must be at least 1"),
        ("--seed 99999999999", "--seed 99999999999: must be 0 or more, and below 2^32"),
        ("--model {folder} --layers 12", "--layers with --model: the model has a shape of its own; leave it out"),
        ("--model {bpe}", "--model {bpe}: has vocab.json, but no tokenizer.json, which AutoTokenizer"),
        ("--replicas 2", "--replicas 2: only --strategy hsdp and hfsdp have replicas"),
        ("--strategy hsdp --replicas 3 --processes 4", "--replicas 3: must divide the number of processes, 4"),
        ("--rows --offload", "--rows with --offload"),
        ("--losses /dev/zero", "--losses /dev/zero: not a file"),
        ("--losses {folder}", "--losses {folder}: Is a directory"),
        ("--losses {short}", "--losses {short}: exists and is not the log of a run"),
        ("--losses {short}/losses", "--losses {short}/losses: Not a directory"),
        ("--checkpoint {short}", "--checkpoint {short}: not a folder"),
        ("--checkpoint {short}/run", "--checkpoint {short}/run: cannot be written to: Not a directory"),
        ("--config {folder}/none.yaml", "--config {folder}/none.yaml: No such file or directory"),
        ("--config", "--config: needs a file"),
        ("--config {typo}", "--config {typo}: unknown setting 'stepz'; did you mean steps?"),
        ("--config {far}", "--config {far}: unknown setting 7; `flatshard train --help` lists them"),
        ("--config {typed}", "--config {typed}: steps is 'many'; it must be of type int"),
        ("--config {choice}", "--config {choice}: schedule is 3; it must be one of cosine, constant"),
    ],
)
def test_bad_input_is_one_line(flags, expected, short_file, capsys):
    folder = short_file.parent
    paths = {"folder": folder, "short": short_file, "bpe": folder / "bpe"}
    paths["bpe"].mkdir()
    (paths["bpe"] / "vocab.json").write_text("{}")
    files = {"typo.yaml": "stepz: 3", "far.yaml": "7: 3", "typed.toml": 'steps = "many"', "choice.yaml": "schedule: 3"}
    for name, content in files.items():
        paths[Path(name).stem] = folder / name
        (folder / name).write_text(content)
    assert main(["train", *flags.format(**paths).split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert expected.format(**paths) in err


@pytest.mark.parametrize("flags", ["--steps many", "--schedule square", "--stepz 3"])
def test_flags_that_do_not_exist_are_named(flags, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", *flags.split()])
    assert left.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_settings_that_cannot_be_written_leave_the_file_of_before(tmp_path):
    path, before = tmp_path / "settings.yaml", TrainSettings(data=Path("some.txt"), steps=7)
    before.write(path)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            replace(before, steps=8).write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read(path) == before


def test_a_file_says_what_flags_leave_open(tmp_path):
    yaml, toml = tmp_path / "run.yaml", tmp_path / "run.toml"
    yaml.write_text("steps: 7\nlr: 1e-4\ndata: a.txt\nrecompute: true\nschedule: constant\n")
    toml.write_text('steps = 7\nlr = 1e-4\ndata = "a.txt"\nrecompute = true\nschedule = "constant"\n')
    expected = TrainSettings(steps=7, lr=1e-4, data=Path("a.txt"), recompute=True, schedule="constant", batch=2)
    for file in (yaml, toml):
        assert parse(["--batch", "2", "--config", str(file)]) == expected
    assert parse([f"--config={yaml}", "--steps", "9"]).steps == 9
    expected.write(tmp_path / "again.yaml")
    assert parse(["--config", str(tmp_path / "again.yaml")]) == expected


_WITHOUT_TORCH = """
import sys
from flatshard.cli import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        ("--version", 0, f"flatshard {flatshard.__version__}"),
        ("train --help", 0, "--config FILE"),
        ("train --steps 0", 2, "--steps 0: must be at least 1"),
        ("plan llama-9b --devices 8 --memory 80", 2, "must be one of llama-1b"),
        ("plan llama-8b --devices 8 --memory lots", 2, "--memory 'lots'"),
        ("rehearse --world 0 x.py", 2, "--world 0"),
        ("rehearse --world 2 no.py", 2, "script no.py does not exist"),
        ("rehearse --world 2 --tokens nan no.py", 2, "--tokens nan: must be more than 0, and finite"),
        ("report no.json --peak-tflops -1", 2, "--peak-tflops -1: must be more than 0, and finite"),
        ("run no.py", 2, "script no.py does not exist"),
        ("convert nothing there", 2, "nothing does not exist"),
        ("blame nowhere", 2, "nowhere"),
    ],
)
def test_arguments_are_answered_without_torch(arguments, status, expected):
    command = [sys.executable, "-c", _WITHOUT_TORCH, *arguments.split()]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m flatshard --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=_ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 141)  # it may have been faster
    assert not done.stderr


@pytest.mark.full
def test_a_run_whose_reader_leaves_ends_with_it():
    """At once, though the next line to print is minutes away."""
    command = " ".join([*_TRAIN, "--steps", "100000"])
    done = subprocess.run(
        f"{command} | head -2; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=_ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    assert done.returncode == 141
    assert len(done.stdout.splitlines()) == 2
    assert not done.stderr


@pytest.mark.full
def test_a_bar_fits_its_terminal_and_ctrl_c_in_it_saves(tmp_path):
    command = [
        *_TRAIN,
        "--steps",
        "100000",
        "--val-every",
        "2",
        "--val-rows",
        "4",
        "--checkpoint",
        str(tmp_path / "run"),
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(_ROOT)
        os.execve(command[0], command, {**os.environ, "PYTHONPATH": str(_ROOT), "TERM": "xterm"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown, asked = b"", 0
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # the other side has closed
            break
        if b"val " in shown and not asked:
            asked = os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode().replace("^C", ""))
    bars = [line for line in re.split(r"[\r\n]", plain) if "tokens/s" in line]
    assert bars
    for line in bars:
        assert 70 < len(line) <= 80
        assert re.search(r"\d+/100000 loss [\d.]+ .*tokens/s.* left [-\d]+:[-\d]+:[-\d]+", line), line
    last = plain.strip().splitlines()[-1]
    assert re.search(
        r"ended by Ctrl-C after step (\d+) of 100000, saved in .*/step-\1; continue with: flatshard train", last
    )


def test_a_reading_says_the_most_important_that_fits():
    reading = Reading(3, 2.5, 1234.0, 5e12, 3 << 30, None, 2.25, 3)
    assert str(reading) == "loss 2.500  val 2.250   1,234 tokens/s  5.0 TFLOP/s  3.0 GiB"
    assert reading.within(40) == "loss 2.500  val 2.250   1,234 tokens/s"
    assert reading.within(5) == "loss 2.500"
    assert str(replace(reading, step=5)).startswith("loss 2.500  val 2.250 (step 3) "), "it is not of this step"


def test_under_torchrun_the_launcher_says_how_many(monkeypatch, capsys):
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--processes", "2"]) == 2
    assert "torchrun or srun has started 4" in capsys.readouterr().err
    assert main(["train", "--batch", "6"]) == 2
    assert "must be a multiple of the number of processes, 4" in capsys.readouterr().err
