"""A device that runs out of memory in a step: after `reset` the next step is clean, and no memory is lost."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from flatshard.engine.units.unit import unit_of
from tests.dist.test_recovery import at_rest

WIDTH, DEPTH, TOKENS = 1024, 6, 4096
MORE = 24 << 20  # from one try to the next; torch takes what is smaller than 10 MiB out of 20
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = ("plain", "bfloat16", "recomputed", "offloaded")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.layers, self.recomputed = nn.ModuleList(Layer() for _ in range(DEPTH)), recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x.float().square().mean()


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model = Stack(kind == "recomputed").cuda()
    choices: dict[str, Any] = {"mp_policy": BF16} if kind == "bfloat16" else {}
    if kind == "offloaded":
        choices["offload_policy"] = CPUOffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, **choices)
    return fully_shard(model, **choices)


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().cpu().clone() for parameter in model.parameters()]  # type: ignore[union-attr]


def settled(model: nn.Module) -> int:
    """The bytes in use when nothing is going on."""
    model.zero_grad()
    root = unit_of(model).root
    assert root is not None
    with torch.no_grad():
        root.free_cleared_gradients()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def runs_out(room: int, action: Callable[[], None]) -> bool:
    """Do it with so many bytes of memory more than are reserved. Whether that was too little."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + room) / total))
    try:
        action()
    except torch.OutOfMemoryError:
        return True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return False


def _in_forward_and_backward(rank: int, world: int, kind: str) -> int:
    model, data = build(kind), torch.randn(TOKENS, WIDTH, device="cuda")

    def step() -> None:
        model(data).backward()

    for _ in range(3):
        step()
        wanted = grads_of(model)
        before = settled(model)
    tries, phases = 0, set()
    while runs_out(tries * MORE, step):
        phases.add(unit_of(model).root.program.running)  # type: ignore[union-attr]
        model.reset()
        model.zero_grad()
        at_rest(model)
        step()
        for found, grad in zip(grads_of(model), wanted):
            assert torch.equal(found, grad), f"after {tries} tries"
        assert settled(model) == before, f"after {tries} tries"
        tries += 1
        assert tries < 200
    assert len(phases) >= 2, phases  # it ran out in forward, and in backward
    return tries


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_runs_out_of_memory(gpu_ranks, kind):
    assert gpu_ranks(1, _in_forward_and_backward, kind)[0] > 4


def _in_the_optimizer(rank: int, world: int, local: bool) -> int:
    """The first step makes the state. Too little memory for that: put back what there was, and do it again."""
    weights, tries = [], 0
    for broken in (False, True):
        model, data = build("plain"), torch.randn(TOKENS, WIDTH, device="cuda").fill_(0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if local:
            fully_shard_optimizer(optimizer)
        before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        saved = copy.deepcopy(optimizer.state_dict())
        model(data).backward()
        while broken and runs_out(tries * MORE, optimizer.step):
            tries += 1
            optimizer.load_state_dict(copy.deepcopy(saved))
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), before):
                    parameter.to_local().copy_(weight)
        if not broken:
            optimizer.step()
        weights.append([parameter.to_local().detach().cpu().clone() for parameter in model.parameters()])
        optimizer.zero_grad()
        model(data).backward()  # and it goes on
        optimizer.step()
    for one, other in zip(*weights):
        assert torch.equal(one, other)
    return tries


@pytest.mark.parametrize("local", [False, True], ids=["DTensors", "local"])
def test_an_optimizer_that_runs_out_of_memory(gpu_ranks, local):
    assert gpu_ranks(1, _in_the_optimizer, local)[0] > 0
