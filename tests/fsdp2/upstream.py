"""PyTorch's own tests of FSDP2 on CPU ranks: with FSDP2 as it is, and after `flatshard.install()`.

    python -m tests.fsdp2.upstream FOLDER [FILE ...]

FOLDER is `test/distributed/_composable/fsdp` of PyTorch's sources, of release 2.6. The tests are made for GPUs: copies
of them, whose devices are CPUs, are run by pytest in a temporary folder, file by file. Printed is every test that
passes with FSDP2 and not with flatshard, or the other way round, and how many there are. The package `expecttest` must
be installed. It takes half an hour on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import flatshard

# Ranks for the tests of a file, where they need more than two; files that measure streams, memory or compilers of GPUs.
_RANKS = {"clip_grad_norm_": 4, "grad_scaler": 4, "state_dict": 4}
_LEFT_OUT = ("memory", "overlap", "compile", "logging")
_WIDE = "3d_mlp"  # a test that needs eight

_CHANGES = [
    (r'torch\.device\("cuda", torch\.cuda\.current_device\(\)\)', 'torch.device("cpu")'),
    (r'torch\.device\("cuda", [^()]*\)', 'torch.device("cpu")'),
    (r'f"cuda:\{self\.rank\}"', '"cpu"'),
    (r'"cuda(:0)?"', '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"torch\.cuda\.device_count\(\)", "as_cpu.COUNT"),
    (r"torch\.cuda\.current_device\(\)", "'cpu'"),
    (r"torch\.cuda\.", "as_cpu.cuda."),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
    (r"from torch\.testing\._internal\.common_cuda import TEST_CUDA\n", "TEST_CUDA = True\n"),
    (r"GradScaler\(init_scale", 'GradScaler("cpu", init_scale'),
    # what has other names, or more results, since 2.6
    (r"_dim_group_infos", "_dim_group_names"),
    (r"test_compiled_fsdp", "compiled_fsdp_test"),
    (r"get_cycles_per_ms\(\)", "1"),
    (r"predivide_factor, postdivide_factor = _get", "predivide_factor, postdivide_factor, *_ = _get"),
]

_HEAD = """import os
import as_cpu
if os.environ.get("ON_FLATSHARD"):
    import flatshard
    flatshard.install()
"""

_AS_CPU = '''"""What tests ask of torch.cuda, and how many ranks they have."""
import os
import types

import torch
import torch.testing._internal.common_distributed as common

COUNT = int(os.environ["RANKS"])


class Event:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def nothing(*args, **kwargs):
    return None


cuda = types.SimpleNamespace(
    set_device=nothing, synchronize=nothing, _sleep=nothing, empty_cache=nothing, is_available=lambda: True,
    memory_reserved=lambda *args: 0, Event=Event, Stream=torch.cpu.Stream, stream=torch.cpu.stream,
    current_stream=torch.cpu.current_stream, manual_seed=torch.manual_seed,
)
common.skip_if_lt_x_gpu = lambda count, *, allow_cpu=False: lambda test: test
import torch.testing._internal.common_fsdp as fsdp

fork = torch.multiprocessing.get_context("fork").Process
common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
del fsdp.FSDPTest._run
fsdp.DEVICE_COUNT = 4
'''


def rewrite(source: str) -> str:
    """A test file for CPUs."""
    for pattern, replacement in _CHANGES:
        source = re.sub(pattern, lambda _, new=replacement: new, source)
    return _HEAD + source


def run(folder: Path, file: str, ours: bool) -> set[str]:
    """The names of the tests of a file that pass."""
    found: set[str] = set()
    for ranks, chosen in ((_RANKS.get(file, 2), f"not {_WIDE}"), (8, _WIDE)):
        if ranks == 8 and file != "training":
            continue
        root = Path(flatshard.__file__).parent.parent
        environment = os.environ | {"RANKS": str(ranks), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])}
        environment |= {"FLATSHARD_VALUES": "own"}  # ranks of these tests begin with values of their own
        if ours:
            environment["ON_FLATSHARD"] = "1"
        ends = _pytest(folder, environment, f"test_fully_shard_{file}.py", "-k", chosen)
        if ends is None:  # a test has taken the process with it: each in its own
            listed = _output(folder, environment, f"test_fully_shard_{file}.py", "-k", chosen, "--collect-only").stdout
            ends = set()
            for test in re.findall(r"^test_\S+::\S+", listed, re.MULTILINE):
                ends |= _pytest(folder, environment, test) or set()
        found |= ends
    return found


def _pytest(folder: Path, environment: dict[str, str], *chosen: str) -> set[str] | None:
    """The names of the tests that pass; None if a signal ended the process."""
    done = _output(folder, environment, *chosen)
    if done.returncode < 0:
        return None
    if done.returncode not in (0, 1, 5):
        raise RuntimeError(f"{chosen}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return set(re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.MULTILINE))


def _output(folder: Path, environment: dict[str, str], *chosen: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=no"]
    return subprocess.run([*command, *chosen], cwd=folder, env=environment, capture_output=True, text=True)


def main(folder: str, *only: str) -> None:
    theirs_only: list[str] = []
    totals = [0, 0, 0]
    with tempfile.TemporaryDirectory() as place:
        copies = Path(place)
        copies.joinpath("as_cpu.py").write_text(_AS_CPU)
        for path in sorted(Path(folder).glob("test_fully_shard_*.py")):
            file = path.stem.removeprefix("test_fully_shard_")
            if file in _LEFT_OUT or (only and file not in only):
                continue
            copies.joinpath(path.name).write_text(rewrite(path.read_text()))
            theirs, ours = (run(copies, file, ours=ours) for ours in (False, True))
            for count, names in enumerate((theirs, theirs & ours, ours - theirs)):
                totals[count] += len(names)
            theirs_only += sorted(theirs - ours)
            print(f"{file}: {len(theirs)} pass with FSDP2, {len(theirs & ours)} of them and", end=" ")
            print(f"{len(ours - theirs)} others with flatshard", *sorted(ours - theirs), flush=True)
    print(f"{totals[0]} pass with FSDP2, {totals[1]} of them and {totals[2]} others with flatshard. Not:", *theirs_only)


if __name__ == "__main__":
    main(*sys.argv[1:])
