"""Hooks on sharded parameters, post-accumulate and tensor hooks: once per backward, with what they are promised."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import fully_shard
from tests.dist.models import batches, loss_of, make_net, train
from tests.dist.test_counts import root_of

ROWS = 8


def sharded_net(recompute: str | None = None, freeze: bool = False, **kwargs) -> nn.Module:
    net = make_net(recompute=recompute)
    if freeze:
        net.blocks[1].up.requires_grad_(False)
    for block in net.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(net, **kwargs)


def mesh_of(world: int, hybrid: bool):
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner")) if hybrid else None


def _called(rank, world, hybrid, recompute):
    model = sharded_net(recompute, freeze=True, mesh=mesh_of(world, hybrid))
    seen: dict[str, list[torch.Tensor]] = {}

    def watch(name: str):
        return lambda parameter: seen.setdefault(name, []).append(parameter.grad.to_local().clone())

    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    handles = [parameter.register_post_accumulate_grad_hook(watch(name)) for parameter, name in names.items()]
    data = [tokens.chunk(world)[rank] for tokens in batches(4, ROWS)]

    loss_of(model, data[0]).backward()
    assert Counter({name: len(found) for name, found in seen.items()}) == Counter(names.values())
    for parameter, name in names.items():
        torch.testing.assert_close(seen[name][0], parameter.grad.to_local(), rtol=0, atol=0)

    # The gradient of a second backward is added first. Backwards that stay on their rank call nothing.
    model.set_is_last_backward(False)
    loss_of(model, data[1]).backward()
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(False)
    loss_of(model, data[2]).backward()
    assert all(len(found) == 2 for found in seen.values())
    model.set_requires_gradient_sync(True)
    loss_of(model, data[3]).backward()
    assert all(len(found) == 3 for found in seen.values())
    for parameter, name in names.items():
        torch.testing.assert_close(seen[name][2], parameter.grad.to_local(), rtol=0, atol=0)

    # What a backward does not use is not called, and a hook that is gone neither.
    model.zero_grad()
    for handle in handles[:2]:
        handle.remove()
    model.blocks[0](torch.randn(2, 12)).sum().backward()
    assert {name for name, found in seen.items() if len(found) == 4} == {
        name for name in names.values() if name.startswith("blocks.0") and name not in list(names.values())[:2]
    }


@pytest.mark.parametrize(("world", "hybrid", "recompute"), [(2, False, None), (4, True, None), (2, False, "reentrant")])
def test_post_accumulate_hooks_see_final_gradients_once(ranks, world, hybrid, recompute):
    ranks(world, _called, hybrid, recompute)


def _optimizer_in_backward(rank, world, layout):
    reference = make_net()
    wanted = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 4, ROWS, 0, 1)
    model = sharded_net(layout=layout)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for tokens in batches(4, ROWS):
        loss = loss_of(model, tokens.chunk(world)[rank])
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        groups = [group for unit in root_of(model).units for group in unit.groups]
        assert not any(group.gradients.main_grads.live_bytes for group in groups)  # freed, before the next forward
        losses.append(loss.item())
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, rtol=2e-4, atol=2e-5)
    return losses, wanted


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_an_optimizer_in_backward(ranks, layout):
    results = ranks(2, _optimizer_in_backward, layout)
    mean = [sum(losses) / 2 for losses in zip(*(losses for losses, _ in results))]
    assert mean == pytest.approx(results[0][1], rel=2e-5)


def _changed(rank, world):
    model, plain = sharded_net(), sharded_net()
    calls = []
    name, parameter = next((n, p) for n, p in model.named_parameters() if n == "blocks.1.up.weight")
    parameter.register_hook(lambda grad: calls.append(grad))
    handle = parameter.register_hook(lambda grad: 2 * grad)
    data = [tokens.chunk(world)[rank] for tokens in batches(2, ROWS)]
    for tokens in data:  # each backward's own gradient is doubled, and added
        for each in (model, plain):
            loss_of(each, tokens).backward()
    for (each, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        factor = 2 if each == name else 1
        torch.testing.assert_close(ours.grad.full_tensor(), factor * theirs.grad.full_tensor())
    assert [grad.shape for grad in calls] == [parameter.shape] * 2
    handle.remove()
    parameter.register_hook(lambda grad: grad.full_tensor())
    with pytest.raises(TypeError, match=r"up.weight.*sharded like the parameter"):
        loss_of(model, data[0]).backward()
    return "done"


def test_tensor_hooks_change_the_gradient_of_one_backward(ranks):
    assert ranks(2, _changed) == ["done"] * 2


def _cleared(rank, world):
    """The gradients after a hook in the middle of a backward has cleared all, and whether another hook saw its own."""
    found = []
    for sharded in (False, True):
        model = sharded_net() if sharded else make_net()
        weights, saw = dict(model.named_parameters()), []
        weights["blocks.2.up.weight"].register_post_accumulate_grad_hook(lambda _, model=model: model.zero_grad())
        weights["blocks.1.up.weight"].register_post_accumulate_grad_hook(lambda p, saw=saw: saw.append(p.grad is None))
        for tokens in batches(2, ROWS):
            model.zero_grad()
            loss_of(model, tokens.chunk(world)[rank] if sharded else tokens).backward()
        assert saw == [False, False]
        found.append(
            {name: weight.grad for name, weight in weights.items() if name.startswith(("blocks.0", "blocks.1"))}
        )
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name].full_tensor(), wanted, rtol=2e-4, atol=2e-5)


def test_a_hook_that_clears_all_gradients_leaves_those_on_their_way(ranks):
    ranks(2, _cleared)
