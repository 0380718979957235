"""Random models whose units are called by all ranks, and of which each rank uses what it likes inside of them.

`build(seed, world)` makes the same one on every rank, sharded or not. Every module takes and gives rows of `DIM`
features. A `Clock`, which the modules of one model share, says what this rank uses in this micro-batch, and is late.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from flatshard import fully_shard

DIM = 4


class Clock:
    """What this rank uses now, by the number of the module; the same for a forward and its recompute."""

    def __init__(self) -> None:
        self.used: dict[int, tuple[int, ...]] = {}
        self.delays: random.Random | None = None  # of the model that communicates

    def hold_up(self, *_: Any) -> None:
        if self.delays is not None and self.delays.random() < 0.1:
            time.sleep(0.002 * self.delays.random())

    def around(self, tensor: torch.Tensor) -> torch.Tensor:
        """Be late here, and when the gradient of this comes by."""
        self.hold_up()
        if tensor.requires_grad and self.delays is not None:
            tensor.register_hook(self.hold_up)
        return tensor


TWICE = 5000  # in cases from this seed on, units are called twice and recomputed by reentrant checkpoints


class Branches(nn.Module):
    """Parameters of several kinds, each used or not. With nothing used, rows go through as they are."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        super().__init__()
        self.clock, self.number = case.clock, case.count()
        self.kinds = [rng.choice(case.kinds) for _ in range(rng.choice((1, 2, 2, 3)))]
        self.items = nn.ParameterList()
        for kind in self.kinds:
            shape = {"vector": (DIM,), "own": (2, DIM, DIM)}.get(kind, (DIM, DIM))
            values = 0.4 * torch.randn(shape, dtype=torch.float64 if kind == "wide" else torch.float32)
            self.items.append(nn.Parameter(values, requires_grad=kind != "frozen"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.clock.used[self.number]:
            kind, item = self.kinds[index], self.items[index]
            if kind == "vector":
                y = x * item
            elif kind == "own":
                y = torch.einsum("kij,nj->ni", item, x)
            else:
                y = (x.to(item.dtype) @ item).to(x.dtype)
            x = 0.7 * x + torch.tanh(y)
        return self.clock.around(x)


class Tree(nn.Module):
    """Branches of its own before and after its parts, which come in a row, in parallel, or twice."""

    def __init__(self, case: Case, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.clock = case.clock
        self.way = rng.choice(("row", "row", "parallel", "twice"))
        self.before = Branches(case, rng) if rng.random() < 0.4 else nn.Identity()
        self.parts = nn.ModuleList(_part(case, rng, depth - 1) for _ in range(rng.choice((1, 2, 3))))
        self.after = Branches(case, rng) if rng.random() < 0.4 else nn.Identity()
        self.recompute = [rng.choice((None, None, None, "reentrant", "non-reentrant")) for _ in self.parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.way == "parallel":
            x = torch.stack([self.call(number, x) for number in range(len(self.parts))]).mean(0)
        else:
            for number in (*range(len(self.parts)), *((0,) if self.way == "twice" else ())):
                x = self.call(number, x)
        return self.clock.around(self.after(x))

    def call(self, number: int, x: torch.Tensor) -> torch.Tensor:
        part, mode = self.parts[number], self.recompute[number]
        if mode is None or not (torch.is_grad_enabled() and x.requires_grad):
            return part(x)
        made: torch.Tensor = checkpoint(part, x, use_reentrant=mode == "reentrant")
        return made


def _part(case: Case, rng: random.Random, depth: int) -> nn.Module:
    return Tree(case, rng, depth) if depth > 0 and rng.random() < 0.5 else Branches(case, rng)


class Root(nn.Module):
    """A tree, and heads, of which each rank uses at least one: the first backward must have somewhere to begin."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        super().__init__()
        self.clock, self.number = case.clock, case.count()
        self.tree = Tree(case, rng, rng.choice((1, 2, 3)))
        self.heads = nn.ModuleList(nn.Linear(DIM, 2, bias=False) for _ in range(rng.choice((1, 2, 3))))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.tree(x)
        return [self.heads[index](x) for index in self.clock.used[self.number]]


@dataclass
class Case:
    """A model, its units from the inside out, and how a step goes."""

    seed: int
    world: int
    clock: Clock = field(default_factory=Clock)
    kinds: list[str] = field(default_factory=list)
    model: Root = field(init=False)
    units: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    mesh: str = "flat"  # or "hybrid", or "own": some parameters lie on another mesh than their unit
    steps: int = 2
    micro: int = 1
    sync: str = "always"  # or "last", or "microbatch"
    modules: int = 0

    def count(self) -> int:
        self.modules += 1
        return self.modules - 1

    def choose(self, rank: int, number: int) -> None:
        """Say what a rank uses in a micro-batch."""
        rng = random.Random(f"{self.seed} {rank} {number}")
        for module in self.model.modules():
            if isinstance(module, (Branches, Root)):
                count = len(module.items if isinstance(module, Branches) else module.heads)
                chosen = rng.sample(range(count), rng.randint(min(1, count), count))
                self.clock.used[module.number] = tuple(sorted(chosen))

    def __str__(self) -> str:
        """What to read when it fails."""
        lines = [
            f"seed {self.seed} of {self.world} ranks: mesh {self.mesh}, {self.steps} steps of {self.micro}, "
            f"reduced {self.sync}"
        ]
        for name, module in self.model.named_modules():
            if isinstance(module, Branches):
                lines.append(f"  {name}: {module.kinds}, here now {self.clock.used.get(module.number)}")
            elif isinstance(module, Tree):
                lines.append(f"  {name}: {module.way}, recompute {module.recompute}")
        return "\n".join([*lines, *(f"  unit {names} {kwargs}" for names, kwargs in self.units)])


def build(seed: int, world: int) -> Case:
    """The case of a seed; its model is not sharded yet."""
    rng = random.Random(7000 + seed)
    torch.manual_seed(seed)
    case = Case(seed, world)
    if world == 4:
        case.mesh = rng.choice(("flat", "hybrid", "own"))
    case.kinds = ["matrix", "matrix", "vector", rng.choice(("matrix", "wide")), rng.choice(("vector", "frozen"))]
    case.kinds += ["own"] if case.mesh == "own" else []
    case.steps, case.micro = rng.choice((2, 2, 3)), rng.choice((1, 2, 3))
    case.sync = rng.choice(("always", "last", "microbatch"))
    case.model = Root(case, rng)
    if seed >= TWICE:
        for tree in case.model.modules():
            if isinstance(tree, Tree):
                tree.way, tree.recompute = "twice", ["reentrant"] * len(tree.parts)
    case.units = [*_units(rng, case.model.tree, "tree"), ([""], _choices(rng))]
    return case


def _choices(rng: random.Random) -> dict[str, Any]:
    return {"reshard_after_forward": rng.choice((None, None, True, False))}


def _units(rng: random.Random, tree: Tree, prefix: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    wanted = []
    for number, part in enumerate(tree.parts):
        name = f"{prefix}.parts.{number}"
        if isinstance(part, Tree):
            yield from _units(rng, part, name)
        if rng.random() < 0.7:
            wanted.append([name])
    if len(wanted) > 1 and tree.way == "row" and rng.random() < 0.3:
        wanted = [[name for names in wanted for name in names]]  # one unit of several modules
    yield from ((names, _choices(rng)) for names in wanted)
    if prefix == "tree" and rng.random() < 0.4:
        yield [prefix], _choices(rng)


class Meshes:
    """Those of all cases: making process groups takes longer than a case."""

    def __init__(self, world: int) -> None:
        self.flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        self.hybrid = self.own = None
        if world == 4:
            self.hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            if hasattr(_fsdp_common, "ShardPlacementResult"):  # not in older versions of torch
                self.own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))["data"]


def shard(case: Case, meshes: Meshes) -> Any:
    """Shard the model of a case."""
    mesh: DeviceMesh | None = meshes.hybrid if case.mesh == "hybrid" else meshes.flat
    choose = None if case.mesh != "own" or meshes.own is None else on_own_mesh(meshes.own)
    for names, kwargs in case.units:
        modules: Any = [case.model.get_submodule(name) for name in names]
        given = modules if len(modules) > 1 else modules[0]
        fully_shard(given, mesh=mesh, shard_placement_fn=choose, **kwargs)
    model: Any = case.model
    model.set_reduce_scatter_unused_params(True)
    return model


def on_own_mesh(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    info = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return lambda p: _fsdp_common.ShardPlacementResult(Shard(0), info) if p.dim() == 3 else None
