"""Random models, and how they are sharded: `build(seed)` makes the same one on every rank and in the reference.

Every module takes and gives rows of `DIM` features, so they nest in any way. A branch is chosen by the clock that the
modules of one model share; the test sets it, alike on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 7
HIDDEN = (1, 2, 3, 5, 8, 11, 13)


@dataclass
class Result:
    rows: torch.Tensor
    extra: Any = None


class Named(NamedTuple):
    rows: torch.Tensor
    extra: Any


def rows_of(output: Any) -> torch.Tensor:
    """The rows in what a module returns, with a part of every other floating-point tensor in it."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, (Result, Named)):
        rows, extra = output.rows, output.extra
    elif isinstance(output, dict):
        rows, extra = output["rows"], output["extra"]
    else:
        rows, *extra = output
    while isinstance(extra, (list, tuple, dict)):
        extra = extra["deep"] if isinstance(extra, dict) else extra[-1]
    return rows if extra is None else rows + 0.25 * extra


PACKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tensor": lambda rows, extra: rows + 0.25 * extra,
    "tuple": lambda rows, extra: (rows, None, extra),
    "nested": lambda rows, extra: (rows, [1, {"deep": extra}]),
    "dict": lambda rows, extra: {"name": "x", "extra": extra, "rows": rows},
    "dataclass": lambda rows, extra: Result(rows, {"deep": (extra,)}),
    "namedtuple": lambda rows, extra: Named(rows, extra),
    "only": lambda rows, extra: Result(rows),
}


