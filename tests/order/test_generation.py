"""Forwards without gradients gather what they must and no more: as often as PyTorch's, by the same settings."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.order.cases import BOTH, backward_of_all, make, optimizer_of, rows, shard

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]
TOKENS = 8


class Gathers(TorchDispatchMode):
    """Counts all-gathers, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "allgather" in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))


def generate(model, x, mode=torch.no_grad):
    """What came out, and how many all-gathers it took."""
    with mode(), Gathers() as gathers:
        for _ in range(TOKENS):
            x = torch.cat([x, x[-1:] + model(x)[-1].mean()])
    return x.clone(), gathers.count


def units_of(model):
    return [model, *model.blocks]


def train(models, reference, optimizers, rank, world, number):
    for model in models:
        model(rows(rank, number)).square().mean().backward()
    backward_of_all([reference(rows(r, number)).square().mean() for r in range(world)])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _generate(rank, world, way, mode):
    """Per generation the two counts; the weights of each are those of the last step."""
    choices = {} if way == "kept by setting" else {"reshard_after_forward": False}
    models, reference = [shard(make(), by, **choices) for by in BOTH], make()
    optimizers = [optimizer_of(each.parameters()) for each in (*models, reference)]
    if way == "kept by setting":
        for model in models:
            model.set_reshard_after_forward(False)
    counts = []
    for number in range(3):
        for _ in range(2):
            if way == "unsharded":
                for unit in (unit for model in models for unit in units_of(model)):
                    unit.unshard()
            # PyTorch's cannot be trained after a first forward in inference mode.
            found = [generate(model, rows(rank, number), how) for model, how in zip(models, (mode, torch.no_grad))]
            wanted, _ = generate(reference, rows(rank, number))
            for title, (value, _) in zip(("ours", "control"), found):
                torch.testing.assert_close(value, wanted, msg=f"{title}, generation {number}, differs")
            counts.append(tuple(count for _, count in found))
        for unit in (unit for model in models for unit in units_of(model)):
            unit.reshard()  # else it would be trained with, as it was
        train(models, reference, optimizers, rank, world, number)
    return counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", ["kept", "kept by setting", "unsharded"])
def test_weights_that_are_kept_are_gathered_once(interpreters, way, mode):
    for counts in interpreters(2, _generate, way, mode):
        assert [ours for ours, _ in counts] == [control for _, control in counts]
        once = 0 if way == "unsharded" else 4  # each unit, in the first of two generations of eight tokens
        assert [control for _, control in counts] == 3 * [once, 0]


def _between_steps(rank, world):
    """No `reshard` by the caller: what an evaluation keeps, the next backward releases, and so on."""
    models, reference = [shard(make(), by, reshard_after_forward=False) for by in BOTH], make()
    optimizers = [optimizer_of(each.parameters()) for each in (*models, reference)]
    counts = []
    for number in range(3):
        found = [generate(model, rows(rank, number)) for model in models]
        wanted, _ = generate(reference, rows(rank, number))
        for title, (value, _) in zip(("ours", "control"), found):
            torch.testing.assert_close(value, wanted, msg=f"{title}, generation {number}, differs")
        counts.append(tuple(count for _, count in found))
        train(models, reference, optimizers, rank, world, number)
    return counts


def test_an_evaluation_between_steps_sees_their_weights(interpreters):
    for counts in interpreters(2, _between_steps):
        assert [ours for ours, _ in counts] == [control for _, control in counts]


def _loaded(rank, world):
    """State dicts that are loaded, and read, between evaluations."""
    model, reference = shard(make(), reshard_after_forward=False), make()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
        reference.load_state_dict({name: 0.5 * value for name, value in reference.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))


def test_an_evaluation_sees_what_was_loaded(interpreters):
    interpreters(2, _loaded)
