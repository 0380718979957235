"""Megatron-Core's GPTModel in Megatron-Core's own loop: by one process, by NVIDIA's Megatron-FSDP, and by flatshard.

    python -m tests.megatron.gpt --core CHECKOUT --out FOLDER                  ranks are CPU processes over Gloo
    python -m tests.megatron.gpt --core CHECKOUT SITE --out FOLDER --device cuda --mps --budget 540

``--core``: folders with the packages ``megatron`` and ``einops``, unless they are installed. On CUDA, all ranks share
the first GPU: each seems to be a host of its own to NCCL. Losses and norms of gradients are printed as a table, and
written to FOLDER/gpt.json after each group of cases; FOLDER has the ranks' output too. Exits with 1 if flatshard's
losses are not those of one process, or could not be had where NVIDIA's could.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts import mps
from tests.megatron.gpt_rank import CASES, layout_of

SYSTEMS = ("one process", "flatshard", "NVIDIA")  # the last one may have to wait for time that is left
START = 90.0  # seconds until ranks have imported Megatron-Core and know each other
_ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
_ROOT = Path(__file__).parents[2]


class Run:
    """All cases of all systems, within a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + options.budget
        self.found: dict[str, dict[str, Any]] = {name: {} for name in options.cases}
        self.service = mps.Service() if options.mps and mps.is_available() else None

    def all(self) -> None:
        """Cases of one layout share processes, and those after one that fails get new ones."""
        try:
            for system in self.options.systems:
                groups: dict[Any, list[str]] = {}
                for name in self.options.cases:
                    layout = 1 if system == SYSTEMS[0] else layout_of(CASES[name])
                    groups.setdefault(layout, []).append(name)
                for names in groups.values():
                    while names:
                        names = self.launch(system, names)
                        self.write()
        finally:
            if self.service is not None:
                self.service.close()

    def launch(self, system: str, names: list[str]) -> list[str]:
        """Run cases, in processes of their own; returns those that could not begin because one before has failed."""
        if time.monotonic() > self.end:
            for name in names:
                self.found[name][system] = {"error": "no time was left"}
            return []
        world = 1 if system == SYSTEMS[0] else CASES[names[0]]["ranks"]
        label = f"{system}-{world}-{names[0]}".replace(" ", "_").replace(",", "")
        results, logs = self.out / f"{label}.jsonl", [self.out / f"{label}-{rank}.log" for rank in range(world)]
        results.write_text("")
        processes = self._start(system, names, results, logs)
        done, told = 0, time.monotonic() + START
        error = ""
        while not error and any(process.poll() != 0 for process in processes):
            time.sleep(0.1)
            rows = [json.loads(line) for line in results.read_text().splitlines()]
            if len(rows) > done:
                done, told = len(rows), time.monotonic()
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed:
                time.sleep(1.0)  # in which other ranks may say something better
                error = _last_words([logs[rank] for rank in failed])
            elif time.monotonic() > min(told + self.options.limit, self.end + START):
                error = f"not done after {self.options.limit:.0f} s: {logs[0].name} has the stack"
        for process in processes:
            process.kill()
            process.wait()
        ready, *rows = [json.loads(line) for line in results.read_text().splitlines()] or [None]
        for row in rows:
            self.found[row.pop("case")][system] = row
        left = [name for name in names if system not in self.found[name]]
        if error:
            if self.service is not None:  # a client that was killed may have taken it along
                self.service.close()
                self.service = mps.Service()
            hit = left[:1] if ready else left  # without Megatron-Core itself there is no next case
            self.found.update({name: {**self.found[name], system: {"error": error}} for name in hit})
            left = left[len(hit) :]
        return left if error else []

    def _start(self, system: str, names: list[str], results: Path, logs: list[Path]) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        folders = [str(_ROOT), *(str(Path(folder).resolve()) for folder in self.options.core)]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        processes = []
        for rank, log in enumerate(logs):
            told = {
                "PYTHONPATH": path,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(logs)),
                "LOCAL_RANK": "0" if self.options.device == "cuda" else str(rank),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",  # there is nothing to fuse
            }
            if self.options.device == "cuda":
                told |= _ON_ONE_GPU | {"NCCL_HOSTID": f"rank{rank}"}
            told |= self.service.environment if self.service is not None else {}
            command = [sys.executable, "-W", "ignore", "-m", "tests.megatron.gpt_rank", system, self.options.device]
            command += [str(self.options.limit - 5), str(results), *names]
            with log.open("wb") as file:
                begun = subprocess.Popen(
                    command, env=os.environ | told, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT
                )
            processes.append(begun)
        return processes

    def write(self) -> None:
        document = {"torch": torch.__version__, "device": self.options.device, "cases": self.found}
        if self.options.device == "cuda":
            document["device"] = torch.cuda.get_device_name()
        (self.out / "gpt.json").write_text(json.dumps(document, indent=1) + "\n")


