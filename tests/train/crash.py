"""`flatshard train` in ranks that are killed at a random moment of a phase, by a thread that the product knows not of.

As a script it is what torchrun starts in the place of ``-m flatshard``: ``crash.py PLAN train --steps ...``.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "step", "save", "load", "start")


@dataclass(frozen=True)
class Plan:
    """Who is killed when. The first ``kills`` incarnations of a job lose one rank each; the next one ends well."""

    record: str  # file with a line for each kill
    kills: int
    seed: int = 0
    world: int = 2
    signal: int = signal.SIGKILL

    def of(self, incarnation: int) -> tuple[str, int, int, float]:
        """Phase, rank, how many steps after the start of the incarnation, how far into the phase (0 to 1)."""
        draw = random.Random(1000 * self.seed + incarnation)
        phase = PHASES[(self.seed + incarnation) % len(PHASES)]
        return phase, draw.randrange(self.world), draw.randint(1, 3), draw.random()


class Killer:
    """Watches which phase this process is in, and ends it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.phase, self.rank, self.steps, self.into = plan.of(self.incarnation)
        self.active, self.step = ["start"], 0  # phases that are running; a save runs beside others
        self.took: dict[str, float] = {}  # seconds, the last time
        if self.incarnation >= plan.kills or self.rank != int(os.environ["RANK"]):
            return
        self._hurry = threading.Event()
        if self.phase == "start":
            self._arm(4.0)  # much of which goes into imports
        self._watch()

    def _watch(self) -> None:
        import torch

        from flatshard import checkpoint
        from flatshard.checkpoint import saving
        from flatshard.train.model import Llama
        from flatshard.train.trainer import Trainer

        self._wrap(Llama, "forward")
        self._wrap(torch.Tensor, "backward")
        self._wrap(torch.optim.AdamW, "step")
        self._wrap(saving, "write_snapshot", "save")
        self._wrap(checkpoint, "load")
        counted = Trainer._step

        def count(trainer: Trainer, number: int) -> Any:
            self.step += 1
            if self.step > self.steps:
                self._hurry.set()
            if self.step == 1:
                self.active.remove("start")
            if self.step > self.steps + 3 and self.phase != "armed":  # there was nothing to load
                self._arm(0.005)
            return counted(trainer, number)

        Trainer._step = count  # type: ignore[method-assign]

    def _wrap(self, owner: Any, name: str, phase: str = "") -> None:
        phase, call = phase or name, getattr(owner, name)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            self.active.append(phase)
            if phase == self.phase and (self.step >= self.steps or phase in ("load", "save")):
                self._arm(self.took.get(phase, 0.005))
            try:
                return call(*args, **kwargs)
            finally:
                self.active.remove(phase)
                self.took[phase] = time.monotonic() - began

        setattr(owner, name, watched)

    def _arm(self, seconds: float) -> None:
        self.phase = "armed"
        threading.Thread(target=self._kill, args=(self.into * seconds,), daemon=True).start()

    def _kill(self, delay: float) -> None:
        self._hurry.wait(delay)
        found = {"incarnation": self.incarnation, "rank": self.rank, "phases": self.active, "step": self.step}
        with open(self.plan.record, "a") as file:
            file.write(json.dumps(found) + "\n")
        os.kill(os.getpid(), self.plan.signal)


def rank(plan: Plan, arguments: list[str]) -> None:
    """Be a rank that a launcher has started."""
    Killer(plan)
    from flatshard.cli import main

    sys.exit(main(arguments))


def rank_alone(plan: Plan, arguments: list[str], rank_and_world: tuple[int, int], port: int, folder: Path) -> None:
    """Be a rank that nobody looks after, with what it says in files ``out`` and ``err``."""
    number, world = rank_and_world
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}-{number}", os.O_CREAT | os.O_WRONLY), stream)
    rank(plan, arguments)


def agent(plan: Plan, arguments: list[str], restarts: int, folder: Path, result: Any) -> None:
    """Be torchrun, of a function instead of a command: ranks are forked from here, and have imported all they need."""
    import torch._dynamo  # noqa: F401  (by optimizers, when they step first)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import flatshard.cli
    import flatshard.train.launch  # noqa: F401

    os.setsid()  # by which all that is started here can be found
    folder.mkdir()
    os.dup2(os.open(folder / "says", os.O_CREAT | os.O_WRONLY), 2)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.world,
        run_id="crash",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=restarts,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, rank)(plan, arguments)
        result.put("")
    except BaseException as error:
        result.put(str(error) or repr(error))


def dump(plan: Plan) -> str:
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    rank(Plan(**json.loads(sys.argv[1])), sys.argv[2:])
