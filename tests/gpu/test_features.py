"""On a GPU: compiled blocks, weight gradients written directly, and an optimizer that steps in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from flatshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    capture,
    direct_wgrads,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from flatshard.rehearsal import rehearse
from flatshard.wgrads import product_into
from tests.dist.models import batches, loss_of, make_net, train
from tests.dist.test_engine import ROWS, STEPS, shard_net

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_written_and_added_in_float32(dtype):
    left, right = torch.randn(300, 70, device="cuda").to(dtype), torch.randn(300, 50, device="cuda").to(dtype)
    wanted = left.double().t() @ right.double()
    out = torch.full((70, 50), float("nan"), device="cuda")
    product_into(out, left.t(), right, accumulate=False)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-2 if dtype == torch.float32 else 1e-3)
    product_into(out, left.t(), right, accumulate=True)
    torch.testing.assert_close(out.double(), 2 * wanted, rtol=1e-3, atol=2e-2 if dtype == torch.float32 else 2e-3)


def _direct(rank, world):
    plain, direct = (shard_net(make_net(recompute="non-reentrant"), mp_policy=MIXED) for _ in range(2))
    assert direct_wgrads(direct) == 7
    return [train(model, sgd(model), STEPS, ROWS, rank, world, micro=3, device="cuda") for model in (plain, direct)]


def test_direct_gradients_train_alike(gpu_ranks):
    for plain, direct in gpu_ranks(2, _direct):
        assert direct == pytest.approx(plain, rel=1e-2)


def _compiled(rank, world):
    eager = shard_net(make_net())
    model = make_net()
    for block in model.blocks:
        block.compile(fullgraph=True)
    shard_net(model)
    optimizers = [sgd(each) for each in (eager, model)]
    found = []
    for number in range(2):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found.append(
                [
                    train(each, optimizer, STEPS, ROWS, rank, world, device="cuda")
                    for each, optimizer in zip((eager, model), optimizers)
                ]
            )
    torch._dynamo.reset()
    return found


@pytest.mark.limit(240)
def test_compiled_blocks_train_as_eager_ones(gpu_ranks):
    for rounds in gpu_ranks(2, _compiled):
        for eager, compiled in rounds:
            assert compiled == pytest.approx(eager, rel=1e-3)


def test_blocks_that_torch_captures_train_as_eager_ones():
    """`mode="reduce-overhead"` takes the addresses of weights for granted, and records anew where they differ."""
    losses: dict[str | None, list[Any]] = {None: [], "reduce-overhead": []}
    with rehearse(4, "free"):
        for mode, found in losses.items():
            model = make_net()
            for block in model.blocks if mode else ():
                block.compile(fullgraph=True, mode=mode)
            optimizer = sgd(shard_net(model))
            for _ in range(4):
                found.append(train(model, optimizer, STEPS, ROWS, 0, 4, device="cuda"))
    torch._dynamo.reset()
    assert losses["reduce-overhead"] == [pytest.approx(each, rel=1e-3) for each in losses[None]]


def _in_backward(rank, world):
    after, during = shard_net(make_net()), shard_net(make_net())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in during.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    wanted = train(after, sgd(after), STEPS, ROWS, rank, world, device="cuda")
    found = []
    for tokens in batches(STEPS, ROWS):
        loss = loss_of(during, tokens.chunk(world)[rank].cuda())
        loss.backward()
        found.append(loss.item())
    return found, wanted


def test_an_optimizer_in_backward(gpu_ranks):
    for found, wanted in gpu_ranks(2, _in_backward):
        assert found == pytest.approx(wanted, rel=1e-5)


def _host_to_empty(rank, world):
    """A meta model whose weights rest in host memory gets them there, as FSDP2's users write it."""
    plain = make_net()
    with torch.device("meta"):
        model = make_net()
    shard_net(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    for sharded, value in zip(model.parameters(), plain.parameters()):
        assert sharded.device.type == "cpu"
        part = distribute_tensor(value.data.cuda(), sharded.device_mesh, sharded.placements)
        sharded.to_local().detach().copy_(part.to_local())
    wanted = shard_net(plain, offload_policy=CPUOffloadPolicy())
    return [train(each, sgd(each), STEPS, ROWS, rank, world, device="cuda") for each in (model, wanted)]


def test_a_meta_model_in_host_memory(gpu_ranks):
    for found, wanted in gpu_ranks(2, _host_to_empty):
        assert found == pytest.approx(wanted, rel=1e-5)


def _away(rank, world):
    """Losses of a model that waits in host memory between its steps, and of one that stays."""
    staying, moving = (shard_net(make_net()) for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (staying, moving)]
    rounds = []
    for _ in range(2):
        rounds.append(
            [
                train(model, optimizer, STEPS, ROWS, rank, world, device="cuda")
                for model, optimizer in zip((staying, moving), optimizers)
            ]
        )
        moving.cpu()
        assert {p.to_local().device.type for p in moving.parameters()} == {"cpu"}
        with pytest.raises(RuntimeError, match="move the model back to cuda"):
            moving(next(batches(1, ROWS))[:, :-1].cuda())
        moving.cuda()
    return rounds


def test_a_model_may_wait_in_host_memory(gpu_ranks):
    for rounds in gpu_ranks(2, _away):
        for staying, moving in rounds:
            assert moving == staying


def _stepped_in_backward(rank, world, choices):
    found = []
    for early in (False, True):
        # With both, weights in host memory are stepped on the device.
        policy = choices.get("offload_policy", OffloadPolicy()) if early else OffloadPolicy()
        model = shard_net(make_net(), **{**choices, "offload_policy": policy})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        fully_shard_optimizer(optimizer, in_backward=early)
        losses = train(model, optimizer, STEPS, ROWS, rank, world, device="cuda")
        found.append((losses, [p.to_local().cpu() for p in model.parameters()]))
    return found


@pytest.mark.parametrize(
    "choices", [{}, {"mp_policy": MIXED}, {"mp_policy": MIXED, "offload_policy": CPUOffloadPolicy()}]
)
def test_optimizers_of_backwards_have_the_same_weights(gpu_ranks, choices):
    for after, during in gpu_ranks(2, _stepped_in_backward, choices):
        assert after[0] == during[0]
        assert all(map(torch.equal, after[1], during[1]))


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return x + self.other(self.one(x)) if used else x + self.one(x)


def _uneven(rank, world):
    """Which parameters have gradients, per step."""
    torch.manual_seed(0)
    model = fully_shard(Uneven())
    found = []
    for users in ((0,), (0, 1), (), (1,)):
        model(torch.ones(2, 8, device="cuda"), rank in users).sum().backward()
        found.append([parameter.grad is not None for parameter in model.parameters()])
        model.zero_grad()
    return found


def test_gradients_are_on_all_ranks_or_on_none(gpu_ranks):
    some, none = [True] * 4, [True, True, False, False]
    assert gpu_ranks(2, _uneven) == [[some, some, none, some]] * 2


def _unused(device, run):
    """Losses of steps that leave a layer out, and that layer's weight before and after them."""
    torch.manual_seed(0)
    model = fully_shard(Uneven())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, capturable=True)
    fully_shard_optimizer(optimizer)
    before = model.other.weight.full_tensor().clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x, False).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = run(step)
    losses = [call(torch.ones(2, 8, device=device)).item() for _ in range(8)]
    return losses, before, model.other.weight.full_tensor()