def _last_words(logs: list[Path]) -> str:
    for log in logs:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        said = [line for line in lines if "Error" in line or "Exception" in line]
        if said or lines:
            return f"{log.name}: {(said or lines)[-1]}"[:300]
    return "a rank ended without a word"


def distance(one: list[float], other: list[float]) -> float:
    return max((abs(a - b) / abs(a) for a, b in zip(one, other, strict=True)), default=float("inf"))


def is_equal(case: str, rows: dict[str, dict[str, Any]]) -> bool:
    """Losses as in one process, and after loading as before, nearly to the bit; norms as in one process or NVIDIA's.

    Norms are Megatron-Core's own. That of HFSDP is of one optimizer instance; that of the second version counts the
    squares of all gradients once per rank, with NVIDIA's too.
    """
    reference, row, theirs = rows[SYSTEMS[0]], rows["flatshard"], rows.get("NVIDIA", {})
    near = 2e-2 if CASES[case].get("bf16") else 2e-4
    again = distance(row["losses"], row.get("reloaded", row["losses"]))
    norms = [distance(known["norms"], row["norms"]) for known in (reference, theirs) if "norms" in known]
    is_whole = CASES[case].get("outer") != "optim" and CASES[case].get("version") != 2
    return distance(reference["losses"], row["losses"]) < near and again < 1e-5 and (not is_whole or min(norms) < near)


def verdicts(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Of flatshard, by case: ``equal``, ``different``, an error; ``-`` if it was skipped or NVIDIA's failed as well."""
    told = {}
    for case, rows in found.items():
        reference, row = rows.get(SYSTEMS[0], {}), rows.get("flatshard", {})
        if "losses" in reference and "losses" in row:
            told[case] = "equal" if is_equal(case, rows) else "different"
        else:
            lost = row.get("error") or reference.get("error") or "was not run"
            told[case] = "-" if "error" in rows.get("NVIDIA", {}) or "skipped" in row else lost
    return told


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'case':30}{'system':13}{'losses':38}{'off by':>10}{'norms off':>11}{'seconds':>9}"]
    for case, rows in found.items():
        for system, row in rows.items():
            if "losses" not in row:
                lines.append(f"{case:30}{system:13}{row.get('error') or row['skipped']}")
                continue
            reference = rows.get(SYSTEMS[0], {})
            off = [distance(reference[key], row[key]) if key in reference else 0.0 for key in ("losses", "norms")]
            losses = " ".join(f"{loss:8.5f}" for loss in row["losses"])
            lines.append(f"{case:30}{system:13}{losses:38}{off[0]:10.1e}{off[1]:11.1e}{row['seconds']:9.1f}")
            if "reloaded" in row:
                losses = " ".join(f"{loss:8.5f}" for loss in row["reloaded"])
                lines.append(f"{'':30}{'  reloaded':13}{losses:38}{distance(row['losses'], row['reloaded']):10.1e}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", nargs="*", default=[], help="folders for the path of ranks")
    parser.add_argument("--out", default="runs/gpt")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one case")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing new begins")
    parser.add_argument("--mps", action="store_true", help="ranks share the GPU by NVIDIA's Multi-Process Service")
    run = Run(parser.parse_args())
    run.all()
    print(table(run.found))
    told = verdicts(run.found)
    for case, verdict in told.items():
        print(f"{case}: {verdict}")
    sys.exit(any(verdict not in ("equal", "-") for verdict in told.values()))


if __name__ == "__main__":
    main()
