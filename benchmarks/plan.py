"""The step time that `flatshard plan` estimates, beside the rehearsed one of benchmarks/results.

    python -m benchmarks.plan            all recorded runs of cases (a) to (e64); no GPU is needed

Two estimates of each: from the rate that the compute limit of the same run has reached, so that what is left is how
well the schedule is foreseen; and from one rate for all cases, as somebody has it who has not measured his model.
"no host": as a captured step, for which the host does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.models import Llama
from benchmarks.moe import MixtureConfig, mixture
from benchmarks.systems import BETWEEN_MICROBATCHES, Setup
from benchmarks.table import CASES, NETWORK
from flatshard import MixedPrecisionPolicy, SchedulePolicy
from flatshard.policy import placements_for
from flatshard.tools.dry_run import time_of
from flatshard.tools.group_bytes import TrainingSetup
from flatshard.tools.model_shapes import ModelShape, model_of
from flatshard.tools.timing import Estimate, Speed

RESULTS = Path(__file__).parent / "results"
BANDWIDTH = 4.8e12  # bytes per second, of an H200's memory
RATE = 600e12  # FLOP per second: what (b) reaches


def shapes_of(setup: Setup) -> ModelShape:
    """The model of a case with the units that the benchmarks give it, all experts in one."""
    with torch.device("meta"):
        if isinstance(setup.model, MixtureConfig):
            model = mixture(dataclasses.replace(setup.model, ep=1))
        else:
            model = Llama(setup.model)
    units = ["torch.nn.Embedding", "flatshard.train.model.TransformerBlock", "flatshard.train.model.Head"]
    found = model_of(model, units, getattr(setup.model, "chosen", None))
    blocks = [dataclasses.replace(unit, is_block=unit.is_block and unit.name != "head") for unit in found.units]
    return dataclasses.replace(found, units=tuple(blocks))


def choice_of(setup: Setup) -> TrainingSetup:
    return TrainingSetup(
        (setup.world,),
        placements_for("optim_grads_params", None, 1),
        MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=setup.dtype),
        schedule=SchedulePolicy(keep_for_next=BETWEEN_MICROBATCHES if setup.microbatches > 1 else 0),
        microbatches=setup.microbatches,
        expert_parts=setup.ep,
    )


def estimate(setup: Setup, flops: float, host: float = Speed.host, choice: TrainingSetup | None = None) -> Estimate:
    model, choice = shapes_of(setup), choice or choice_of(setup)
    speed = Speed(flops, setup.batch * setup.seq, setup.seq, setup.model.recompute, BANDWIDTH, host)
    return time_of(model, choice, speed, NETWORK)


def reached(setup: Setup, seconds: float) -> float:
    """FLOP per second of products in a step without communication that takes so long, its optimizer left out."""
    alone = dataclasses.replace(choice_of(setup), mesh=(1,), expert_parts=1)
    one = estimate(setup, 1e12, 0.0, alone)
    work = 1e12 * (one.total - one.optimizer)
    return work / (seconds - estimate(setup, 1e12, 0.0).optimizer)


def recorded() -> Iterator[tuple[str, str, dict[str, float], dict[str, float]]]:
    """File, case, and the rows of the compute limit and of flatshard, of all that has been recorded."""
    for path in sorted(RESULTS.glob("h200-*.json")):
        for case, rows in json.loads(path.read_text()).get("cases", {}).items():
            if case in CASES and {"limit", "flatshard"} <= rows.keys():
                yield path.stem, case, rows["limit"], rows["flatshard"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    titles = ["rehearsed", "limit", "TFLOP/s", "estimate", "error", "waits", "no host", "error", "at 600", "error"]
    print(f"{'case':6}{'recorded in':28}" + "".join(f"{title:>10}" for title in titles))
    for name, case, limit, ours in sorted(recorded(), key=lambda found: found[1]):
        setup = CASES[case]
        flops = reached(setup, limit["ms"] * 1e-3)
        found, free, given = estimate(setup, flops), estimate(setup, flops, 0.0), estimate(setup, RATE)
        line = f"({case:3}) {name:28}{ours['ms']:10.1f}{limit['ms']:10.1f}{flops / 1e12:10.0f}"
        line += f"{1e3 * found.total:10.1f}{_error(found, ours)}{1e3 * found.waits:10.1f}"
        print(line + f"{1e3 * free.total:10.1f}{_error(free, ours)}{1e3 * given.total:10.1f}{_error(given, ours)}")


def _error(found: Estimate, row: dict[str, float]) -> str:
    return f"{100 * (1e3 * found.total / row['ms'] - 1):+9.1f}%"


if __name__ == "__main__":
    main()
