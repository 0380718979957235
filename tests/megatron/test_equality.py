"""The Megatron-FSDP surface trains as one process does: strategies, precision, accumulation, meta, frozen, tied."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard.megatron import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.dist.models import Block, assert_rows, batches, loss_of, make_net

pytestmark = pytest.mark.sampled(2)

ROWS = 8
STRATEGIES = [
    *((name, None) for name in ("no_shard", 1, "optim_grads", 3)),
    (3, 0),  # HSDP
    ("optim_grads_params", "optim"),  # HFSDP
]


def arguments(strategy, world):
    inner, outer = strategy
    if outer is None:
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
        return {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "zero_dp_strategy": inner}
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "dp"))
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "dp",
        "dp_outer_dim": "outer",
        "zero_dp_strategy": inner,
        "outer_dp_sharding_strategy": outer,
    }


def frozen_and_tied(model):
    model.blocks[0].up.weight.requires_grad_(False)
    model.head.weight = model.embed.weight
    return model


def train(model, optimizer, rank, world, micro, mode=None):
    """Three steps; returns losses. ``mode``: how micro-batches are told apart."""
    losses = []
    for step, tokens in enumerate(batches(3, ROWS * micro)):
        for number, part in enumerate(tokens.chunk(micro)):
            mine = part.chunk(world)[rank]
            last = number == micro - 1
            if mode == "no_sync" and not last:
                with model.no_sync():
                    loss = loss_of(model, mine) / micro
                    loss.backward()
            elif mode == "flag":
                model.is_last_microbatch = last
                loss = loss_of(model, mine) / micro
                loss.backward()
            elif mode == "sync" and last:
                with model.sync():
                    loss = loss_of(model, mine) / micro
                    loss.backward()
            else:
                loss = loss_of(model, mine) / micro
                loss.backward()
            losses.append(loss.detach() * micro)
        optimizer.step()
        if step:
            optimizer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=False)
    return torch.stack(losses)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def check(rank, world, sharded, reference, micro, mode, note, tolerance=2e-4):
    optimizer = fully_shard_optimizer(adamw([p for p in sharded.parameters() if p.requires_grad]))
    ours = train(sharded, optimizer, rank, world, micro, mode)
    theirs = adamw([p for p in reference.parameters() if p.requires_grad])
    wanted = train(reference, theirs, 0, 1, micro)
    dist.all_reduce(ours)
    torch.testing.assert_close(ours / world, wanted, rtol=tolerance, atol=tolerance / 10, msg=lambda m: f"{note}: {m}")
    for (name, mine), plain in zip(sharded.module.named_parameters(), reference.parameters()):
        tell = f"{note}, {name}"
        assert_rows(mine.detach(), plain.data, rtol=tolerance, atol=tolerance / 10, msg=lambda m, t=tell: f"{t}: {m}")


def _equal(rank, world, cases):
    for strategy, (micro, mode), layout in cases:
        sharded = fully_shard_model(
            frozen_and_tied(make_net(depth=2)),
            fsdp_unit_modules=[Block],
            sync_model_each_microbatch=mode is None,
            layout=layout,
            **arguments(strategy, world),
        )
        note = f"{strategy}, {micro} micro-batches by {mode}, layout {layout}"
        check(rank, world, sharded, frozen_and_tied(make_net(depth=2)), micro, mode, note)


MODES = [(1, None), (2, None), (3, "no_sync"), (2, "flag"), (2, "sync"), (2, "every")]


def cases_for(world, number):
    """Every strategy with every mode, over two worlds and two layouts; a quarter of them for each number."""
    strategies = [strategy for strategy in STRATEGIES if world == 4 or strategy[1] is None]
    return list(itertools.product(strategies, MODES, ["tensor", "flat"]))[number::6]


@pytest.mark.parametrize("world", [2, 4])
def test_strategies_and_accumulation_equal_one_process(ranks, world):
    ranks(world, _equal, cases_for(world, 1 if world == 2 else 3))


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("world", [2, 4])
def test_all_strategies_and_modes_equal_one_process(ranks, world, number):
    ranks(world, _equal, cases_for(world, number))


def _precise(rank, world, policies):
    """bfloat16 compute: losses as of bfloat16 in one process with float32 main weights; dtypes as the policy says."""
    for policy, main, grad in policies:
        torch.manual_seed(0)
        model = fully_shard_model(
            make_net(depth=1).bfloat16(),
            fsdp_unit_modules=[Block],
            mixed_precision_policy=policy,
            zero_dp_strategy=3,
        )
        reference = make_net(depth=1).bfloat16().float()  # the same values
        tokens = next(batches(1, ROWS))
        output = model(tokens.chunk(world)[rank][:, :-1])
        assert output.dtype == torch.bfloat16
        loss_of(model, tokens.chunk(world)[rank]).backward()
        loss_of(reference, tokens).backward()
        for (name, mine), plain in zip(model.module.named_parameters(), reference.parameters()):
            assert (mine.dtype, mine.grad.dtype) == (main, grad), name
            assert_rows(mine.grad.float(), plain.grad, rtol=0.1, atol=5e-3, msg=lambda m, n=name: f"{n}: {m}")
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        optimizer.step()
        theirs = adamw(reference.parameters())
        theirs.step()
        if main == torch.float32:
            for (name, mine), plain in zip(model.module.named_parameters(), reference.parameters()):
                assert_rows(mine.detach(), plain.data, rtol=0, atol=2.1e-2, msg=lambda m, n=name: f"{n}: {m}")
        assert model.module.head.weight.dtype == main


def test_precision_levels(ranks):
    fp32, bf16 = torch.float32, torch.bfloat16
    policies = [
        (MixedPrecisionPolicy(), fp32, bf16),
        (MixedPrecisionPolicy(main_grads_dtype=fp32), fp32, fp32),
        (MixedPrecisionPolicy(main_params_dtype=None), bf16, bf16),
        (MixedPrecisionPolicy(main_grads_dtype=fp32, grad_comm_dtype=bf16), fp32, fp32),
    ]
    ranks(2, _precise, policies)


def _meta(rank, world):
    made = []
    for ranks_of in ("all", "one"):
        with torch.device("meta"):
            model = Settable()
        if ranks_of == "all":
            sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], init_model_with_meta_device=True)
        else:
            flatshard.materialize(model)
        made.append(model)
    for mine, plain in zip(made[0].parameters(), made[1].parameters()):
        assert not plain.is_meta
        assert_rows(mine.detach(), plain.data)  # whatever the number of ranks
    loss = sharded(torch.ones(2, 4)).square().mean()
    loss.backward()
    made[1](torch.ones(2, 4)).square().mean().backward()
    for mine, plain in zip(made[0].parameters(), made[1].parameters()):
        assert_rows(mine.grad, plain.grad, rtol=1e-5, atol=1e-6)


class Settable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.zeros(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        nn.init.ones_(self.offset)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.gain + self.offset


def test_a_model_on_the_meta_device_gets_the_values_of_one_process(ranks):
    ranks(2, _meta)
