"""Gradients that users hold, swap, share, replace or set to None, some of a group alone: as of an unsharded model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatshard import clip_grad_norm_, fully_shard, fully_shard_optimizer

DIM = 4


def _models() -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)))
    return fully_shard(made[0]), made[1]


def _backward(model: nn.Module, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(2, DIM)).square().sum().backward()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _set_to_none(model: nn.Module) -> list[torch.Tensor]:
    held = model[0].weight.grad
    model[0].weight.grad = None
    return [held]


def _replace(model: nn.Module) -> list[torch.Tensor]:
    held = model[0].weight.grad
    model[0].weight.grad = held * 2
    return [held]


def _swap(model: nn.Module) -> list[torch.Tensor]:
    model[0].weight.grad, model[2].weight.grad = model[2].weight.grad, model[0].weight.grad
    return []


def _put_back(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of an earlier step in the place of some."""
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    _backward(model, 5)
    held = [parameter.grad for parameter in model.parameters()]
    for parameter, grad in list(zip(model.parameters(), before))[::2]:
        parameter.grad = grad
    return held[::2]


def _held(rank, world, change):
    results = []
    for model in _models():
        _backward(model, 0)
        held = change(model)
        _backward(model, 1)
        results.append([_whole(each) for each in (*held, *(p.grad for p in model.parameters()))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("change", [_set_to_none, _replace, _swap, _put_back])
def test_what_is_held_stays_and_what_is_there_is_added_to(ranks, change):
    ranks(2, _held, change)


def _in_hooks(rank, world):
    results = []
    for model in _models():
        seen: list[torch.Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda grad, seen=seen: (seen.append(grad), grad * 2)[1])
        for number in range(2):
            _backward(model, number)
        results.append([_whole(each) for each in (*seen, *(p.grad for p in model.parameters()))])
    for model_results in results:
        model_results[: 2 * 4] = sorted(model_results[: 2 * 4], key=lambda each: (each.dim(), each.sum().item()))
    torch.testing.assert_close(*results)


def test_what_a_hook_was_given_stays(ranks):
    ranks(2, _in_hooks)


def _share(model: nn.Module) -> list[torch.Tensor]:
    model[0].weight.grad = model[2].weight.grad
    return []


def _stepped(rank, world, change):
    results = []
    for model in _models():
        is_sharded = hasattr(model, "unshard")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fully_shard_optimizer(optimizer) if is_sharded else optimizer
        results.append([])
        for number in range(3):
            _backward(model, number)
            if number == 1:
                change(model)
            clip = clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
            results[-1].append(_whole(clip(model.parameters(), 1e6)))
            optimizer.step()
            optimizer.zero_grad()
        results[-1] += map(_whole, model.parameters())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("change", [_set_to_none, _replace, _swap, _share])
def test_optimizers_and_norms_read_the_gradients_that_parameters_have(ranks, change):
    ranks(2, _stepped, change)
