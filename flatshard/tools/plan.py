"""`compare_strategies`: memory and traffic of each strategy, whether it fits, and which one to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flatshard.policy import Strategy, placements_for
from flatshard.rehearsal.network import wire_bytes
from flatshard.tools.dry_run import memory_of, offloaded, time_of
from flatshard.tools.group_bytes import TrainingSetup
from flatshard.tools.model_shapes import ModelShape
from flatshard.tools.strategy_plan import Machine, StrategyPlan, StrategyRow, Training, gigabytes


class _Kind(NamedTuple):
    kind: str
    strategy: Strategy
    outer: Strategy | None = None
    offload: bool = False
    pods: bool = False  # the inner axis is a pod instead of a node


_STRATEGIES = (
    _Kind("ZeRO 0", "no_shard"),
    _Kind("ZeRO 1", "optim"),
    _Kind("ZeRO 2", "optim_grads"),
    _Kind("ZeRO 3", "optim_grads_params"),
    _Kind("HSDP", "optim_grads_params", "no_shard"),
    _Kind("HFSDP", "optim_grads_params", "optim"),
    _Kind("HSDP pods", "optim_grads_params", "no_shard", pods=True),
    _Kind("HFSDP pods", "optim_grads_params", "optim", pods=True),
    _Kind("ZeRO 3 offload", "optim_grads_params", offload=True),
)
_ZERO_3 = _STRATEGIES[3]
MOST_DEVICES = 1 << 16


def compare_strategies(model: ModelShape, machine: Machine, training: Training) -> StrategyPlan:
    """Compare all strategies that are possible on this number of devices."""
    rows = tuple(
        _row(kind, ep, model, machine, training)
        for ep in _expert_parallel_sizes(model, machine, training)
        for kind in _STRATEGIES
        if (kind.outer is None or _outer_size(kind, machine) > 1) and _allows_expert_parallel(ep, kind, machine)
    )
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.peak)
        needed = f"{gigabytes(least.peak)}; {gigabytes(machine.usable)} are usable"
        remedy = _what_to_try(model, machine, training, rows)
        why = f"Nothing fits: {least.name} needs the least memory, {needed}. {remedy}"
        return StrategyPlan(model, machine, training, rows, None, why)
    best = min(fitting, key=lambda row: row.cost)
    why = f"{best.name}: {gigabytes(machine.memory - best.peak)} of each device are left, and "
    if best.offload:
        why += f"{gigabytes(best.memory.host)} of host memory are used per rank. Without offload nothing fits. "
        why += _what_to_try(model, machine, training, [row for row in rows if not row.offload])
    elif all(row.offload or row is best for row in fitting):
        why += "no other strategy fits on the device."
    else:
        others = [row for row in fitting if not row.offload]
        these = f"of the {len(others)} that fit without offload"
        if best.step is not None:
            why += f"{these} none is clearly faster: {1e3 * best.step.total:,.0f} ms per step."
        else:
            why += f"{these} it takes the least time on the network: {1e3 * best.wire:,.1f} ms per step."
        leaner = min(others, key=lambda row: row.peak)
        if leaner is not best:
            why += f" Of these, {leaner.name} needs the least memory: {gigabytes(best.peak - leaner.peak)} less."
    if not best.offload:
        recomputed = _with_recompute(machine, training, rows)
        faster = [row for row in recomputed if not row.offload and _is_faster(row, best)]
        if faster:
            name = min(faster, key=lambda row: row.cost).name
            why += f" With --recompute, {name} also fits, and is likely to be faster."
    plan = StrategyPlan(model, machine, training, rows, best.name, why, _about_formats(model, machine, training, best))
    if plan.offload_bytes:
        size = gigabytes(plan.offload_bytes)
        why += f" It is enough to offload {size} of main weights, with their gradients and state."
    return replace(plan, why=why)


def _with_recompute(machine: Machine, training: Training, rows: Sequence[StrategyRow]) -> list[StrategyRow]:
    """The strategies that fit with recompute, if the activations with recompute are known."""
    saved = 0.0 if training.recomputed is None else (training.activations or 0.0) - training.recomputed
    return [row for row in rows if saved > 0 and row.peak - saved <= machine.usable]


def _is_faster(row: StrategyRow, best: StrategyRow) -> bool:
    """Whether ``row`` with recompute is faster than ``best``. Without step times: whether it halves the wire time."""
    if row.step is None or best.step is None:
        return row.wire < best.wire / 2
    return row.step.total * 4 / 3 < 0.97 * best.step.total  # recompute adds a third to compute


def _expert_parallel_sizes(model: ModelShape, machine: Machine, training: Training) -> list[int]:
    """Sizes of expert parallelism to try: 1, and the largest that divides a node, the devices and the experts."""
    counts = model.expert_counts
    if not counts:
        if training.expert_parts not in (None, 1):
            raise ValueError(
                f"--ep {training.expert_parts}: the model has no stacked experts (modules whose class name ends with "
                "'Experts'); leave --ep out"
            )
        return [1]

    def divides(parts: int) -> bool:
        return machine.devices % parts == 0 and all(count % parts == 0 for count in counts)

    given = training.expert_parts
    if given is not None:
        if not divides(given):
            what = f"the number of devices, {machine.devices}, and of experts, {', '.join(map(str, sorted(counts)))}"
            raise ValueError(f"--ep {given}: must divide {what}")
        return [given]
    inside = min(machine.network.ranks_per_node, machine.devices)
    return sorted({1, max(parts for parts in range(1, inside + 1) if divides(parts) and inside % parts == 0)})


def _allows_expert_parallel(ep: int, kind: _Kind, machine: Machine) -> bool:
    """Whether expert parallelism is possible: with one axis, or if it divides the inner axis; not with HFSDP."""
    outer = kind.outer
    return ep == 1 or outer is None or (outer != "optim" and machine.devices // _outer_size(kind, machine) % ep == 0)


def _about_formats(model: ModelShape, machine: Machine, training: Training, best: StrategyRow) -> str:
    """A sentence about what encoded collectives save: those that were chosen, compared with none; or if none were
    chosen, the best choice of int8 (for all collectives or, with two axes, for the slower outer axis only)."""
    precision, has = training.precision, training.precision.has_formats
    tried: list[dict[str, Any]] = [{"gather_format": None, "reduce_format": None}]
    if not has:
        tried = [{"gather_format": "int8", "reduce_format": "int8"}]
        if len(best.mesh) == 2:
            tried.append({"reduce_format": ("int8", None)})
            tried.append({"gather_format": "int8", "reduce_format": ("int8", "int8")})
    kind = next(kind for kind in _STRATEGIES if kind.kind == best.kind)
    rows = [
        (_row(kind, best.ep, model, machine, replace(training, precision=replace(precision, **formats))), formats)
        for formats in tried
    ]
    row, formats = min(rows, key=lambda found: (found[0].cost[1], found[0].wire))
    plain, coded = (row, best) if has else (best, row)
    if not has and coded.wire > 0.9 * plain.wire:
        return ""
    chosen = ", ".join(f"{name}={value!r}" for name, value in formats.items()).replace("'", '"')
    text = "The formats take" if has else f"{chosen} (docs/formats.md) would take"
    text += f" the wire from {1e3 * plain.wire:,.1f} to {1e3 * coded.wire:,.1f} ms"
    if plain.step is None or coded.step is None:
        return f"{text}. Give --tokens and --tflops to see whether this makes a step faster."
    if coded.step.total < 0.97 * plain.step.total:
        added = "" if has else f" Then: policy = MixedPrecisionPolicy(..., {chosen})"
        return f"{text}, and a step from {1e3 * plain.step.total:,.1f} to {1e3 * coded.step.total:,.1f} ms.{added}"
    text += ". That does not make a step faster: compute hides the communication in either case"
    if coded.step.total > plain.step.total:
        text += f", and with encoding and decoding a step takes {1e3 * coded.step.total:,.1f} ms instead of"
        text += f" {1e3 * plain.step.total:,.1f}"
    return f"{text}."


def picture(model: ModelShape, machine: Machine, training: Training) -> str:
    """A drawing of which strategies fit: a row for each strategy, a column for each power of two of devices."""
    counts = [1 << power for power in range(13) if 1 << power <= 8 * max(machine.devices, 8)]
    bytes_only = replace(training, speed=None)
    plans = [compare_strategies(model, replace(machine, devices=count), bytes_only) for count in counts]
    marks = [{row.kind + " ep" * (row.ep > 1): "#" if row.fits else "." for row in plan.rows} for plan in plans]
    possible = [kind.kind + ep for ep in ("", " ep") for kind in _STRATEGIES]
    names = [name for name in possible if any(name in each for each in marks)]
    wide, width = max(12, *(len(name) + 2 for name in names)), len(str(counts[-1])) + 1
    lines = ["fits on".ljust(wide) + "".join(str(count).rjust(width) for count in counts) + "  devices"]
    for name in names:
        lines.append(name.ljust(wide) + "".join(each.get(name, " ").rjust(width) for each in marks).rstrip())
    lines += ["", f"#: fits in {gigabytes(machine.usable)}, .: does not"]
    if any(name.endswith(" ep") for name in names):
        lines.append("ep: expert parallelism over as many ranks of a node as possible")
    return "\n".join(lines)


def _outer_size(kind: _Kind, machine: Machine) -> int:
    """The number of nodes, or pods, that the devices fill; 1 if one is not full."""
    network = machine.network
    if kind.pods and network.across is None:
        return 1
    inside = network.ranks_per_pod if kind.pods else network.ranks_per_node
    return machine.devices // inside if machine.devices % inside == 0 else 1


def _row(kind: _Kind, ep: int, model: ModelShape, machine: Machine, training: Training) -> StrategyRow:
    outer = _outer_size(kind, machine)
    mesh = (machine.devices,) if kind.outer is None else (outer, machine.devices // outer)
    setup = TrainingSetup(
        mesh,
        placements_for(kind.strategy, kind.outer, len(mesh)),
        training.precision,
        training.layout,
        state=training.state,
        microbatches=training.microbatches,
        expert_parts=ep,
    )
    memory = (offloaded if kind.offload else memory_of)(model, setup)
    sent = dict.fromkeys((False, True), 0.0)
    for launch in memory.launches:
        sent[launch.reduces] += launch.times * wire_bytes(launch.kind, launch.size, launch.ranks)
    wire = sum(launch.times * launch.seconds(machine.network) for launch in memory.launches)
    step = None
    if training.speed is not None and not kind.offload:
        step = time_of(model, setup, training.speed, machine.network)
        wire += step.exchanges
    peak = memory.peak.total + (training.activations or 0)
    return StrategyRow(*kind[:4], ep, mesh, memory, sent[False], sent[True], wire, peak, peak <= machine.usable, step)


def _what_to_try(model: ModelShape, machine: Machine, training: Training, rows: Sequence[StrategyRow]) -> str:
    """What to try if ``rows`` do not fit: recompute, more devices, or smaller units."""
    activations, recomputed = training.activations or 0.0, training.recomputed
    if recomputed is not None and recomputed < activations:
        text = f"With --recompute, activations take {gigabytes(recomputed)} instead of {gigabytes(activations)}"
        best = min(_with_recompute(machine, training, rows), key=lambda row: row.cost, default=None)
        text += "" if best is None else f", and {best.name} fits"
        if best is not None and not best.offload:
            return f"{text}."
        training = replace(training, activations=recomputed, recomputed=None)
        return f"{text}. {_what_to_try(model, machine, training, rows)}"
    least, devices = math.inf, machine.devices
    while devices <= MOST_DEVICES // 2:  # padding grows with the number of devices, so at some point more do not help
        devices *= 2
        more = replace(machine, devices=devices)
        found = [_row(_ZERO_3, ep, model, more, training) for ep in _expert_parallel_sizes(model, more, training)]
        row = min(found, key=lambda row: row.peak)
        if row.fits:
            return f"On {devices} devices, {row.name} takes {gigabytes(row.peak)} and fits."
        if row.peak >= least:
            break
        least = row.peak
    parts, batch = (" and activations", ", or a smaller batch") if activations else ("", "")
    return (
        f"More devices do not help: gathered weights and gradients that are being reduced{parts} take "
        f"{gigabytes(least)} on any number of devices. Try smaller units{batch}."
    )
