"""Upstream test suites with flatshard in the place of what they test.

    python scripts/upstream.py run fsdp2 CHECKOUT --out FOLDER       PyTorch's tests of FSDP2
    python scripts/upstream.py run megatron CHECKOUT --out FOLDER    Megatron-LM's tests of Megatron-FSDP
    python scripts/upstream.py compare FOLDER

CHECKOUT is a checkout of PyTorch, of the version that is installed, or of Megatron-LM. Nothing is written to it. `run`
runs the suite twice: the control (FSDP2, or NVIDIA's megatron_fsdp), then flatshard. All ranks share device 0 of a
machine with one GPU; with `--device cpu` they are CPU ranks over Gloo. Every result is written when it comes, to
`FOLDER/SUITE-control.jsonl` and `FOLDER/SUITE-flatshard.jsonl`, one line of JSON per test. What the control skips is
not run with flatshard.

PyTorch's tests need the package `expecttest`; `--path` adds folders of packages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import mps

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent
_SYSTEMS = ("control", "flatshard")
_FILES = {
    "fsdp2": ("test/distributed/_composable/fsdp",),
    "megatron": (
        "tests/unit_tests/distributed/mfsdp_v1",
        "tests/unit_tests/distributed/mfsdp_v2",
        "tests/unit_tests/distributed/megatron_fsdp",
        "tests/unit_tests/transformer/test_fsdp_dtensor_checkpoint.py",
    ),
}
# The conftest.py of Megatron-LM's unit tests downloads data for other tests.
_OPTIONS = {"fsdp2": ["--noconftest"], "megatron": ["--confcutdir=tests/unit_tests/distributed"]}
_ENVIRONMENT = {
    "FLATSHARD_VALUES": "own",  # ranks of these tests begin with values of their own
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run upstream test suites: the control, then flatshard.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a suite")
    run.add_argument("suite", choices=sorted(_FILES))
    run.add_argument("checkout", type=Path, help="a checkout of PyTorch or Megatron-LM")
    run.add_argument("tests", nargs="*", help="files or tests of it, relative to it (default: the suite)")
    run.add_argument("--out", type=Path, required=True, help="a folder for the results")
    run.add_argument("--systems", nargs="+", choices=_SYSTEMS, default=list(_SYSTEMS))
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--backend", choices=("nccl", "gloo"), help="what carries collectives (default: of the device)")
    run.add_argument("--devices", type=int, default=4, help="how many devices the tests see (default: 4)")
    run.add_argument("--jobs", type=int, default=8, help="how many tests, or pools of ranks, run at once (default: 8)")
    run.add_argument("--limit", type=float, default=60, help="seconds for one test (default: 60)")
    run.add_argument("--total", type=float, default=0, help="seconds for one system; tests left over are not run")
    run.add_argument("--mps", action="store_true", help="let ranks share the device by NVIDIA's Multi-Process Service")
    run.add_argument("--path", action="append", default=[], type=Path, help="a folder of packages that tests import")
    run.add_argument("--resume", action="store_true", help="keep the results in the folder; run what they lack")
    run.add_argument("-k", default="", help="tests whose names match, as with pytest")
    compare = commands.add_parser("compare", help="what the control passes and flatshard does not")
    compare.add_argument("folder", type=Path)
    compare.add_argument("--all", action="store_true", help="also list what neither passes, with the control's errors")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if arguments.command == "compare":
        compare(arguments.folder, arguments.all)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.mps and not mps.is_available():
        raise SystemExit("--mps: there is no nvidia-cuda-mps-control here")
    with tempfile.TemporaryDirectory(prefix="upstream") as folder:
        Path(folder, "flatshard").symlink_to(_ROOT / "flatshard")  # the package without the `tests` beside it
        for system in arguments.systems:
            _run(arguments, system, folder)
    compare(arguments.out)


def _run(arguments: argparse.Namespace, system: str, packages: str) -> None:
    """One suite with one system, in a process that imports the tests once and forks those that run them."""
    checkout = arguments.checkout.resolve()
    chosen = arguments.tests or [each for each in _FILES[arguments.suite] if (checkout / each).exists()]
    if not chosen:
        raise SystemExit(f"{checkout} has none of {', '.join(_FILES[arguments.suite])}")
    results = arguments.out.resolve() / f"{arguments.suite}-{system}.jsonl"
    control = read(arguments.out / f"{arguments.suite}-control.jsonl") if system != "control" else {}
    left_out = {test for test, each in control.items() if each["outcome"] == "skipped"}
    if arguments.resume:
        left_out |= read(results).keys()
    else:
        results.write_text("")
    settings = {
        "suite": arguments.suite,
        "system": system,
        "device": arguments.device,
        "backend": arguments.backend or {"cuda": "nccl", "cpu": "gloo"}[arguments.device],
        "devices": arguments.devices,
        "jobs": arguments.jobs,
        "limit": arguments.limit,
        "total": arguments.total,
        "mps": arguments.mps,
        "results": str(results),
        "logs": packages,
        "left_out": sorted(left_out),
    }
    paths = [checkout, *(path.resolve() for path in arguments.path), packages, _HERE]
    environment = os.environ | _ENVIRONMENT | {"UPSTREAM": json.dumps(settings)}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "upstream_plugin"]
    command += ["-c", os.devnull, f"--rootdir={checkout}", "-W", "ignore", *_OPTIONS[arguments.suite]]
    # Rank threads of torch 2.11 end with an error in its test harness, which is none of the test.
    command += ["-p", "no:threadexception"]
    command += ["-k", arguments.k] if arguments.k else []
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    subprocess.run([*command, *chosen], cwd=checkout, env=environment)
    outcomes = Counter(each["outcome"] for each in read(results).values())
    print(f"{arguments.suite}, {system}:", ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common()))


def read(path: Path) -> dict[str, dict[str, str]]:
    """Results by test."""
    if not path.exists():
        return {}
    return {each["test"]: each for each in map(json.loads, path.read_text().splitlines())}


def compare(folder: Path, everything: bool = False) -> None:
    """Print how many tests the control passes, how many of them flatshard, and the others with their errors."""
    for suite in _FILES:
        control, ours = (read(folder / f"{suite}-{system}.jsonl") for system in _SYSTEMS)
        if not control:
            continue
        passed = [test for test, each in control.items() if each["outcome"] == "passed"]
        ran = [test for test in passed if test in ours]
        others = [test for test in ran if ours[test]["outcome"] != "passed"]
        more = [test for test, each in ours.items() if each["outcome"] == "passed" and test not in set(passed)]
        print(f"{suite}: the control passes {len(passed)} of {len(control)} tests, flatshard {len(ran) - len(others)}")
        if ours and len(ran) < len(passed):
            print(f"  {len(passed) - len(ran)} of these were not run with flatshard")
        for test in others:
            print(f"  {_short(test)}: {ours[test]['outcome']}: {ours[test]['error']}")
        if more:
            print("  passed by flatshard alone:", ", ".join(map(_short, more)))
        for test, each in control.items() if everything else ():
            if each["outcome"] != "passed":
                print(f"  control: {_short(test)}: {each['outcome']}: {each['error']}")


def _short(test: str) -> str:
    return test.rpartition("/")[2]


if __name__ == "__main__":
    main()
