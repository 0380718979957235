"""What a call with bad input is tried on: a sharded model in training, an unsharded one, and what must be as before."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from flatshard import fully_shard

_NUMBERS = itertools.count()
ROWS = torch.linspace(-1, 1, 12).view(3, 4)


class Tiny(nn.Module):
    """Two blocks, a head, a buffer, and a method that is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).sum()


def tiny() -> Tiny:
    torch.manual_seed(5)
    return Tiny()


def shard(model: Tiny) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(ROWS) ** 2).sum()


@dataclass(frozen=True)
class Case:
    """A call that is refused: how, in which words. ``kind`` None: it is harmless, which is all that is asked of it.

    ``phase``: between passes ("rest"), between a forward and its backward ("awaited"), or within a "forward" or a
    "backward".
    """

    name: str
    call: Callable[[Bench], Any]
    kind: Any
    words: str = ""
    phase: str = "rest"


class Bench:
    """A sharded model and its optimizer, beside the same training without sharding; and a model that is not sharded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference, self.model = tiny(), shard(tiny())
        self.plain = tiny()
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (self.reference, self.model)
        ]
        self.optimizer = self.optimizers[1]

    @property
    def block(self) -> Any:
        return self.model.blocks[0]

    @property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))

    def meshes(self, axes: int) -> DeviceMesh:
        return init_device_mesh("cpu", (1,) * axes, mesh_dim_names=tuple("abcdef"[:axes]))

    def new(self) -> Path:
        """A path where nothing is."""
        return self.folder / f"new-{next(_NUMBERS)}"

    def write(self, text: str) -> Path:
        """A new file."""
        path = self.new()
        path.write_text(text)
        return path

    def step(self) -> None:
        """A training step of both; they have the same weights afterwards."""
        for model, optimizer in zip((self.reference, self.model), self.optimizers):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.compare()

    def compare(self) -> None:
        for (name, wanted), found in zip(self.reference.named_parameters(), self.model.parameters()):
            assert isinstance(found, DTensor), name
            torch.testing.assert_close(found.to_local(), wanted.data, msg=lambda text, name=name: f"{name}: {text}")

    # What must not change

    def try_case(self, case: Case) -> str | None:
        """What is wrong about how a call is refused; None where all is well."""
        try:
            return getattr(self, f"_at_{case.phase}")(case)
        except Exception as error:
            return f"afterwards: {type(error).__name__}: {error}"

    def _at_rest(self, case: Case) -> str | None:
        before = self.look()
        wrong = _refused(case, self) or _changed(before, self.look())
        self.step()
        self._shard_plain()
        return wrong

    def _at_awaited(self, case: Case) -> str | None:
        losses = [loss_of(model) for model in (self.reference, self.model)]
        before = self.look()
        wrong = _refused(case, self)
        if wrong is None and case.kind is not None:  # what is harmless may still reshard
            wrong = _changed(before, self.look())
        for loss, optimizer in zip(losses, self.optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.compare()
        self.step()
        return wrong

    def _at_forward(self, case: Case) -> str | None:
        told: list[str | None] = []
        hook = self.model.blocks[1].register_forward_hook(lambda *_: told.append(_refused(case, self)))
        try:
            self.step()
        finally:
            hook.remove()
        self.step()
        return told[0]

    def _at_backward(self, case: Case) -> str | None:
        told: list[str | None] = []

        def at_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: told.append(_refused(case, self)))

        hook = self.model.blocks[1].register_forward_hook(at_output)
        try:
            self.step()
        finally:
            hook.remove()
        self.step()
        return told[0]

    def _shard_plain(self) -> None:
        """The unsharded model can still be sharded and trained, as right as any; a new one takes its place."""
        wanted = tiny()
        for model in (wanted, shard(self.plain)):
            loss_of(model).backward()
        for (name, ours), theirs in zip(self.plain.named_parameters(), wanted.parameters()):
            torch.testing.assert_close(ours.grad.to_local(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
        self.plain = tiny()

    def look(self) -> dict[str, Any]:
        """Everything about both models and the optimizer that a refused call leaves as it was."""
        found: dict[str, Any] = {}
        for title, model in (("model", self.model), ("plain", self.plain)):
            for name, module in model.named_modules():
                found[f"{title} {name}: class"] = type(module)
                found[f"{title} {name}: attributes"] = sorted(module.__dict__)
                for hooks in _HOOKS:
                    found[f"{title} {name}: {hooks}"] = list(getattr(module, hooks))
                unit = module.__dict__.get("_flatshard_unit")
                if unit is not None:
                    found[f"{title} {name}: settings"] = dict(vars(unit.intent))
                    found[f"{title} {name}: full"] = [group.is_full for group in unit.groups]
                    found[f"{title} {name}: precision"] = unit.policy
            for name, parameter in model.named_parameters(remove_duplicate=False):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                found[f"{title} {name}: parameter"] = (id(parameter), parameter.requires_grad, parameter.device.type)
                found[f"{title} {name}: marks"] = sorted(parameter.__dict__)
                found[f"{title} {name}: values"] = local.detach().clone()
                found[f"{title} {name}: gradient"] = parameter.grad is None
            found[f"{title} buffers"] = [(name, id(buffer)) for name, buffer in model.named_buffers()]
        found["optimizer: class"] = type(self.optimizer)
        found["optimizer: attributes"] = sorted(
            name for name in self.optimizer.__dict__ if name != "_flatshard_checked"
        )
        for number, group in enumerate(self.optimizer.param_groups):
            found[f"optimizer: group {number}"] = {key: value for key, value in group.items() if key != "params"}
            found[f"optimizer: parameters {number}"] = list(map(id, group["params"]))
        for number, entries in enumerate(self.optimizer.state.values()):
            for key, value in entries.items():
                value = value.to_local() if isinstance(value, DTensor) else value
                found[f"optimizer: {number} {key}"] = value.clone() if isinstance(value, torch.Tensor) else value
        return found


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _refused(case: Case, bench: Bench) -> str | None:
    try:
        case.call(bench)
    except BaseException as error:
        if case.kind is None:
            return f"{type(error).__name__}: {error}"
        if not isinstance(error, case.kind):
            return f"a {type(error).__name__}, not {case.kind}: {error}"
        if not re.search(case.words, str(error), re.DOTALL):
            return f"says nothing of {case.words!r}: {error}"
        return None
    return None if case.kind is None else "nothing was raised"


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for name in (*before, *after):
        if name not in before or name not in after:
            return f"changed: {name}"
        one, two = before[name], after[name]
        same = torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
        if not same:
            return f"changed: {name}: {one} -> {two}"
    return None
