"""``flatshard plan``: what each strategy takes and sends, whether it fits, and which to take."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, NamedTuple

import torch

from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, Strategy, placements_for
from flatshard.rehearsal.network import Network, wire_bytes
from flatshard.tools.group_bytes import PlannedCollective, StateOf, TrainingSetup
from flatshard.tools.memory import Memory, memory_of, offloaded, time_of
from flatshard.tools.model_shapes import ModelShape
from flatshard.tools.timing import Estimate, Speed


class _Kind(NamedTuple):
    kind: str
    strategy: Strategy
    outer: Strategy | None = None
    offload: bool = False


_STRATEGIES = (
    _Kind("ZeRO 0", "no_shard"),
    _Kind("ZeRO 1", "optim"),
    _Kind("ZeRO 2", "optim_grads"),
    _Kind("ZeRO 3", "optim_grads_params"),
    _Kind("HSDP", "optim_grads_params", "no_shard"),
    _Kind("HFSDP", "optim_grads_params", "optim"),
    _Kind("ZeRO 3 offload", "optim_grads_params", offload=True),
)
_ZERO_3 = _STRATEGIES[3]
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
    """``activations``: bytes of one rank; None if they are not known. ``recompute``: blocks recompute them in backward;
    ``recomputed``: if not, what they would be then. ``speed``: what a device does, for the time of a step.

    ``state`` and ``microbatches`` are as in `Choice`. ``expert_parts``: in how many parts experts are tried, beside not
    at all; None: in as many as a node allows.
    """

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    layout: LayoutName = "tensor"
    state: int | StateOf = 2
    microbatches: int = 1
    activations: float | None = None
    recomputed: float | None = None
    recompute: bool = False
    speed: Speed | None = None
    expert_parts: int | None = None


@dataclass(frozen=True)
class StrategyRow:
    """One strategy. ``gathers`` and ``reduces``: bytes that a rank sends in a step; ``wire``: modelled seconds.

    ``step``: its estimated time; None if nobody has said how fast a device is. ``ep``: parts of the experts.
    """

    kind: str
    strategy: Strategy
    outer: Strategy | None
    offload: bool
    ep: int
    mesh: tuple[int, ...]
    memory: Memory
    gathers: float
    reduces: float
    wire: float
    peak: float  # with activations
    fits: bool
    step: Estimate | None

    @property
    def name(self) -> str:
        return f"{self.kind} ep {self.ep}" if self.ep > 1 else self.kind

    @property
    def cost(self) -> tuple[bool, float, float]:
        """What is least in the best one: no offload, then time (to two digits), then memory."""
        seconds = self.wire if self.step is None else float(f"{self.step.total:.2g}")
        return self.offload, seconds, self.peak


@dataclass(frozen=True)
class StrategyPlan:
    """``advice`` is the strategy to take, or None if none fits; ``why`` says it in words.

    ``formats``: what formats of fewer bytes do for it, or would do, in words.
    """

    numel: int
    units: int
    machine: Machine
    training: Training
    rows: tuple[StrategyRow, ...]
    advice: str | None
    why: str
    formats: str = ""
    experts: tuple[str, ...] = ()  # classes of modules that hold nothing else

    @property
    def state_per_parameter(self) -> float:
        """Bytes of optimizer state for each parameter, all ranks together; what is frozen has none."""
        return self.rows[0].memory.resting.state / max(self.numel, 1)  # ZeRO 0 has all of it, without padding

    def to_json(self) -> str:
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            found = {"name": row.name, **asdict(row)}
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
    def best(self) -> StrategyRow | None:
        return next((row for row in self.rows if row.name == self.advice), None)

    def python(self) -> str:
        """The lines that shard a model as advised; none if nothing fits."""
        row = self.best
        if row is None:
            return ""
        precision = self.training.precision
        named = {name: getattr(precision, name) for name in ("param_dtype", "reduce_dtype", "main_dtype", "grad_dtype")}
        named |= {name: getattr(precision, name) for name in ("gather_format", "reduce_format")}
        said = {name: value if isinstance(value, torch.dtype) else repr(value) for name, value in named.items()}
        dtypes = ", ".join(f"{name}={said[name]}" for name, value in named.items() if value is not None)
        axes = ("dp",) if len(row.mesh) == 1 else ("replicas", "shard")
        choices = ["mesh=mesh", "mp_policy=policy"]
        choices += [f'strategy="{row.strategy}"'] if row.strategy != "optim_grads_params" else []
        choices += [f'outer_strategy="{row.outer}"'] if row.outer == "optim" else []
        choices += [f'layout="{self.training.layout}"'] if self.training.layout != "tensor" else []
        choices += ["offload_policy=CPUOffloadPolicy()"] if row.offload else []
        kept = self.kept_bytes
        if kept:
            choices += [
                'reshard_after_forward="auto"',
                f"schedule=SchedulePolicy(keep_for_backward={kept:,})".replace(",", "_"),
            ]
        names = [*["CPUOffloadPolicy"] * row.offload, "MixedPrecisionPolicy", *["SchedulePolicy"] * bool(kept)]
        names.append("shard_model")
        lines = [_mesh("mesh", row.mesh, axes), f"policy = MixedPrecisionPolicy({dtypes})"]
        if self.training.recompute:
            lines.insert(
                0, "# first: torch.utils.checkpoint in every block (Transformers: gradient_checkpointing_enable)"
            )
        if row.ep > 1:
            names.append("Experts")
            *outer, last = row.mesh
            sparse = (*outer, last // row.ep, row.ep)
            lines.append(_mesh("sparse", sparse, (*axes[:-1], "edp", "ep")))
            same = ", ".join(f'"{axis}"' for axis in (*axes[:-1], "edp"))
            lines.append(f'experts = Experts({list(self.experts)}, mesh=sparse[{same}], apart=sparse["ep"])')
            choices.append("experts=experts")
            kind = self.experts[0].rpartition(".")[2]
            part = f"stacked, 1 in {row.ep} of them on each rank, which sends tokens to the others"
            lines.append(f"# {kind} of the model must be so already: {part} (docs/meshes.md)")
        return "\n".join(
            [
                "import torch",
                "from torch.distributed.device_mesh import init_device_mesh",
                f"from flatshard import {', '.join(sorted(names))}",
                *lines,
                f"shard_model(model, {', '.join(choices)})",
            ]
        )

    @property
    def kept_bytes(self) -> int:
        """Memory that is left for weights to be kept from forward to backward; 0 if activations are not known."""
        row = self.best
        if row is None or self.training.activations is None or not row.gathers or not row.memory.peak.gathered:
            return 0
        full = sum(launch.size for launch in row.memory.launches if launch.kind == "all_gather" and launch.times > 1)
        left = int(min(self.machine.usable - row.peak, full) // 10**8) * 10**8
        return max(left, 0)

    def _repr_html_(self) -> str:
        """In a notebook."""
        return f"<pre>{escape(self.table())}</pre>"

    def table(self) -> str:
        """Text for a terminal."""
        speed, offload = self.training.speed, any(row.offload for row in self.rows)
        unit, scale = ("GB", 1e9) if max(row.peak for row in self.rows) >= 1e8 else ("MB", 1e6)
        header = ["", "mesh", "idle", "main", "compute", "state", "grads", "gathered", "staging", "peak"]
        header += [*["host"] * offload, "gathers", "reduces", "wire ms"]
        header += ["step ms", "waits", "tokens/s", "MFU"] * (speed is not None) + ["fits"]
        lines = [header]
        for row in self.rows:
            peak, step = row.memory.peak, row.step
            sizes: list[float] = [
                row.memory.resting.total,
                peak.main,
                peak.compute,
                peak.state,
                peak.gradients,
                peak.gathered,
            ]
            sizes += [peak.staging, row.peak, *[row.memory.host] * offload, row.gathers, row.reduces]
            line = [row.name, " x ".join(map(str, row.mesh)), *(_digits(size / scale) for size in sizes)]
            line.append(f"{1e3 * row.wire:,.1f}")
            if speed is not None and step is not None:
                tokens = speed.tokens * self.training.microbatches * self.machine.devices
                line += [f"{1e3 * step.total:,.1f}", f"{1e3 * step.waits:,.1f}", f"{tokens / step.total:,.0f}"]
                line.append(f"{100 * step.flops / step.total / speed.peak:.0f}%")
            line += ["-"] * (len(header) - 1 - len(line))
            lines.append([*line, "yes" if row.fits else "no"])
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        code = self.python()
        return "\n".join(
            [
                *self._header(),
                "",
                *table,
                "",
                *self._legend(unit),
                "",
                *([code, ""] if code else []),
                self.why,
                *([self.formats] if self.formats else []),
            ]
        )

    def _header(self) -> list[str]:
        machine = self.machine
        return [
            f"{self.numel:,} parameters in {self.units} units; {machine.devices} devices of {_gb(machine.memory)}, "
            f"{machine.network.ranks_per_node} per node",
            f"network {machine.network.describe(machine.devices)}",
        ]

    def _legend(self, unit: str) -> list[str]:
        """What the columns are, and what to know of the rows."""
        training, timed = self.training, self.training.speed is not None
        known = training.activations is not None
        with_ = f"with {_gb(training.activations or 0)} of activations" if known else "WITHOUT activations"
        notes = [
            f"Sizes are in {unit} (decimal) per rank. idle: between steps. peak: the most during a step, {with_};",
            "the columns before it are its parts. gathers, reduces: sent per step. wire: their time on the network,",
            f"hidden behind compute or not. fits: the peak leaves {100 * self.machine.spare:.0f}% of the memory free.",
            f"The optimizer's state takes {self.state_per_parameter:.2f} bytes per parameter.",
        ]
        if timed:
            notes.append(
                "step: estimated (docs/plan.md). waits: the part of it in which compute waits for the network."
            )
            notes.append("tokens/s: of all devices. MFU: FLOPs of the model, without recompute, of --peak-tflops.")
        slow = [row.name for row in self.rows if row.step is not None and row.step.total <= row.step.host]
        if slow:
            notes.append(f"The host limits a step of {', '.join(slow)}; with captured steps it does not (--host-ms 0).")
        if training.microbatches == 1:
            notes.append("ZeRO 1 and 2 are equal: they differ in gradients between micro-batches (--microbatches).")
        if any(row.offload for row in self.rows):
            notes.append(
                "offload: main weights, gradients and optimizer state are in host memory (host). Its peak is an upper "
                "bound" + ("; its step time is not estimated." if timed else ".")
            )
        if any(row.ep > 1 for row in self.rows):
            notes.append(
                "ep: so many neighbouring ranks have different experts. "
                + ("wire and step include the tokens that they send each other." if timed else "")
                + ("Tokens that they send are not counted: give --tokens and --tflops." if not timed else "")
            )
        if not known:
            notes.append(
                "Activations are not known. Give --batch and --length, or --activations, to see what fits with them,\n"
                "and how many weights can stay gathered from forward to backward (keep_for_backward)."
            )
        return notes


def _mesh(name: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{axis}"' for axis in axes) + "," * (len(axes) == 1)
    return f'{name} = init_device_mesh("cuda", {sizes}, mesh_dim_names=({quoted}))'


def compare_strategies(model: ModelShape, machine: Machine, training: Training) -> StrategyPlan:
    """Compare the strategies that fit the number of devices."""
    rows = tuple(
        _row(kind, ep, model, machine, training)
        for ep in _parts(model, machine, training)
        for kind in _STRATEGIES
        if (kind.outer is None or _nodes(machine) > 1) and _can_part(ep, kind.outer, machine)
    )
    fitting = [row for row in rows if row.fits]
    plan = StrategyPlan(model.numel, len(model.units), machine, training, rows, None, "", experts=model.experts)
    if not fitting:
        least = min(rows, key=lambda row: row.peak)
        why = f"Nothing fits: {least.name} takes least, {_gb(least.peak)}; {_gb(machine.usable)} are usable. "
        return replace(plan, why=why + _instead(model, machine, training, rows))
    best = min(fitting, key=lambda row: row.cost)
    why = f"{best.name}: {_gb(machine.memory - best.peak)} of each device are left, and "
    if best.offload:
        why += f"{_gb(best.memory.host)} of host memory are used per rank. Without offload nothing fits. "
        why += _instead(model, machine, training, [row for row in rows if not row.offload])
    elif all(row.offload or row is best for row in fitting):
        why += "nothing else fits on the device."
    else:
        others = [row for row in fitting if not row.offload]
        if best.step is not None:
            why += f"of the {len(others)} that fit none is clearly faster: {1e3 * best.step.total:,.0f} ms per step."
        else:
            why += f"of the {len(others)} that fit it sends least: {1e3 * best.wire:,.1f} ms per step on the network."
        leaner = min(others, key=lambda row: row.peak)
        why += "" if leaner is best else f" {leaner.name} takes least memory: {_gb(best.peak - leaner.peak)} less."
    return replace(plan, advice=best.name, why=why, formats=_formats(model, machine, training, best))


def _parts(model: ModelShape, machine: Machine, training: Training) -> list[int]:
    """Among how many ranks experts may be divided: 1, and as many as a node, the devices and the experts allow."""
    counts = model.expert_counts
    if not counts:
        if training.expert_parts not in (None, 1):
            raise ValueError(
                "the model has no experts to divide among ranks: modules whose class name ends with 'Experts'"
            )
        return [1]

    def divides(parts: int) -> bool:
        return machine.devices % parts == 0 and all(count % parts == 0 for count in counts)

    given = training.expert_parts
    if given is not None:
        if not divides(given):
            what = f"{', '.join(map(str, sorted(counts)))} experts on {machine.devices} devices"
            raise ValueError(f"{what} cannot be in {given} parts")
        return [given]
    inside = min(machine.network.ranks_per_node, machine.devices)
    return sorted({1, max(parts for parts in range(1, inside + 1) if divides(parts) and inside % parts == 0)})


def _can_part(ep: int, outer: Strategy | None, machine: Machine) -> bool:
    """Whether experts can be divided: on one axis, or where the inner one has room; those of HFSDP cannot."""
    return ep == 1 or outer is None or (outer != "optim" and machine.devices // _nodes(machine) % ep == 0)


def _formats(model: ModelShape, machine: Machine, training: Training, best: StrategyRow) -> str:
    """Whether formats of fewer bytes pay: those chosen, beside none; or where none are, gathers and reduces in int8."""
    precision, has = training.precision, training.precision.has_formats
    none = replace(precision, gather_format=None, reduce_format=None)
    other = none if has else replace(precision, gather_format="int8", reduce_format="int8")
    changed = replace(training, precision=other)
    kind = next(kind for kind in _STRATEGIES if kind.kind == best.kind)
    row = _row(kind, best.ep, model, machine, changed)
    plain, coded = (row, best) if has else (best, row)
    if not has and coded.wire > 0.9 * plain.wire:
        return ""
    text = "The formats take" if has else "gather_format and reduce_format 'int8' (docs/formats.md) would take"
    text += f" the wire from {1e3 * plain.wire:,.1f} to {1e3 * coded.wire:,.1f} ms"
    if plain.step is None or coded.step is None:
        return f"{text}. Give --tokens and --tflops to see whether a step is bound by it."
    if coded.step.total < 0.97 * plain.step.total:
        added = "" if has else ' Then: policy = MixedPrecisionPolicy(..., gather_format="int8", reduce_format="int8")'
        return f"{text}, and a step from {1e3 * plain.step.total:,.1f} to {1e3 * coded.step.total:,.1f} ms.{added}"
    text += ". That does not pay: compute can hide it in either case"
    if coded.step.total > plain.step.total:
        text += f", and with what encodes and decodes a step takes {1e3 * coded.step.total:,.1f} ms instead of"
        text += f" {1e3 * plain.step.total:,.1f}"
    return f"{text}."


def picture(model: ModelShape, machine: Machine, training: Training) -> str:
    """What fits at which number of devices: a row for each strategy, a mark for each power of two."""
    counts = [1 << power for power in range(13) if 1 << power <= 8 * max(machine.devices, 8)]
    bytes_only = replace(training, speed=None)
    plans = [compare_strategies(model, replace(machine, devices=count), bytes_only) for count in counts]
    marks = [{row.kind + " ep" * (row.ep > 1): "#" if row.fits else "." for row in plan.rows} for plan in plans]
    names = sorted({name for each in marks for name in each}, key=_place)
    wide, width = max(12, *(len(name) + 2 for name in names)), len(str(counts[-1])) + 1
    lines = ["fits on".ljust(wide) + "".join(str(count).rjust(width) for count in counts) + "  devices"]
    for name in names:
        lines.append(name.ljust(wide) + "".join(each.get(name, " ").rjust(width) for each in marks).rstrip())
    lines += ["", f"#: fits in {_gb(machine.usable)}, .: does not"]
    if any(name.endswith(" ep") for name in names):
        lines.append("ep: experts in as many parts as a node allows")
    return "\n".join(lines)


def _place(name: str) -> tuple[bool, int]:
    """Where a strategy stands in a list."""
    kind = name.removesuffix(" ep")
    return kind != name, [each for each, *_ in _STRATEGIES].index(kind)


def _nodes(machine: Machine) -> int:
    """How many nodes the devices fill exactly; 1 if they do not."""
    inside = machine.network.ranks_per_node
    return machine.devices // inside if machine.devices % inside == 0 else 1


def _row(kind: _Kind, ep: int, model: ModelShape, machine: Machine, training: Training) -> StrategyRow:
    nodes = _nodes(machine)
    mesh = (machine.devices,) if kind.outer is None else (nodes, machine.devices // nodes)
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
    sent = {each: sum(_sent(x) for x in memory.launches if x.reduces == each) for each in (True, False)}
    wire = sum(_seconds(launch, machine.network) for launch in memory.launches)
    step = None
    if training.speed is not None and not kind.offload:
        step = time_of(model, setup, training.speed, machine.network)
        wire += step.exchanges
    peak = memory.peak.total + (training.activations or 0)
    return StrategyRow(*kind, ep, mesh, memory, sent[False], sent[True], wire, peak, peak <= machine.usable, step)


def _sent(launch: PlannedCollective) -> float:
    return launch.times * wire_bytes(launch.kind, launch.size, launch.among)


def _seconds(launch: PlannedCollective, network: Network) -> float:
    level = launch.level(network)
    return launch.times * network.seconds(launch.kind, launch.size, launch.among, level, launch.segments)


def _instead(model: ModelShape, machine: Machine, training: Training, rows: Sequence[StrategyRow]) -> str:
    """What helps where ``rows`` do not fit: recompute, more devices, or neither."""
    activations, recomputed = training.activations or 0.0, training.recomputed
    if recomputed is not None and recomputed < activations:
        text = f"With --recompute activations take {_gb(recomputed)} instead of {_gb(activations)}"
        usable = machine.usable + activations - recomputed
        fitting = [row for row in rows if row.peak <= usable and not row.offload]
        if fitting:
            return f"{text}, and {min(fitting, key=lambda row: row.cost).name} fits."
        training = replace(training, activations=recomputed, recomputed=None)
        return f"{text}. {_instead(model, machine, training, rows)}"
    least, devices = math.inf, machine.devices
    while devices <= _MOST_DEVICES // 2:  # padding grows with the number of devices: at some time they do not help
        devices *= 2
        more = replace(machine, devices=devices)
        found = [_row(_ZERO_3, ep, model, more, training) for ep in _parts(model, more, training)]
        row = min(found, key=lambda row: row.peak)
        if row.fits:
            return f"On {devices} devices {row.name} takes {_gb(row.peak)} and fits."
        if row.peak >= least:
            break
        least = row.peak
    return (
        f"More devices do not help: gathered weights, gradients on their way and activations take {_gb(least)} on any "
        "number of them. Smaller units, or a smaller batch, do."
    )


def _gb(size: float) -> str:
    """In words: GB, or MB of little."""
    return f"{_digits(size / 1e9)} GB" if size >= 1e8 or not size else f"{_digits(size / 1e6)} MB"


def _digits(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.2f}"