class Leaf(nn.Module):
    """Some parameters, used or not, and one way to use them."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        super().__init__()
        self.kind = kind
        hidden = rng.choice(HIDDEN)
        if kind in ("mlp", "frozen", "part"):
            self.up = nn.Linear(DIM, hidden, bias=rng.random() < 0.5)
            self.down = nn.Linear(hidden, DIM)
        if kind == "frozen":
            self.requires_grad_(False)
        elif kind == "part":
            rng.choice([self.up.weight, self.down.weight, self.down.bias]).requires_grad_(False)
        elif kind == "tied":
            self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
            self.two.weight = self.one.weight
        elif kind == "scalars":
            self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(DIM))
            self.fixed = nn.Parameter(torch.tensor(0.3), requires_grad=False)
        elif kind == "empty":
            self.none = nn.Parameter(torch.zeros(0, DIM), requires_grad=rng.random() < 0.7)
            self.hollow = nn.Parameter(torch.zeros(rng.choice((1, 3)), 0))
            if rng.random() < 0.6:
                self.some = nn.Parameter(torch.randn(1, DIM))
        elif kind == "mixed":
            self.w32 = nn.Parameter(torch.randn(DIM))
            self.w16 = nn.Parameter(torch.randn(hidden, DIM, dtype=torch.bfloat16))
            self.w8 = nn.Parameter(torch.randint(-3, 4, (DIM,), dtype=torch.int8), requires_grad=False)
        elif kind == "unused":
            self.used, self.never = nn.Linear(DIM, DIM), nn.Linear(hidden, 3)
        elif kind == "buffers":
            self.weight = nn.Parameter(torch.randn(hidden, 1, DIM))
            self.register_buffer("offset", torch.randn(DIM))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.pack = rng.choice(sorted(PACKS))

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor | None = None) -> Any:
        y = torch.tanh(getattr(self, f"run_{self.kind}")(x))
        if gate is not None:
            y = y * gate
        return PACKS[self.pack](0.8 * x + y, y)

    def run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    run_frozen = run_part = run_mlp

    def run_tied(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))

    def run_scalars(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift * self.fixed

    def run_empty(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, self.none])
        return y * self.some + self.hollow.sum() if hasattr(self, "some") else y

    def run_mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w32 * self.w8 + self.w16.float().sum(0)

    def run_unused(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)

    def run_buffers(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (x + self.offset) * self.weight.sum((0, 1))


LEAVES = ("mlp", "mlp", "frozen", "part", "tied", "scalars", "empty", "mixed", "unused", "buffers")


class Tree(nn.Module):
    """Children in a row, some of them recomputed; and perhaps a weight of its own before or after them."""

    def __init__(self, rng: random.Random, depth: int, clock: dict[str, int]) -> None:
        super().__init__()
        self.clock = clock
        self.kind = rng.choice(("row", "row", "twice", "branch"))
        count = rng.choice((1, 2, 3)) if self.kind == "row" else rng.choice((2, 2, 3))
        self.parts = nn.ModuleList(_module(rng, depth - 1, clock) for _ in range(count))
        self.recompute = [rng.choice((None, None, "reentrant", "non-reentrant")) for _ in range(count)]
        self.gated = [rng.random() < 0.3 for _ in range(count)]
        self.own = nn.Linear(DIM, DIM) if rng.random() < 0.5 else None
        if self.own is not None and rng.random() < 0.3:
            self.own.requires_grad_(False)
        self.own_first = rng.random() < 0.5
        self.pack = rng.choice(sorted(PACKS))

    def order(self) -> list[int]:
        every = list(range(len(self.parts)))
        if self.kind == "branch":
            return [self.clock["now"] % len(every)]
        return [*every, 0] if self.kind == "twice" else every

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor | None = None) -> Any:
        if self.own is not None and self.own_first:
            x = torch.tanh(self.own(x))
        y = x
        for index in self.order():
            y = self._call(index, y, 0.5 * y if self.gated[index] else None)
        if self.own is not None and not self.own_first:
            y = self.own(y)
        if gate is not None:
            y = y + 0.1 * gate
        return PACKS[self.pack](y, x)

    def _call(self, index: int, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        part, mode = self.parts[index], self.recompute[index]

        def run(x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
            return rows_of(part(x) if gate is None else part(x, gate=gate))

        if mode is None or not (torch.is_grad_enabled() and x.requires_grad):
            return run(x, gate)
        made: torch.Tensor = checkpoint(run, x, gate, use_reentrant=mode == "reentrant")
        return made


def _module(rng: random.Random, depth: int, clock: dict[str, int]) -> nn.Module:
    if depth <= 0 or rng.random() < 0.35:
        return Leaf(rng, rng.choice(LEAVES))
    return Tree(rng, depth, clock)


@dataclass
class Case:
    """A model and what is to be done with it."""

    seed: int
    model: nn.Module
    clock: dict[str, int]
    units: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)  # names, arguments; inside out
    micro: int = 1
    optimizer: str = "sgd"
    set_to_none: bool = True
    evaluate: bool = False

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: micro={self.micro} {self.optimizer} set_to_none={self.set_to_none}"]
        for name, module in self.model.named_modules():
            if isinstance(module, (Leaf, Tree)):
                held = {n: f"{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}" for n, p in _own(module)}
                modes = f" recompute={module.recompute} gated={module.gated}" if isinstance(module, Tree) else ""
                lines.append(f"  {name or '(root)'}: {module.kind} -> {module.pack}{modes} {held}")
        return "\n".join([*lines, *(f"  unit {names} {kwargs}" for names, kwargs in self.units)])


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if not n.startswith("parts.")]


def build(seed: int) -> Case:
    """The model of a seed, its values included, and how to shard and train it."""
    rng, clock = random.Random(1000 + seed), {"now": 0}
    torch.manual_seed(seed)
    model = Tree(rng, rng.choice((2, 3)), clock)
    case = Case(seed, model, clock, micro=rng.choice((1, 2)), optimizer=rng.choice(("sgd", "adamw")))
    case.set_to_none, case.evaluate = rng.random() < 0.7, rng.random() < 0.4
    _choose_units(rng, model, "", case.units)
    case.units.append(([""], _arguments(rng)))
    return case


def _choose_units(rng: random.Random, tree: Tree, prefix: str, units: list[tuple[list[str], dict[str, Any]]]) -> None:
    wanted = []
    for index, part in enumerate(tree.parts):
        name = f"{prefix}parts.{index}"
        if isinstance(part, Tree):
            _choose_units(rng, part, f"{name}.", units)
        if rng.random() < 0.6:
            wanted.append([name])
    if len(wanted) > 1 and rng.random() < 0.3:
        wanted = [[name for names in wanted for name in names]]  # one unit of several modules
    units.extend((names, _arguments(rng)) for names in wanted)


def _arguments(rng: random.Random) -> dict[str, Any]:
    return {"reshard_after_forward": rng.choice((None, None, True, False))}
