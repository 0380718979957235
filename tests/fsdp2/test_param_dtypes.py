"""Dtypes of torch 2.15: `param_dtype_override_fn`, `parameter.grad_dtype`, and the default of ``reduce_dtype``."""

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import flatshard
from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.engine.units.unit import unit_of

HALF = torch.bfloat16
NEW = "GradientReductionHandle" in torch_fsdp.__all__  # torch 2.15


def _of_own_dtype(parameter):
    return parameter.dtype if parameter.dim() == 1 else None


class Block(nn.Module):
    """A norm in float32 between two products in bfloat16."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 6, bias=False)
        self.seen = []

    def forward(self, x):
        self.seen[:] = [parameter.dtype for parameter in self.parameters()]
        return self.second(self.norm(self.first(x).float()).to(x.dtype))


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    flatshard.no_shard(model[1].norm.requires_grad_(False))
    return model


def _train(rank, world):
    policy = MixedPrecisionPolicy(HALF, torch.float32, param_dtype_override_fn=_of_own_dtype)
    reference, model = build(), build()
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    assert unit_of(model[0]).policy.param_dtype_override_fn is None
    models = [model, copy.deepcopy(model)]
    model[0].set_mp_policy(MixedPrecisionPolicy(HALF, torch.float32))
    for number in range(2):
        batch = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(number))
        for each in models:
            each(batch.chunk(world)[rank]).float().square().mean().backward()
            assert all(seen == [HALF, torch.float32, torch.float32, HALF] for seen in (each[0].seen, each[1].seen))
        parts = []
        for part in batch.chunk(world):  # gradients of each rank are rounded before they are added
            weights = {n: p if p.dim() == 1 else p.to(HALF) for n, p in reference.named_parameters()}
            output = functional_call(reference, weights, part.to(HALF))
            trained = [p for p in reference.parameters() if p.requires_grad]
            parts.append(torch.autograd.grad(output.float().square().mean(), trained))
        wanted = [torch.stack(each).mean(0) for each in zip(*parts)]
        for each in models:
            found = [p.grad for p in each.parameters() if p.requires_grad]
            assert all(grad.dtype == torch.float32 for grad in found)
            torch.testing.assert_close([grad.full_tensor() for grad in found], wanted)
            each.zero_grad()


def test_some_parameters_compute_in_their_own_dtype(ranks):
    ranks(2, _train)


def _refusals(rank, world):
    model = nn.Linear(4, 4)
    wrong = MixedPrecisionPolicy(HALF, param_dtype_override_fn=lambda p: torch.float64)
    with pytest.raises(ValueError, match=r"for 'weight' of torch\.float32 it returned torch\.float64"):
        fully_shard(model, mp_policy=wrong)
    assert type(model) is nn.Linear
    fully_shard(model)
    with pytest.raises(ValueError, match="give it to fully_shard"):
        model.set_mp_policy(MixedPrecisionPolicy(HALF, param_dtype_override_fn=_of_own_dtype))
    with pytest.raises(TypeError, match="must be a function of a parameter"):
        MixedPrecisionPolicy(param_dtype_override_fn=HALF)


def test_functions_of_dtypes_are_checked(ranks):
    ranks(1, _refusals)


def _set_by_user(rank, world):
    model = nn.Linear(4, 4)
    model.weight.grad_dtype = HALF
    fully_shard(model, mp_policy=MixedPrecisionPolicy(grad_dtype=torch.float64))
    model.set_mp_policy(MixedPrecisionPolicy())
    assert model.weight.grad_dtype == HALF
    for each in (model, copy.deepcopy(model)):
        each(torch.ones(2, 4)).sum().backward()
        assert (each.weight.grad.dtype, each.bias.grad.dtype) == (HALF, torch.float32)
        torch.optim.SGD(each.parameters(), lr=0.5).step()  # not refused: this is what was asked for
        each.double()
        assert (each.weight.dtype, each.weight.grad.dtype, each.bias.grad.dtype) == (torch.float64, HALF, torch.float64)
        each(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert torch.equal(each.weight.grad.full_tensor(), torch.full((4, 4), 4, dtype=HALF))


def test_the_dtype_of_gradients_may_be_set_on_a_parameter(ranks):
    ranks(1, _set_by_user)


class Exact(torch.autograd.Function):
    """A product in bfloat16 whose weight gradient is in float32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().T @ x.float()


class Product(nn.Linear):
    def forward(self, x):
        return Exact.apply(x, self.weight) + self.bias


def _unrounded(rank, world):
    x = torch.full((3, 8), 1 + 2**-7, dtype=HALF)
    wanted = x.float().T @ x.float()
    assert not torch.equal(wanted, wanted.to(HALF).float())
    for dtype in (torch.float32, HALF):
        model = Product(8, 8, dtype=dtype)
        model.weight.grad_dtype = torch.float32
        fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF, torch.float32))
        model(x).backward(x)
        assert torch.equal(model.weight.grad.full_tensor(), wanted)


def test_gradients_that_are_more_exact_than_weights_are_not_rounded(ranks):
    ranks(1, _unrounded)


def _accumulated(rank, world):
    for setting in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = nn.Linear(1, 4, bias=False, dtype=HALF)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        for value in (256, 1, 1, 1, -256):
            getattr(model, setting)(value == -256)
            model(torch.full((1, 1), value, dtype=HALF)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 1), 3, dtype=HALF))


def test_gradients_accumulate_in_the_dtype_of_reduces_if_it_is_wider(ranks):
    ranks(1, _accumulated)


def _beside_fsdp2(rank, world, override):
    """Losses and a weight, by PyTorch's function and by ours, with one object of PyTorch's policy."""
    more = {"param_dtype_override_fn": _of_own_dtype} if override else {}
    policy, found = torch_fsdp.MixedPrecisionPolicy(param_dtype=HALF, **more), []
    for shard in (torch_fsdp.fully_shard, fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 6, bias=False))
        for module in (*model, model):
            shard(module, mp_policy=policy)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for number in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank))
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        found.append((torch.stack(losses), model[0].weight.full_tensor()))
    return found


@pytest.mark.parametrize(
    "override", [False, pytest.param(True, marks=pytest.mark.skipif(not NEW, reason="torch 2.15"))]
)
def test_policies_of_torch_give_the_losses_of_fsdp2(ranks, override):
    for (losses, weight), (ours, our_weight) in ranks(2, _beside_fsdp2, override):
        assert torch.equal(losses, ours)
        assert torch.equal(weight, our_weight)


def _default(rank, world):
    model = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(HALF))
    model(torch.ones(2, 8)).sum().backward()
    return {group.gradients.reduce_dtype for group in unit_of(model).groups}


def test_the_default_of_reduces_is_that_of_the_installed_torch(ranks):
    assert ranks(1, _default) == [{torch.float32 if NEW else HALF}]
