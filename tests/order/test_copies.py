"""`copy.deepcopy` of sharded models, and what is made of it: averages of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from flatshard import MixedPrecisionPolicy, fully_shard, gathered, microbatch
from flatshard.engine.units.unit import unit_of
from tests.order.cases import backward_of_all, compare, grads_of, make, optimizer_of, rows, shard, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


def _trained(model, reference, rank, world, number=0):
    optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
    for step in range(number, number + 2):
        model(rows(rank, step)).square().mean().backward()
        backward_of_all([reference(rows(r, step)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _copied(rank, world, choices):
    """A copy is equal, has nothing in common with the other, and trains as it does."""
    model, reference = shard(make(), **choices), make()
    model.blocks[0].up.weight.note = [1]
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    _trained(model, reference, rank, world)
    twin, other = copy.deepcopy(model), copy.deepcopy(reference)
    assert type(twin) is type(model)
    assert twin.blocks[0].up.weight.note == [1]
    assert twin.blocks[0].up.weight.note is not model.blocks[0].up.weight.note
    compare(weights_of(twin), weights_of(model))
    _trained(model, reference, rank, world, 5)
    compare(weights_of(twin), weights_of(other))
    calls.clear()
    _trained(twin, other, rank, world, 7)
    assert len(calls) == 2  # hooks of users are copied
    compare(weights_of(twin), weights_of(other))
    compare(weights_of(model), weights_of(reference))
    with gathered(twin):
        torch.testing.assert_close(twin.norm(rows(0)), other.norm(rows(0)))


@pytest.mark.parametrize("choices", [{}, {"layout": "flat", "strategy": "optim"}], ids=str)
def test_a_copy_trains_as_the_model_does(interpreters, choices):
    interpreters(2, _copied, choices)


def _with_settings(rank, world):
    """Main weights of another dtype, and what setters have said, are the copy's, too."""
    policy = MixedPrecisionPolicy(main_dtype=torch.float32)
    model = shard(make().bfloat16(), mp_policy=policy, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    model.blocks[0].set_gradient_divide_factor(3)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        _trained_alone(each, rank)
    compare(weights_of(twin), weights_of(model))
    assert all(p.dtype == torch.float32 and p.placements == (Shard(p.dim() - 1),) for p in twin.parameters())
    (ahead,) = unit_of(twin.blocks[0]).intent.prefetch_in_forward
    assert ahead() is twin.blocks[1]


def _trained_alone(model, rank):
    optimizer = optimizer_of(model.parameters())
    for step in range(2):
        model(rows(rank, step).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_settings_are_copied(interpreters):
    interpreters(2, _with_settings)


def _changed_since(rank, world):
    """Of what a model has become since it was sharded, nothing makes other groups of the copy."""
    torch.manual_seed(0)
    encoded = MixedPrecisionPolicy(gather_format="int8", encodes=lambda name, parameter: True)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    model[0].bias.data = model[0].bias.data.float()
    fully_shard(model, layout="flat", mp_policy=encoded).float()
    model.set_mp_policy(MixedPrecisionPolicy())
    model.set_gradient_divide_factor(1.0)
    model[0].weight.requires_grad_(False)
    with microbatch(model, is_first=False, is_last=False):
        twin = copy.deepcopy(model)
    assert unit_of(twin).is_first
    assert unit_of(twin).is_last
    for each in (model, twin):
        each(torch.ones(2, 5)).square().sum().backward()
    compare(weights_of(twin), weights_of(model))
    assert twin[0].weight.grad is None
    compare(grads_of(twin[1]), grads_of(model[1]))


def test_a_model_that_has_changed_since_it_was_sharded_is_copied(interpreters):
    interpreters(2, _changed_since)


def _by_rows(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8))
    fully_shard(model[0], rows=True)
    twin = copy.deepcopy(fully_shard(model))
    words = torch.arange(4) + rank
    for each in (model, twin):
        each(words).square().sum().backward()
    compare(grads_of(twin), grads_of(model))


def test_embeddings_by_rows_are_copied(interpreters):
    interpreters(2, _by_rows)


def _with_optimizer(rank, world):
    model, reference = shard(make()), make()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
    pairs = list(zip((model, reference), optimizers))
    for number in range(2):
        for each, optimizer in pairs:
            who = [rank] if each is pairs[0][0] else range(world)
            backward_of_all([each(rows(r, number)).square().mean() for r in who])
            optimizer.step()
            optimizer.zero_grad()
        pairs = [copy.deepcopy(pair) for pair in pairs]
    compare(weights_of(pairs[0][0]), weights_of(pairs[1][0]))
    with pytest.raises(TypeError, match="copy the model first"):
        copy.deepcopy(pairs[0][::-1])


def test_an_optimizer_that_is_copied_with_the_model_steps_the_copy(interpreters):
    interpreters(2, _with_optimizer)


def _parallel(rank, world):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    model, reference = make(), make()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
    shard(model, mesh=mesh["dp"])
    _trained(model, reference, rank, world)
    twin, other = copy.deepcopy(model), copy.deepcopy(reference)
    _trained(model, reference, rank, world, 5)
    _trained(twin, other, rank, world, 7)
    compare(weights_of(twin), weights_of(other))


def test_parameters_of_tensor_parallelism_are_copied(interpreters):
    interpreters(2, _parallel)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mid, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.words.weight
        self.mid.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.head(self.mid(self.words(x))) * self.scale


def _tied(rank, world, together):
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    kept = model.mid.bias
    for each in [[model.words, model.head]] if together else [model.words, model.head]:
        fully_shard(each)
    fully_shard(model, ignored_params={kept})
    twin = copy.deepcopy(nn.Sequential(model))[0]
    assert twin.head.weight is twin.words.weight
    assert twin.mid.bias is not kept
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(twin(x), reference(x))
    twin(x).sum().backward()
    assert model.words.weight.grad is None
    assert type(twin.mid.bias.grad) is torch.Tensor
    with pytest.raises(TypeError, match=r"cannot be copied.*copy the model that contains all of them"):
        copy.deepcopy(model.words if together else model.head)


@pytest.mark.parametrize("together", [True, False])
def test_ties_lists_and_ignored_parameters_are_copied_too(interpreters, together):
    interpreters(2, _tied, together)


def _averaged(rank, world, average, layout):
    model, reference = shard(make(), layout=layout), make()
    functions = {
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "buffers": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
        "ema and buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
        "mean and buffers": {"multi_avg_fn": get_swa_multi_avg_fn(), "use_buffers": True},
    }.get(average, {})
    for each in (model, reference):
        each.register_buffer("seen", torch.zeros(2))
    means = [AveragedModel(each, **functions) for each in (model, reference)]
    optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
    for step in range(3):
        model(rows(rank, step)).square().mean().backward()
        backward_of_all([reference(rows(r, step)).square().mean() for r in range(world)])
        for optimizer, mean, each in zip(optimizers, means, (model, reference)):
            optimizer.step()
            optimizer.zero_grad()
            each.seen.add_(1)
            mean.update_parameters(each)
        with torch.no_grad():
            torch.testing.assert_close(means[0](rows(rank)), means[1](rows(rank)))
    compare(weights_of(means[0].module), weights_of(means[1].module))
    torch.testing.assert_close(means[0].module.seen, means[1].module.seen)


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize("average", ["mean", "ema", "buffers", "ema and buffers", "mean and buffers"])
def test_averaged_models(interpreters, average, layout):
    interpreters(2, _averaged, average, layout)


def _lists(rank, world):
    model = fully_shard(nn.Linear(4, 3), layout="flat")
    sharded = model.weight.detach()
    twice, plain = torch._foreach_mul([sharded, torch.ones(2)], 2.0)
    torch.testing.assert_close(twice.full_tensor(), 2 * sharded.full_tensor())
    torch.testing.assert_close(plain, torch.full((2,), 2.0))
    with pytest.raises(NotImplementedError, match="sharded differently"):
        torch._foreach_add([sharded, torch.ones(2)], [torch.ones(3, 4), torch.ones(2)])


def test_lists_of_flat_shards_and_plain_tensors(interpreters):
    interpreters(2, _lists)