def test_a_captured_step_with_a_parameter_that_is_not_used():
    """No answer can be waited for in a capture; that of the steps before it counts."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        losses, before, after = _unused(device, capture)
        assert torch.equal(before, after)
        expected, *_ = _unused(device, lambda step: step)
        assert losses == expected
        assert len(set(losses)) == 8
    finally:
        dist.destroy_process_group()


def test_gradients_that_are_added_to_have_memory_of_their_own():
    """Between activations they would split segments that the next forward needs whole, and so would optimizer state."""

    def segment_of(tensor):
        address = tensor.untyped_storage().data_ptr()
        (found,) = [s for s in torch.cuda.memory_snapshot() if 0 <= address - s["address"] < s["total_size"]]
        return found

    with rehearse(2):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)).cuda()
        fully_shard(model)
        weight = model[0].weight
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        batch = torch.randn(4096, 1024, device="cuda")
        for _ in range(2):
            for number in range(2):
                with microbatch(model, is_first=number == 0, is_last=number == 1):
                    model(batch).square().mean().backward()
            assert tuple(segment_of(weight.grad.to_local())["segment_pool_id"]) != (0, 0)
            optimizer.step()
            blocks = segment_of(optimizer.state[weight]["exp_avg"].to_local())["blocks"]
            assert sum(block["size"] for block in blocks if block["state"] == "inactive") < 2 << 20
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch)  # gives the memory of the gradients back
        model(batch).square().mean().backward()  # a step of one backward: gradients between activations
        assert tuple(segment_of(weight.grad.to_local())["segment_pool_id"]) == (0, 0)


def test_gradients_arrive_in_host_memory_as_they_are_on_the_device():
    """Those of a first backward are cast on the device; those of a second are added on the host."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with rehearse(2):
        models = []
        for offload in (OffloadPolicy(), CPUOffloadPolicy()):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
            for layer in model:
                fully_shard(layer, mp_policy=policy, offload_policy=offload)
            models.append(fully_shard(model, mp_policy=policy, offload_policy=offload))
            models[-1].set_gradient_divide_factor(3.0)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for seed in range(4):
            batch = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).cuda()
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                for _ in range(1 + seed % 2):
                    model(batch).square().mean().backward()
            for here, there in zip(*(model.parameters() for model in models)):
                assert there.grad.to_local().device.type == "cpu"
                assert torch.equal(here.grad.to_local().cpu(), there.grad.to_local())
            for optimizer in optimizers:
                optimizer.step()
