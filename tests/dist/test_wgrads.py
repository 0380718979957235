"""Weight gradients written where the reduction reads them: the same training, without the copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecisionPolicy, direct_wgrads, fully_shard, fully_shard_optimizer, offer_main_grads
from flatshard.wgrads import DirectLinear
from tests.dist.models import batches, loss_of, make_net

ROWS, STEPS = 8, 3
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Twice(nn.Module):
    """One layer called twice, one whose weight is also used outside of it, one with a bias alone to train."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.shared, self.tied, self.biased = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.biased.weight.requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            x = self._twice(x)
        else:
            x = checkpoint(self._twice, x, use_reentrant=self.recompute == "reentrant")
        return self.biased(self.tied(x) + F.linear(x, self.tied.weight.square()))

    def _twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.shared(x)))


def sharded(model: nn.Module, units: list[nn.Module], **kwargs: Any) -> nn.Module:
    for unit in units:
        fully_shard(unit, **kwargs)
    return fully_shard(model, **kwargs)


def net(recompute: str | None, **kwargs: Any) -> nn.Module:
    model = make_net(recompute=recompute)
    return sharded(model, [*model.blocks, model.head], **kwargs)


def tied(recompute: str | None, **kwargs: Any) -> nn.Module:
    """The head's weight is the embedding's, and each is a unit: one gradient, half of it written directly."""
    model = make_net(recompute=recompute)
    model.head.weight = model.embed.weight
    return sharded(model, [model.embed, *model.blocks, model.head], **kwargs)


def twice(recompute: str | None, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Twice(recompute), Twice(recompute))
    return sharded(model, list(model), **kwargs)


def net_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model, tokens)


def twice_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :6].float() / 29).float().square().mean()


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., torch.Tensor], int]] = {
    "net": (net, net_loss, 7),
    "tied": (tied, net_loss, 7),
    "twice": (twice, twice_loss, 6),
}


