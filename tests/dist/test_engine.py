"""fully_shard equals one process with the whole batch: losses, gradients, weights."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import MixedPrecisionPolicy, fully_shard
from tests.bench.pairs import pairwise
from tests.dist.models import assert_rows, batches, loss_of, make_net, train

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
STEPS, ROWS = 3, 36


def shard_net(net, **kwargs):
    for block in net.blocks:
        fully_shard(block, **kwargs)
    fully_shard(net.embed, **kwargs)
    return fully_shard(net, **kwargs)


def full(parameter):
    return parameter.full_tensor()


def _against_one_process(rank, world, optimizer, recompute, micro, set_to_none):
    reference = make_net()
    wanted = train(reference, OPTIMIZERS[optimizer](reference.parameters()), STEPS, ROWS, 0, 1, micro=1)
    model = shard_net(make_net(recompute=recompute))
    names = [name for name, _ in make_net().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    losses = train(
        model, OPTIMIZERS[optimizer](model.parameters()), STEPS, ROWS, rank, world, micro=micro, set_to_none=set_to_none
    )
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / world, torch.tensor(wanted), rtol=2e-5, atol=2e-5)
    for (name, sharded), plain in zip(model.named_parameters(), reference.parameters()):
        assert_rows(sharded, plain.data, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    return losses


PRODUCT = list(
    itertools.product([2, 3, 4], ["sgd", "adamw"], [None, "reentrant", "non-reentrant"], [1, 3], [True, False])
)
PAIRWISE = pairwise(PRODUCT)
COLUMNS = ("world", "optimizer", "recompute", "micro", "set_to_none")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(COLUMNS, PAIRWISE)
def test_training_equals_one_process(ranks, world, optimizer, recompute, micro, set_to_none):
    assert ranks(world, _against_one_process, optimizer, recompute, micro, set_to_none)


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, [row for row in PRODUCT if row not in PAIRWISE])
def test_training_equals_one_process_full(ranks, world, optimizer, recompute, micro, set_to_none):
    assert ranks(world, _against_one_process, optimizer, recompute, micro, set_to_none)


def _gradients(rank, world):
    reference = make_net()
    tokens = next(batches(1, ROWS))
    loss_of(reference, tokens).backward()
    model = shard_net(make_net())
    loss_of(model, tokens.chunk(world)[rank]).backward()
    for (name, sharded), plain in zip(model.named_parameters(), reference.parameters()):
        assert sharded.grad.shape == plain.shape
        assert_rows(sharded.grad, plain.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_the_means_over_ranks(ranks, world):
    assert ranks(world, _gradients) == [None] * world


def _exact(rank, world):
    """Whole numbers add up without rounding: gradients are then equal to the bit."""
    weights = torch.arange(-6.0, 6.0).reshape(4, 3)
    model, reference = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    for each in (model, reference):
        each.weight.data.copy_(weights)
    fully_shard(model)
    data = torch.arange(12.0 * world).reshape(4 * world, 3) % 5
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5, fused=True) for m in (model, reference)]
    for _ in range(5):
        model(data.chunk(world)[rank]).sum().backward()
        (reference(data).sum() / world).backward()
        assert torch.equal(full(model.weight.grad), reference.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(full(model.weight), reference.weight)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp32_is_exact_where_arithmetic_allows(ranks, world):
    assert ranks(world, _exact) == [None] * world


def _beside_fsdp2(rank, world, reduce_dtype, recompute):
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    def without_scalars(net):
        for block in net.blocks:  # PyTorch's FSDP2 refuses parameters without dims
            block.scale = nn.Parameter(torch.full((1,), 0.5))
        return net

    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    theirs = without_scalars(make_net(recompute=recompute))
    for block in theirs.blocks:
        torch_fully_shard(block, mp_policy=TorchPolicy(**dtypes))
    torch_fully_shard(theirs.embed, mp_policy=TorchPolicy(**dtypes))
    torch_fully_shard(theirs, mp_policy=TorchPolicy(**dtypes))
    ours = shard_net(without_scalars(make_net(recompute=recompute)), mp_policy=MixedPrecisionPolicy(**dtypes))
    losses = [
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), STEPS, ROWS, rank, world)
        for model in (ours, theirs)
    ]
    weights = [torch.cat([full(p).flatten() for p in model.parameters()]) for model in (ours, theirs)]
    assert weights[0].dtype == torch.float32
    return losses, (weights[0] - weights[1]).abs().max().item()


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [None, "non-reentrant"])
def test_bf16_gives_the_losses_of_fsdp2(ranks, reduce_dtype, recompute):
    for (ours, theirs), furthest in ranks(2, _beside_fsdp2, reduce_dtype, recompute):
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert furthest < 5e-3


def _bf16_against_one_process(rank, world):
    reference = make_net()
    wanted = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, fused=True), STEPS, ROWS, 0, 1)
    model = shard_net(
        make_net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    losses = torch.tensor(
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), STEPS, ROWS, rank, world)
    )
    dist.all_reduce(losses)
    return (losses / world).tolist(), wanted


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_compute_stays_within_rounding_of_fp32(ranks, world):
    for losses, wanted in ranks(world, _bf16_against_one_process):
        assert losses == pytest.approx(wanted, rel=2e-2)  # bf16 keeps 8 bits: 0.4% a product
