"""Rehearse an unmodified script: once on the modelled network and once on a free one, each in a separate process."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flatshard._recording import recording
from flatshard.rehearsal.network import FREE, Link, Network
from flatshard.rehearsal.report import Report


@dataclass(frozen=True)
class ScriptRun:
    """A script and its rehearsal.  ``script``: a path, or a module name if ``is_module``; see :func:`rehearse`."""

    world: int
    network: Network
    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    rank: int = 0
    warmup: int = 2
    tokens: float | None = None
    flops: float | None = None
    record: str | None = None  # a file to write, for `flatshard report`


class ScriptFailed(Exception):
    """The script ended with an exit status other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the rehearsed script ended with exit status {code}")
        self.code = code


def rehearse_script(run: ScriptRun, baseline: bool = True) -> Report:
    """Run the script to its end and report.  With ``baseline`` it runs again, silently, on a free network.

    ValueError if it ran too few steps, ScriptFailed if it failed.
    """
    report = _run(run, quiet=False)
    if baseline:
        free = replace(FREE, ranks_per_node=run.network.ranks_per_node)
        report.free_network_seconds = _run(replace(run, network=free, record=None), quiet=True).step_seconds
    if run.record is not None:
        path = Path(run.record)
        path.write_text(json.dumps({**json.loads(path.read_text()), "rehearsal": report.to_dict()}))
    return report


def _run(run: ScriptRun, quiet: bool) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path, result = Path(folder, "run.json"), Path(folder, "report.json")
        path.write_text(json.dumps(asdict(run)))
        command = [sys.executable, "-m", "flatshard.rehearsal.run", str(path), str(result)]
        code = subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None).returncode
        if code:
            raise ScriptFailed(code)
        data = json.loads(result.read_text())
    if "missing" in data:
        raise ValueError(f"{run.script}: {data['missing']}")
    report = Report.from_dict(data)
    if report.tokens_per_step is None:
        report.tokens_per_step = run.tokens
    if report.flops_per_step is None:
        report.flops_per_step = run.flops
    return report


def run_script(script: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run a script, or a module, in this process as ``__main__``."""
    sys.argv = [script, *arguments]
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


def _child(run_path: str, result_path: str) -> None:
    # Imported by its full name, so that `flatshard.rehearsal.current()` in the script finds this rehearsal.
    from flatshard.rehearsal.session import TooFewSteps, rehearse

    data = json.loads(Path(run_path).read_text())
    network = data.pop("network")
    parts: dict[str, Any] = {name: Link(**part) if isinstance(part, dict) else part for name, part in network.items()}
    run = ScriptRun(network=Network(**parts), **data)
    waits = recording(only_waits=run.record is None)
    with waits as recorded, rehearse(run.world, run.network, rank=run.rank, warmup=run.warmup) as rehearsal:
        try:
            run_script(run.script, run.arguments, run.is_module)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        try:
            report = rehearsal.report()
            report.waits = recorded.seconds_per_step(report.steps + run.warmup, run.warmup)
            if run.record is not None:
                Path(run.record).write_text(json.dumps({"title": " ".join(sys.argv), **recorded.to_dict()}))
            text = report.to_json()
        except (TooFewSteps, ValueError) as error:
            text = json.dumps({"missing": str(error)})
    Path(result_path).write_text(text)


if __name__ == "__main__":
    _child(*sys.argv[1:])
