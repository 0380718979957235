"""Gradients exist on all ranks or on none: where any rank's batch has used a parameter, as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from tests.order.cases import DIM, Block, backward_of_all, compare, grads_of, make, rows, weights_of, whole

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]
STEPS = ("one", "all", "none", "other", "all")


def uses(step: str, rank: int) -> bool:
    return {"all": True, "one": rank == 0, "none": False, "other": rank != 0}[step]


class Experts(nn.Module):
    """A unit with parameters that a batch may leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert, self.bias = nn.Linear(DIM, DIM), Block(), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        x = x + self.gate(x)
        return self.expert(x) * self.bias.sum() if used else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.token, self.head = nn.Parameter(torch.ones(DIM)), nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor, used: bool, optional: bool = True) -> torch.Tensor:
        x = x + self.token if used else x
        for block in self.blocks[: 2 if optional else 1]:
            x = block(x, used)
        return self.head(x)


def _steps(rank, world, choices, own):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if world == 4 else None
    choices = {**choices, "mesh": mesh}
    model, reference = make(Net), make(Net)
    for block in model.blocks:
        fully_shard(block, **choices)
    fully_shard(model, **choices)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1) for each in (model, reference)]
    if own:
        fully_shard_optimizer(optimizers[0])
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if not choices.get("mp_policy") else {"rtol": 0.05, "atol": 0.02}
    for number, step in enumerate(STEPS):
        model(rows(rank, number), uses(step, rank)).square().mean().backward()
        backward_of_all([reference(rows(r, number), uses(step, r)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference), step, **tolerance)
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, reference)]
        torch.testing.assert_close(whole(norms[0]), norms[1], **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(weights_of(model), weights_of(reference), **tolerance)


ENCODED = MixedPrecisionPolicy(reduce_format="bf16_fp32")
CHOICES = {
    "zero 3": (2, {}, False),
    "zero 3 flat": (2, {"layout": "flat"}, True),
    "zero 2": (2, {"strategy": 2}, True),
    "zero 1": (2, {"strategy": 1}, False),
    "zero 0": (2, {"strategy": 0}, True),
    "hybrid": (4, {}, True),
    "hfsdp": (4, {"outer_strategy": "optim"}, True),
    "formats": (2, {"mp_policy": ENCODED}, True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CHOICES.values(), ids=CHOICES.keys())
def test_parameters_that_some_ranks_or_none_use(interpreters, case):
    world, choices, own = case
    interpreters(world, _steps, choices, own)


def _micro_batches(rank, world, last):
    """Of several micro-batches, each used by other ranks. ``last``: whether the last one is said to be."""
    model, reference = make(Net), make(Net)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for round_ in range(2):
        for patterns in (("one", "none"), ("none", "other"), ("none", "none"), ("none", "one", "none")):
            for number, step in enumerate(patterns):
                with microbatch(model, is_first=number == 0, is_last=last and number == len(patterns) - 1):
                    model(rows(rank, number), uses(step, rank)).square().mean().backward()
                backward_of_all([reference(rows(r, number), uses(step, r)).square().mean() for r in range(world)])
            compare(grads_of(model), grads_of(reference), f"{round_} {patterns}", rtol=1e-4, atol=1e-6)
            model.zero_grad()
            reference.zero_grad()


@pytest.mark.parametrize("last", [True, False])
def test_micro_batches_that_some_ranks_or_none_use(interpreters, last):
    interpreters(2, _micro_batches, last)


def _hooks(rank, world):
    """Hooks on parameters are called on all ranks if any has used them, and on none if none has."""
    model, called = make(Net), []
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.token.register_hook(lambda grad: called.append("hook") or grad.norm().full_tensor() * 0 + grad)
    model.blocks[0].bias.register_post_accumulate_grad_hook(lambda p: called.append(p.grad is not None))
    for step in STEPS:
        model(rows(rank), uses(step, rank)).square().mean().backward()
        called.append(step)
        model.zero_grad()
    return called


def test_hooks_of_parameters_that_some_ranks_or_none_use(interpreters):
    wanted = [each for step in STEPS for each in ([] if step == "none" else [True, "hook"]) + [step]]
    for called in interpreters(2, _hooks):
        assert sorted(map(str, called)) == sorted(map(str, wanted))


def _optional(rank, world, choices):
    """Optional units, and parameters of the root beside them, which some ranks use, or none."""
    model, reference = make(Net), make(Net)
    fully_shard(model.blocks[0], **choices)
    fully_shard(model.blocks[1], optional=True, **choices)
    fully_shard(model, **choices)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1) for each in (model, reference)]
    fully_shard_optimizer(optimizers[0])
    for number, step in enumerate((*STEPS, "one", "one", "other")):
        for optional in ("all", "none", "one"):
            given = [(uses(step, r), uses(optional, r)) for r in range(world)]
            model(rows(rank, number), *given[rank]).square().mean().backward()
            backward_of_all([reference(rows(r, number), *given[r]).square().mean() for r in range(world)])
            compare(grads_of(model), grads_of(reference), f"{step} {optional}", rtol=1e-4, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    compare(weights_of(model), weights_of(reference), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("choices", [{}, {"strategy": 1}], ids=str)
def test_optional_units_that_some_ranks_or_none_use(interpreters, choices):
    interpreters(2, _optional, choices)


class Alone(nn.Module):
    """A root whose only parameter some ranks use, beside optional units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.token = nn.ModuleList(Block() for _ in range(3)), nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if used or number != 1 else x
        return x * self.token if used else x


def _root_alone(rank, world):
    model, reference = make(Alone), make(Alone)
    for number, block in enumerate(model.blocks):
        fully_shard(block, optional=number == 1)
    fully_shard(model)
    for number, step in enumerate((*STEPS, *STEPS)):
        model(rows(rank, number), uses(step, rank)).square().mean().backward()
        backward_of_all([reference(rows(r, number), uses(step, r)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference), step, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        reference.zero_grad()


def test_a_parameter_of_the_root_beside_optional_units(interpreters):
    interpreters(2, _root_alone)
