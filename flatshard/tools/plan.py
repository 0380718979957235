"""``flatshard plan``: what each strategy takes and sends, whether it fits, and which to take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

import torch

from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, Strategy, placements_for
from flatshard.rehearsal.network import Level, Network, wire_bytes
from flatshard.tools.groups import Choice, Launch, StateOf
from flatshard.tools.memory import Memory, memory_of
from flatshard.tools.shapes import Model

_STRATEGIES: tuple[tuple[str, Strategy, Strategy | None], ...] = (
    ("ZeRO 0", "no_shard", None),
    ("ZeRO 1", "optim", None),
    ("ZeRO 2", "optim_grads", None),
    ("ZeRO 3", "optim_grads_params", None),
    ("HSDP", "optim_grads_params", "no_shard"),
    ("HFSDP", "optim_grads_params", "optim"),
)
_MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Machine:
    """``memory`` is of one device, in bytes; ``spare`` the part of it that is left to others than this formula knows:

    the allocator's gaps, the communication library, temporaries of the optimizer's step.
    """

    devices: int
    memory: float
    network: Network
    spare: float = 0.1

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.memory > 0 or not 0 <= self.spare < 1:
            raise ValueError("devices are at least 1, memory is more than 0, and spare is a part of it")

    @property
    def usable(self) -> float:
        return (1 - self.spare) * self.memory


@dataclass(frozen=True)
class Training:
    """``activations``: bytes of one rank, and ``tokens`` of one micro-batch and rank; ``flops`` that a device reaches.

    ``state`` and ``microbatches`` are as in `Choice`.
    """

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    layout: LayoutName = "tensor"
    state: int | StateOf = 2
    microbatches: int = 1
    activations: float = 0.0
    tokens: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Row:
    """One strategy. ``gathers`` and ``reduces``: bytes that a rank sends in a step; ``wire``: modelled seconds.

    ``step``: seconds that a step takes at least, however well communication and compute overlap; None if unknown.
    """

    name: str
    mesh: tuple[int, ...]
    memory: Memory
    gathers: float
    reduces: float
    wire: float
    peak: float  # with activations
    fits: bool
    step: float | None


@dataclass(frozen=True)
class Plan:
    """``advice`` is the strategy to take, or None if none fits; ``why`` says it in words.

    ``formats``: what formats of fewer bytes do for it, or would do, in words.
    """

    numel: int
    units: int
    machine: Machine
    training: Training
    rows: tuple[Row, ...]
    advice: str | None
    why: str
    formats: str = ""

    @property
    def state_per_parameter(self) -> float:
        """Bytes of optimizer state for each parameter, all ranks together; what is frozen has none."""
        return self.rows[0].memory.resting.state / max(self.numel, 1)  # of ZeRO 0: all of it, without padding

    def to_json(self) -> str:
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            found = asdict(row)
            found["memory"].pop("launches")
            for moment in ("resting", "peak"):
                found["memory"][moment]["total"] = getattr(row.memory, moment).total
            rows.append(found)
        machine = {
            "devices": self.machine.devices,
            "memory": self.machine.memory,
            "spare": self.machine.spare,
            "network": self.machine.network.name,
            "ranks_per_node": self.machine.network.ranks_per_node,
        }
        document = {
            "parameters": self.numel,
            "units": self.units,
            "state_bytes_per_parameter": self.state_per_parameter,
            "machine": machine,
            "strategies": rows,
            "advice": self.advice,
            "why": self.why,
            "formats": self.formats,
            "python": self.python(),
        }
        return json.dumps(document, indent=2)

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if row.name == self.advice), None)

    def python(self) -> str:
        """The lines that shard a model as advised; none if nothing fits."""
        if self.best is None:
            return ""
        _, strategy, outer = next(each for each in _STRATEGIES if each[0] == self.advice)
        precision = self.training.precision
        named = {name: getattr(precision, name) for name in ("param_dtype", "reduce_dtype", "main_dtype", "grad_dtype")}
        named |= {name: getattr(precision, name) for name in ("gather_format", "reduce_format")}
        said = {name: value if isinstance(value, torch.dtype) else repr(value) for name, value in named.items()}
        dtypes = ", ".join(f"{name}={said[name]}" for name, value in named.items() if value is not None)
        axes = {1: '("dp",)', 2: '("replicas", "shard")'}[len(self.best.mesh)]
        choices = ["mesh=mesh", "mp_policy=policy"]
        choices += [f'strategy="{strategy}"'] if strategy != "optim_grads_params" else []
        choices += [f'outer_strategy="{outer}"'] if outer == "optim" else []
        choices += [f'layout="{self.training.layout}"'] if self.training.layout != "tensor" else []
        kept = self.kept_bytes
        if kept:
            choices += [
                'reshard_after_forward="auto"',
                f"schedule=SchedulePolicy(keep_for_backward={kept:,})".replace(",", "_"),
            ]
        names = ["MixedPrecisionPolicy", *["SchedulePolicy"] * bool(kept), "shard_model"]
        return "\n".join(
            [
                f"from flatshard import {', '.join(names)}",
                f'mesh = init_device_mesh("cuda", {self.best.mesh}, mesh_dim_names={axes})',
                f"policy = MixedPrecisionPolicy({dtypes})",
                f"shard_model(model, {', '.join(choices)})",
            ]
        )

    @property
    def kept_bytes(self) -> int:
        """Of the advised strategy, what is left of the memory for weights to be kept from forward to backward."""
        row = self.best
        if row is None or not row.gathers or not row.memory.peak.gathered:
            return 0
        full = sum(launch.size for launch in row.memory.launches if launch.kind == "all_gather" and launch.times > 1)
        left = int(min(self.machine.usable - row.peak, full) // 10**8) * 10**8
        return max(left, 0)

    def _repr_html_(self) -> str:
        """In a notebook."""
        return f"<pre>{escape(self.table())}</pre>"

    def table(self) -> str:
        """Text for a terminal."""
        machine, training = self.machine, self.training
        header = ["", "mesh", "resting", "main", "compute", "state", "grads", "gathered", "staging", "peak"]
        header += ["gathers", "reduces", "wire ms", *["step ms"] * (self.rows[0].step is not None), "fits"]
        lines = [header]
        for row in self.rows:
            peak, resting = row.memory.peak, row.memory.resting
            sizes: list[float] = [
                resting.total,
                peak.main,
                peak.compute,
                peak.state,
                peak.gradients,
                peak.gathered,
                peak.staging,
            ]
            sizes += [row.peak, row.gathers, row.reduces]
            line = [row.name, " x ".join(map(str, row.mesh)), *map(_gb, sizes), f"{1e3 * row.wire:,.1f}"]
            line += [f"{1e3 * row.step:,.1f}"] if row.step is not None else []
            lines.append([*line, "yes" if row.fits else "no"])
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        activations = f"{_gb(training.activations)} GB of activations" if training.activations else "no activations"
        notes = [
            f"{self.numel:,} parameters in {self.units} units; {machine.devices} devices of {_gb(machine.memory)} GB, "
            f"{machine.network.ranks_per_node} to a node, network {machine.network.name}",
            "",
            *table,
            "",
            "GB (10^9 bytes) of one rank. resting: between steps. peak: the fullest moment of a step, with "
            f"{activations};",
            "the columns before it are its parts. gathers, reduces: sent per step. wire: their time on that network,",
            f"overlapped or not. fits: the peak leaves {100 * machine.spare:.0f}% of the memory to others.",
            f"state: of the optimizer, {self.state_per_parameter:.2f} bytes per parameter.",
        ]
        if self.rows[0].step is not None:
            notes.append(
                "step: at least so long: the busier link's time, or 6 FLOPs per weight and token if that is more."
            )
        code = self.python()
        return "\n".join(
            [*notes, "", *([code, ""] if code else []), *([self.formats] if self.formats else []), self.why]
        )


def make_plan(model: Model, machine: Machine, training: Training) -> Plan:
    """Compare the strategies that fit the number of devices."""
    rows = tuple(
        _row(name, model, _choice(strategy, outer, machine, training), machine, training)
        for name, strategy, outer in _STRATEGIES
        if outer is None or _nodes(machine) > 1
    )
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return Plan(
            model.numel, len(model.units), machine, training, rows, None, _why_not(model, machine, training, rows)
        )
    best = min(fitting, key=lambda row: (row.wire, row.peak))
    left = machine.memory - best.peak
    why = f"{best.name}: {_gb(left)} GB of each device are left, and "
    others = [row for row in fitting if row is not best]
    if not others:
        why += "nothing else fits."
    else:
        why += (
            f"of the {len(fitting)} that fit it has the least to send: {1e3 * best.wire:,.1f} ms per step on the wire"
        )
        leaner = min(fitting, key=lambda row: row.peak)
        why += "." if leaner is best else f". {leaner.name} takes least memory: {_gb(best.peak - leaner.peak)} GB less."
    formats = _formats(model, machine, training, best)
    return Plan(model.numel, len(model.units), machine, training, rows, best.name, why, formats)


def _formats(model: Model, machine: Machine, training: Training, best: Row) -> str:
    """Whether formats of fewer bytes pay: those chosen, beside none; or where none are, gathers and reduces in int8."""
    precision, has = training.precision, training.precision.has_formats
    none = replace(precision, gather_format=None, reduce_format=None)
    other = none if has else replace(precision, gather_format="int8", reduce_format="int8")
    ((_, strategy, outer),) = [each for each in _STRATEGIES if each[0] == best.name]
    changed = replace(training, precision=other)
    row = _row(best.name, model, _choice(strategy, outer, machine, changed), machine, changed)
    plain, coded = (row, best) if has else (best, row)
    if not has and coded.wire > 0.9 * plain.wire:
        return ""
    text = "The formats take" if has else "gather_format and reduce_format 'int8' (docs/formats.md) would take"
    text += f" the wire from {1e3 * plain.wire:,.1f} to {1e3 * coded.wire:,.1f} ms"
    if plain.step is None or coded.step is None:
        return f"{text}. Give --tokens and --tflops to see whether a step is bound by it."
    if coded.step < 0.99 * plain.step:
        return f"{text}, and a step from at least {1e3 * plain.step:,.1f} to {1e3 * coded.step:,.1f} ms."
    return f"{text}. That does not pay: compute can hide it in either case."


def picture(model: Model, machine: Machine, training: Training) -> str:
    """What fits at which number of devices: a row for each strategy, a mark for each power of two."""
    counts = [1 << power for power in range(13) if 1 << power <= 8 * max(machine.devices, 8)]
    plans = [make_plan(model, replace(machine, devices=count), training) for count in counts]
    width = max(len(str(count)) for count in counts) + 1
    lines = ["fits on     " + "".join(str(count).rjust(width) for count in counts) + "  devices"]
    for name, *_ in _STRATEGIES:
        marks = ""
        for plan in plans:
            row = next((row for row in plan.rows if row.name == name), None)
            sign = " " if row is None else "#" if row.fits else "."
            marks += sign.rjust(width)
        if marks.strip():
            lines.append(name.ljust(12) + marks)
    return "\n".join([*lines, "", f"#: fits in {_gb(machine.usable)} GB, .: does not"])


def _nodes(machine: Machine) -> int:
    """How many nodes the devices fill exactly; 1 if they do not."""
    inside = machine.network.ranks_per_node
    return machine.devices // inside if machine.devices % inside == 0 else 1


def _choice(strategy: Strategy, outer: Strategy | None, machine: Machine, training: Training) -> Choice:
    nodes = _nodes(machine)
    mesh = (machine.devices,) if outer is None else (nodes, machine.devices // nodes)
    return Choice(
        mesh,
        placements_for(strategy, outer, len(mesh)),
        training.precision,
        training.layout,
        state=training.state,
        microbatches=training.microbatches,
    )


def _row(name: str, model: Model, choice: Choice, machine: Machine, training: Training) -> Row:
    memory = memory_of(model, choice)
    sent = {kind: sum(_sent(x) for x in memory.launches if x.reduces == kind) for kind in (True, False)}
    seconds: dict[Level, float] = {"inside": 0.0, "between": 0.0}  # two links, which work at the same time
    for launch in memory.launches:
        level = _level(launch, choice.mesh, machine.network)
        time = machine.network.seconds(launch.kind, launch.size, launch.among, level, launch.segments)
        seconds[level] += launch.times * time
    peak = memory.peak.total + training.activations
    step = None
    if training.tokens is not None and training.flops is not None:
        weights = sum(unit.used for unit in model.units)
        step = max(*seconds.values(), 6 * weights * training.tokens * training.microbatches / training.flops)
    wire = sum(seconds.values())
    return Row(name, choice.mesh, memory, sent[False], sent[True], wire, peak, peak <= machine.usable, step)


def _sent(launch: Launch) -> float:
    return launch.times * wire_bytes(launch.kind, launch.size, launch.among)


def _level(launch: Launch, mesh: Sequence[int], network: Network) -> Level:
    stride = mesh[-1] if launch.axis < len(mesh) - 1 else 1
    return network.level(range(0, launch.among * stride, stride))


def _why_not(model: Model, machine: Machine, training: Training, rows: Sequence[Row]) -> str:
    least = min(rows, key=lambda row: row.peak)
    text = f"Nothing fits: {least.name} takes least, {_gb(least.peak)} GB; {_gb(machine.usable)} GB are usable. "
    devices = machine.devices
    while devices < _MOST_DEVICES:
        devices *= 2
        more = replace(machine, devices=devices)
        row = _row("ZeRO 3", model, _choice("optim_grads_params", None, more, training), more, training)
        if row.fits:
            return f"{text}On {devices} devices ZeRO 3 would take {_gb(row.peak)} GB and fit."
    fixed = least.memory.peak.gathered + least.memory.peak.staging + training.activations
    return (
        f"{text}More devices do not help: gathered weights, gradients on their way and activations take "
        f"{_gb(fixed)} GB on any number of them. Smaller units, or fewer activations, do."
    )


def _gb(size: float) -> str:
    scaled = size / 1e9
    return f"{scaled:,.1f}" if scaled >= 10 else f"{scaled:.2f}" if scaled >= 0.005 or not size else f"{scaled:.1g}"
