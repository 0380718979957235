"""Random models equal one process with the whole batch: losses, gradients (and which are None), weights, outputs.

One seed alone: ``pytest tests/dist/test_random_models.py -k seed17``. What it builds: ``print(build(17))``.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import fully_shard, fully_shard_optimizer
from flatshard.engine.units.unit import Phase, unit_of
from tests.dist.models import assert_rows
from tests.dist.random_models import DIM, Case, build, rows_of

pytestmark = pytest.mark.sampled(3)

SEEDS, STEPS, ROWS = 50, 3, 24
BATCH = 5  # seeds in one call of `ranks`


def world_of(seed: int) -> int:
    return 2 if seed < 30 else 3 if seed < 45 else 4


def shard(case: Case) -> nn.Module:
    for names, kwargs in case.units:
        modules = [case.model.get_submodule(name) for name in names]
        fully_shard(modules if len(modules) > 1 else modules[0], **kwargs)
    return case.model


def optimizer_of(case: Case) -> torch.optim.Optimizer:
    # bf16 weights stay what they are: their gradients round differently, and the rest could not be compared tightly.
    wanted = [p for p in case.model.parameters() if p.requires_grad and p.dtype == torch.float32]
    wanted = wanted or [nn.Parameter(torch.zeros(1))]
    if case.optimizer == "sgd":
        return torch.optim.SGD(wanted, lr=0.1, momentum=0.9, foreach=True)
    # A large eps: noise in a gradient that is zero must not count.
    return torch.optim.AdamW(wanted, lr=1e-2, eps=1e-3, fused=True)


def loss_of(case: Case, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (rows_of(case.model(rows)) - target).square().mean() / case.micro


def compare(what: str, ours: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    if ours is None or wanted is None:
        assert ours is None, f"{what}: there is one, and one process has none"
        assert wanted is None, f"{what}: None, and one process has one"
        return
    exact = wanted.dtype == torch.float32
    # A bf16 gradient is rounded (8 bits) on every rank and again by the sum.
    rtol, atol = (2e-4, 2e-5) if exact else (0.0, 0.04 * wanted.float().abs().max().item() if wanted.numel() else 0.0)
    assert_rows(ours, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def at_rest(model: nn.Module, evaluated: bool = False) -> None:
    """Between steps nothing is gathered, but what a pass without a backward keeps for the next, and all units rest."""
    root = unit_of(model).root
    assert {unit.phase for unit in root.units} == {Phase.RESTING}
    if evaluated:
        return
    assert (root.gather_pool.live_bytes, root.gather_pool.live_buffers) == (0, 0)
    assert not any(group.is_full or group.gradients.waiting for unit in root.units for group in unit.groups)


def train_beside_reference(rank: int, world: int, case: Case, reference: Case) -> None:
    shard(case)
    optimizers = [optimizer_of(case), optimizer_of(reference)]
    if case.seed % 5:
        fully_shard_optimizer(optimizers[0])
    names = [name for name, _ in reference.model.named_parameters()]
    assert [name for name, _ in case.model.named_parameters()] == names
    rng = torch.Generator().manual_seed(case.seed)
    for step in range(STEPS - case.seed % 2):
        data = torch.randn(case.micro, 2, ROWS, DIM, generator=rng)
        for number, (rows, target) in enumerate(data):
            case.clock["now"] = reference.clock["now"] = step + number
            wanted = loss_of(reference, rows, target)
            loss = loss_of(case, rows.chunk(world)[rank], target.chunk(world)[rank])
            if wanted.requires_grad:
                wanted.backward()
                loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            compare(f"loss of step {step}, micro-batch {number}", mean / world, wanted.detach())
        at_rest(case.model, evaluated=not wanted.requires_grad)
        pairs = list(zip(names, case.model.parameters(), reference.model.parameters()))
        for name, ours, theirs in pairs:
            compare(f"gradient of {name} in step {step}", ours.grad, theirs.grad)
        for optimizer, each in zip(optimizers, (case, reference)):
            optimizer.step()
            each.model.zero_grad(set_to_none=case.set_to_none)
        if case.evaluate:
            with torch.no_grad():
                compare("evaluation", rows_of(case.model(rows)), rows_of(reference.model(rows)))
            at_rest(case.model, evaluated=True)
    for name, ours, theirs in pairs:
        compare(f"weight {name}", ours.detach(), theirs.detach())
    for (name, ours), theirs in zip(case.model.named_buffers(), reference.model.buffers()):
        compare(f"buffer {name}", ours, theirs)


def _seeds(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        case, reference = build(seed), build(seed)
        description = str(case)
        try:
            train_beside_reference(rank, world, case, reference)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{description}") from error


def _batches() -> list[list[int]]:
    return [list(range(first, min(first + BATCH, SEEDS))) for first in range(0, SEEDS, BATCH)]


@pytest.mark.parametrize("seeds", _batches(), ids=lambda seeds: "-".join(f"seed{seed:02}" for seed in seeds))
def test_random_models_equal_one_process(ranks, request, seeds):
    # `-k seed17` selects the batch; then only that seed runs.
    chosen = [seed for seed in seeds if f"seed{seed:02}" in (request.config.option.keyword or "")]
    ranks(world_of(seeds[0]), _seeds, chosen or seeds)


@pytest.mark.full
@pytest.mark.limit(600)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_more_random_models_equal_one_process(ranks, world):
    ranks(world, _seeds, list(range(100 * world, 100 * world + 100)))
