"""The input and the result of ``flatshard plan``, and how the result is printed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from flatshard.layout.planner import LayoutName
from flatshard.policy import MixedPrecisionPolicy, Strategy
from flatshard.rehearsal.network import Network
from flatshard.tools.dry_run import Memory
from flatshard.tools.group_bytes import StateOf
from flatshard.tools.model_shapes import ModelShape
from flatshard.tools.timing import Estimate, Speed


@dataclass(frozen=True)
class Machine:
    """Devices and their network. ``memory``: bytes per device.

    ``spare``: the fraction of memory that a plan leaves free for what it does not count: fragmentation, buffers of the
    communication library, temporaries of the optimizer's step.
    """

    devices: int
    memory: float
    network: Network
    spare: float = 0.1

    @property
    def usable(self) -> float:
        return (1 - self.spare) * self.memory


@dataclass(frozen=True)
class Training:
    """How the model is trained. ``state`` and ``microbatches``: as in `TrainingSetup`.

    ``activations``: bytes per rank; None if unknown. ``recompute``: blocks are recomputed in backward; if they are not,
    ``recomputed`` is what activations would take then. ``speed``: the speed of a device; None: no step times.
    ``expert_parts``: size of expert parallelism; None: try 1, and as many ranks of a node as possible.
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
    """One strategy. ``gathers`` and ``reduces``: bytes that a rank sends per step. ``wire``: their modelled seconds.

    ``step``: the estimated step time; None if the speed of a device is unknown. ``ep``: size of expert parallelism.
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
    peak: float  # including activations
    fits: bool
    step: Estimate | None

    @property
    def name(self) -> str:
        return f"{self.kind} ep {self.ep}" if self.ep > 1 else self.kind

    @property
    def cost(self) -> tuple[bool, float, float]:
        """The sort key: the best strategy has no offload, the least time (to two digits), and the least memory."""
        seconds = self.wire if self.step is None else float(f"{self.step.total:.2g}")
        return self.offload, seconds, self.peak


@dataclass(frozen=True)
class StrategyPlan:
    """A comparison of strategies. ``advice``: the strategy to use, or None if none fits; ``why``: the reason.

    ``formats``: a sentence about what encoded collectives save, or would save.
    """

    model: ModelShape
    machine: Machine
    training: Training
    rows: tuple[StrategyRow, ...]
    advice: str | None
    why: str
    formats: str = ""

    @property
    def state_per_parameter(self) -> float:
        """Bytes of optimizer state per parameter, over all ranks; frozen parameters have none."""
        whole = self.rows[0].memory.resting.state  # in ZeRO 0 a rank has all of it, without padding
        return whole / max(self.model.numel, 1)

    def to_json(self) -> str:
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            entry = {"name": row.name, **asdict(row)}
            entry["memory"].pop("launches")
            for moment in ("resting", "peak"):
                entry["memory"][moment]["total"] = getattr(row.memory, moment).total
            rows.append(entry)
        machine = {name: getattr(self.machine, name) for name in ("devices", "memory", "spare")}
        network = self.machine.network
        document = {
            "parameters": self.model.numel,
            "units": len(self.model.units),
            "state_bytes_per_parameter": self.state_per_parameter,
            "machine": {**machine, "network": network.name, "ranks_per_node": network.ranks_per_node},
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
        """Code that shards a model with the recommended strategy; empty if none fits."""
        row = self.best
        if row is None:
            return ""
        precision = self.training.precision
        named = {name: getattr(precision, name) for name in ("param_dtype", "reduce_dtype", "main_dtype", "grad_dtype")}
        named |= {name: getattr(precision, name) for name in ("gather_format", "reduce_format")}
        code = {name: value if isinstance(value, torch.dtype) else repr(value) for name, value in named.items()}
        dtypes = ", ".join(f"{name}={code[name]}" for name, value in named.items() if value is not None)
        axes = ("dp",) if len(row.mesh) == 1 else ("replicas", "shard")
        choices = ["mesh=mesh", "mp_policy=policy"]
        choices += [f'strategy="{row.strategy}"'] if row.strategy != "optim_grads_params" else []
        choices += [f'outer_strategy="{row.outer}"'] if row.outer == "optim" else []
        choices += [f'layout="{self.training.layout}"'] if self.training.layout != "tensor" else []
        choices += ["offload_policy=CPUOffloadPolicy()"] if row.offload else []
        choices += [f"offload_bytes={self.offload_bytes:,}".replace(",", "_")] if self.offload_bytes else []
        kept = self.kept_bytes
        if kept:
            choices.append('reshard_after_forward="auto"')
            choices.append(f"schedule=SchedulePolicy(keep_for_backward={kept:,})".replace(",", "_"))
        names = [*["CPUOffloadPolicy"] * row.offload, "MixedPrecisionPolicy", *["SchedulePolicy"] * bool(kept)]
        names.append("shard_model")
        before = "# before: torch.utils.checkpoint in every block (Transformers: gradient_checkpointing_enable)"
        lines = [before] * self.training.recompute
        lines += [_mesh("mesh", row.mesh, axes), f"policy = MixedPrecisionPolicy({dtypes})"]
        if row.ep > 1:
            names.append("Experts")
            *outer, last = row.mesh
            sparse = (*outer, last // row.ep, row.ep)
            lines.append(_mesh("sparse", sparse, (*axes[:-1], "edp", "ep")))
            same = ", ".join(f'"{axis}"' for axis in (*axes[:-1], "edp"))
            lines.append(f'experts = Experts({list(self.model.experts)}, mesh=sparse[{same}], apart=sparse["ep"])')
            choices.append("experts=experts")
            kind = self.model.experts[0].rpartition(".")[2]
            part = f"stacked experts, 1 in {row.ep} of them on each rank, and send tokens to the other ranks"
            lines.append(f"# {kind} of the model must already hold {part} (docs/meshes.md)")
        imports = ["import torch", "from torch.distributed.device_mesh import init_device_mesh"]
        imports.append(f"from flatshard import {', '.join(sorted(names))}")
        return "\n".join([*imports, *lines, f"shard_model(model, {', '.join(choices)})"])

    @property
    def offload_bytes(self) -> int:
        """Bytes of main weights per rank that must be offloaded; 0 if all must, or if activations are unknown."""
        row = self.best
        if row is None or not row.offload or self.training.activations is None:
            return 0
        same = [each for each in self.rows if (each.strategy, each.outer, each.ep) == (row.strategy, row.outer, row.ep)]
        whole = next(each for each in same if not each.offload)
        # Offloaded units are still gathered and staged on the device.
        too_much = whole.peak + row.memory.peak.gathered + row.memory.peak.staging - self.machine.usable
        peak = whole.memory.peak
        needed = math.ceil(too_much / (peak.main + peak.state + peak.gradients) * peak.main / 10**8) * 10**8
        return needed if needed < peak.main else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that are left for weights to stay gathered from forward to backward; 0 if activations are unknown."""
        row = self.best
        if row is None or self.training.activations is None or not row.gathers or not row.memory.peak.gathered:
            return 0
        full = sum(launch.size for launch in row.memory.launches if launch.kind == "all_gather" and launch.times > 1)
        left = int(min(self.machine.usable - row.peak, full) // 10**8) * 10**8
        return max(left, 0)

    def table(self) -> str:
        """The comparison as text for a terminal."""
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
            f"{self.model.numel:,} parameters in {len(self.model.units)} units; {machine.devices} devices of "
            f"{gigabytes(machine.memory)}, {machine.network.ranks_per_node} per node",
            f"network {machine.network.describe(machine.devices)}",
        ]
        after = [*([code, ""] if code else []), self.why, *([self.formats] if self.formats else [])]
        return "\n".join([*head, "", *table, "", *self._legend(unit), "", *after])

    def _legend(self, unit: str) -> list[str]:
        training, timed = self.training, self.training.speed is not None
        known = training.activations is not None
        with_ = f"with {gigabytes(training.activations or 0)} of activations" if known else "WITHOUT activations"
        notes = [
            f"Sizes are in {unit} (decimal) per rank. idle: between steps. peak: the maximum during a step, {with_};",
            "main to staging are its parts. main: main weights. compute: compute weights that stay in memory.",
            "staging: gradients until they are reduced. gathers, reduces: sent per step. wire: time on the network,",
            f"hidden behind compute or not. fits: the peak leaves {100 * self.machine.spare:.0f}% of the memory free.",
            f"Optimizer state takes {self.state_per_parameter:.2f} bytes per parameter.",
        ]
        if timed:
            notes += [
                "step: the estimated step time (docs/plan.md). waits: how much of it compute waits for the network.",
                "tokens/s: on all devices. MFU: model FLOP/s, without recompute, relative to --peak-tflops.",
            ]
        slow = [row.name for row in self.rows if row.step is not None and row.step.total <= row.step.host]
        if slow:
            notes.append(f"The host bounds the step of {', '.join(slow)}; captured steps avoid this (--host-ms 0).")
        if training.microbatches == 1:
            notes.append("ZeRO 1 and 2 are equal here: they differ only between micro-batches (--microbatches).")
        notes += [
            "offload: main weights, gradients and optimizer state are in host memory (host). Its peak is an upper",
            "bound; its step time is not estimated." if timed else "bound.",
        ]
        if any(row.ep > 1 for row in self.rows):
            note = "wire and step include the tokens that they send to each other."
            note = note if timed else "Tokens that they send are not counted: give --tokens and --tflops."
            notes.append(f"ep N: expert parallelism; N neighbouring ranks hold different experts. {note}")
        if not known:
            notes += [
                "Activations are unknown. Give --batch and --length, or --activations, to see what fits with them,",
                "and how many weights can stay gathered from forward to backward (keep_for_backward).",
            ]
        return notes


def _mesh(name: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{axis}"' for axis in axes) + "," * (len(axes) == 1)
    return f'{name} = init_device_mesh("cuda", {sizes}, mesh_dim_names=({quoted}))'


def gigabytes(size: float) -> str:
    """A size in GB, or in MB if it is small."""
    return f"{_digits(size / 1e9)} GB" if size >= 1e8 or not size else f"{_digits(size / 1e6)} MB"


def _digits(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.2f}"
