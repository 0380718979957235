"""What a plan of ``flatshard plan`` holds, and how it is printed."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from html import escape
from typing import Any

import torch

from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, Strategy
from flatshard.rehearsal.network import Network
from flatshard.tools.group_bytes import StateOf
from flatshard.tools.memory import Memory
from flatshard.tools.timing import Estimate, Speed


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
            raise ValueError("devices must be at least 1, memory more than 0, and spare from 0 to below 1")

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
        speed = self.training.speed
        unit, scale = ("GB", 1e9) if max(row.peak for row in self.rows) >= 1e8 else ("MB", 1e6)
        header = ["", "mesh", "idle", "main", "compute", "state", "grads", "gathered", "staging", "peak", "host"]
        header += ["gathers", "reduces", "wire ms"]
        header += ["step ms", "waits", "tokens/s", "MFU"] * (speed is not None) + ["fits"]
        lines = [header]
        for row in self.rows:
            peak, step = row.memory.peak, row.step
            sizes: list[float] = [row.memory.resting.total, *astuple(peak), row.peak]
            sizes += [row.memory.host, row.gathers, row.reduces]
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
        machine, code = self.machine, self.python()
        head = [
            f"{self.numel:,} parameters in {self.units} units; {machine.devices} devices of "
            f"{gigabytes(machine.memory)}, {machine.network.ranks_per_node} per node",
            f"network {machine.network.describe(machine.devices)}",
        ]
        said = [*([code, ""] if code else []), self.why, *([self.formats] if self.formats else [])]
        return "\n".join([*head, "", *table, "", *self._legend(unit), "", *said])

    def _legend(self, unit: str) -> list[str]:
        """What the columns are, and what to know of the rows."""
        training, timed = self.training, self.training.speed is not None
        known = training.activations is not None
        with_ = f"with {gigabytes(training.activations or 0)} of activations" if known else "WITHOUT activations"
        notes = [
            f"Sizes are in {unit} (decimal) per rank. idle: between steps. peak: the most during a step, {with_};",
            "main to staging are its parts. main: what the optimizer steps. compute: weights in the dtype of compute.",
            "staging: buffers of collectives. gathers, reduces: sent per step. wire: their time on the network,",
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
        notes.append(
            "offload: main weights, gradients and optimizer state are in host memory (host). Its peak is an upper"
        )
        notes.append("bound" + ("; its step time is not estimated." if timed else "."))
        if any(row.ep > 1 for row in self.rows):
            told = "wire and step include the tokens that they send each other."
            told = told if timed else "Tokens that they send are not counted: give --tokens and --tflops."
            notes.append(f"ep: so many neighbouring ranks have different experts. {told}")
        if not known:
            notes.append(
                "Activations are not known. Give --batch and --length, or --activations, to see what fits with them,\n"
                "and how many weights can stay gathered from forward to backward (keep_for_backward)."
            )
        return notes


def _mesh(name: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{axis}"' for axis in axes) + "," * (len(axes) == 1)
    return f'{name} = init_device_mesh("cuda", {sizes}, mesh_dim_names=({quoted}))'


def gigabytes(size: float) -> str:
    """In words: GB, or MB of little."""
    return f"{_digits(size / 1e9)} GB" if size >= 1e8 or not size else f"{_digits(size / 1e6)} MB"


def _digits(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.2f}"