def _equal(rank, world, kind, recompute, kwargs, sync, tolerance):
    """Losses and gradients over steps of two micro-batches, beside the ordinary way."""
    make, loss_fn, layers = MODELS[kind]
    plain, direct = make(recompute, **kwargs), make(recompute, **kwargs)
    assert direct_wgrads(direct) == layers
    optimizers = [fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in (plain, direct)]
    for tokens in batches(STEPS, ROWS):
        parts = tokens.chunk(world)[rank].chunk(2)
        for number, part in enumerate(parts):
            losses = []
            for model in (plain, direct):
                model.set_requires_gradient_sync(sync or number == 1)
                loss = loss_fn(model, part)
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, **tolerance)
        for (name, one), two in zip(plain.named_parameters(), direct.parameters()):
            assert (one.grad is None) == (two.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(
                    two.grad.to_local(), one.grad.to_local(), **tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


EXACT = {"rtol": 1e-6, "atol": 1e-7}
CASES = [
    ("net", None, {}, True, EXACT),
    ("net", "non-reentrant", {"layout": "flat"}, False, EXACT),
    ("net", "reentrant", {"mp_policy": MIXED}, True, {"rtol": 3e-2, "atol": 2e-3}),
    ("tied", None, {}, True, EXACT),
    ("tied", "non-reentrant", {}, False, EXACT),
    ("twice", None, {}, False, EXACT),
    ("twice", "reentrant", {"layout": "flat"}, True, EXACT),
    ("twice", "non-reentrant", {"strategy": "optim"}, True, EXACT),
    (
        "net",
        None,
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        False,
        {"rtol": 3e-2, "atol": 2e-3},
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{'-'.join(case[2])}-{case[3]}")
def test_direct_gradients_are_the_ordinary_ones(ranks, case):
    ranks(2, _equal, *case)


class Copies(TorchDispatchMode):
    """The shapes of all that is copied, cast or added within."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy", "add_", "clone"):
            self.shapes.append(tuple(args[0].shape))
        elif name == "_foreach_copy_":
            self.shapes += [tuple(source.shape) for source in args[1]]
        return func(*args, **(kwargs or {}))


def _copies(rank, world, direct, sync):
    model = net(None, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    if direct:
        direct_wgrads(model)
    weights = {tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, nn.Linear)}
    model.set_requires_gradient_sync(sync)
    for tokens in batches(2, ROWS):
        loss = loss_of(model, tokens.chunk(world)[rank])
        with Copies() as copies:
            loss.backward()
    return sum(shape in weights for shape in copies.shapes)


@pytest.mark.parametrize("sync", [True, False])
def test_weights_that_are_written_directly_are_not_copied(ranks, sync):
    """The embedding, which has the shape of the head, stays with autograd."""
    assert ranks(2, _copies, False, sync) == [8, 8]
    assert ranks(2, _copies, True, sync) == [1, 1]


def _in_reduce_dtype(rank, world):
    """Products of bf16 numbers, in float32: the gradient is not rounded to bf16 on its way."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=False)
    fully_shard(layer, mp_policy=MIXED)
    direct_wgrads(layer)
    torch.manual_seed(rank)
    assert type(layer).__name__ == "FSDPDirectLinear"
    x, grad = torch.randn(9, 6).bfloat16(), torch.randn(9, 4).bfloat16()
    layer(x).backward(grad)
    wanted = grad.float().t() @ x.float()
    torch.distributed.all_reduce(wanted)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), wanted / world, rtol=1e-6, atol=1e-6)


def test_gradients_of_bf16_weights_are_computed_in_float32(ranks):
    ranks(2, _in_reduce_dtype)


class Fused(torch.autograd.Function):
    """A kernel by Megatron's convention: it adds to `main_grad` (or overwrites it) and gives autograd a dummy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, overwrites: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.overwrites = weight, overwrites
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        to_x, to_weight = grad @ weight, grad.t() @ x
        if ctx.overwrites and weight.overwrite_main_grad:
            weight.main_grad.copy_(to_weight)
        else:
            weight.main_grad.add_(to_weight)
        weight.grad_added_to_main_grad = True
        return to_x, torch.full_like(weight, float("nan")), None


class FusedTwice(nn.Module):
    def __init__(self, overwrites: bool | None) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(5, 5)), nn.LayerNorm(5)
        self.overwrites = overwrites

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x @ self.weight.t() if self.overwrites is None else Fused.apply(x, self.weight, self.overwrites)
            x = self.norm(x)
        return x


def _fused(rank, world, overwrites, sync):
    def made(overwrites: bool | None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(FusedTwice(overwrites), nn.Tanh(), FusedTwice(overwrites))
        return sharded(model, [model[0], model[2]])

    plain, fused = made(None), made(overwrites)
    offer_main_grads(fused)
    torch.manual_seed(rank)
    for number in range(4):
        x = torch.randn(3, 5)
        for model in (plain, fused):
            model.set_requires_gradient_sync(sync or number % 2 == 1)
            model(x).square().sum().backward()
    for (name, one), two in zip(plain.named_parameters(), fused.named_parameters()):
        torch.testing.assert_close(two[1].grad.to_local(), one.grad.to_local(), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("overwrites", "sync"), [(False, True), (True, False)])
def test_fused_kernels_write_into_main_grad(ranks, overwrites, sync):
    ranks(2, _fused, overwrites, sync)


@contextmanager
def refusing_direct() -> Iterator[None]:
    """Fails where a linear layer writes its gradient directly."""
    known = flatshard.wgrads._Linear.apply

    def refuse(*args: Any) -> None:
        raise AssertionError("direct")

    flatshard.wgrads._Linear.apply = refuse
    try:
        yield
    finally:
        flatshard.wgrads._Linear.apply = known


def _elsewhere(rank, world):
    """Where the direct way does not apply, layers work as always."""
    plain, direct = net(None), net(None)
    direct_wgrads(direct)
    tokens = next(batches(1, ROWS)).chunk(world)[rank]

    def compare(run: Callable[[nn.Module], None]) -> None:
        for model in (plain, direct):
            run(model)
        for one, two in zip(plain.parameters(), direct.parameters()):
            torch.testing.assert_close(two.grad.full_tensor(), one.grad.full_tensor())
        for model in (plain, direct):
            model.zero_grad()

    def autocast(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()

    with refusing_direct():
        compare(autocast)
        with torch.no_grad():
            loss_of(direct, tokens)
    for block in direct.blocks:
        block.compile(backend="eager", fullgraph=True)
    compare(lambda model: loss_of(model, tokens).backward())
    torch._dynamo.reset()


def test_autocast_evaluation_and_compiled_blocks_go_the_ordinary_way(ranks):
    ranks(2, _elsewhere)


def _only_inputs(rank, world):
    """A backward to inputs alone writes no weight gradient."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(layer)
    direct_wgrads(layer)
    x = torch.randn(2, 4, requires_grad=True)
    (found,) = torch.autograd.grad(layer(x).sum(), [x])
    assert found.shape == x.shape
    assert all(parameter.grad is None for parameter in layer.parameters())
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    return [type(each) for each in layer]


def test_a_backward_to_inputs_writes_nothing(ranks):
    assert ranks(2, _only_inputs) == [[DirectLinear] * 2] * 2


def test_without_units_there_is_nothing_to_write_into():
    for function in (direct_wgrads, offer_main_grads):
        with pytest.raises(ValueError, match="call fully_shard first"):
            function(nn.Linear(2, 2))
