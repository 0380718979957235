"""Optimizers whose parameters are stepped by the backward: the same weights and state, to the last bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from flatshard.engine.schedule.reduces import Reduces
from flatshard.engine.weights.offload import Home
from flatshard.optim import CombinedOptimizer
from flatshard.optim.local_step import STEPPER, LocalStep
from flatshard.rehearsal import rehearse
from tests.dist.models import batches, loss_of, make_net
from tests.dist.test_engine import shard_net

ROWS = 8
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}
CASES = {
    "zero 3": {},
    "zero 1": {"strategy": 1},
    "mixed": {"mp_policy": MIXED},
    "offload": {"offload_policy": CPUOffloadPolicy(), "mp_policy": MIXED},
    "reduced in bfloat16": {
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    },
}


def _locals(values):
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def _steps(model, optimizer, rank, world, micro, early):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for number, tokens in enumerate(batches(4, ROWS)):
        parts = tokens.chunk(world)[rank].chunk(micro)
        for index, part in enumerate(parts):
            with microbatch(model, is_first=index == 0, is_last=index == micro - 1):
                loss = loss_of(model, part)
                loss.backward()
            losses.append(loss.item())
        gone = [p.grad is None for p in model.parameters()]
        assert all(gone) if early and number else not any(gone)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def _equal(rank, world, kind, case, micro):
    choices = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        if "offload_policy" in choices:  # as a mesh of accelerators does it
            patch.setattr(Home, "of", classmethod(lambda cls, device, policy: cls(device, True, False)))
        found = []
        for early in (False, True):
            model = shard_net(make_net(), **choices)
            optimizer = fully_shard_optimizer(OPTIMIZERS[kind](model.parameters()), in_backward=early)
            losses = _steps(model, optimizer, rank, world, micro, early)
            state = [value for p in model.parameters() for value in optimizer.state[p].values()]
            found.append((losses, _locals(model.parameters()), _locals(state)))
    (losses, weights, state), (other, others, others_state) = found
    assert losses == other
    for one, two in zip([*weights, *state], [*others, *others_state], strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "micro"), [("adamw", 1), ("fused", 2), ("momentum", 2)])
def test_weights_and_state_are_the_same(ranks, kind, case, micro):
    ranks(2, _equal, kind, case, micro)


def _two_steps(rank, world):
    """A model whose second backward has stepped it, its optimizer, and the tokens of this rank."""
    tokens = next(batches(1, ROWS)).chunk(world)[rank]
    model = shard_net(make_net())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), in_backward=True)
    for _ in range(2):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, tokens


def _misused(rank, world):
    model, optimizer, tokens = _two_steps(rank, world)
    with pytest.raises(RuntimeError, match="clip_grad_norm_ cannot be used"):
        clip_grad_norm_(model.parameters(), 1.0)
    for _ in range(2):
        loss_of(model, tokens).backward()
    with pytest.raises(
        RuntimeError, match=r"needs one backward per step; mark micro-batches with flatshard\.microbatch"
    ):
        optimizer.step()
    optimizer.zero_grad()
    before = [local.detach().clone() for local in _locals(model.parameters())]
    loss_of(model, tokens).backward()
    optimizer.step()
    assert not all(map(torch.equal, before, _locals(model.parameters())))


def test_more_backwards_and_clipping_are_refused(ranks):
    ranks(2, _misused)


def _hooked(rank, world):
    def halve(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)
        optimizer.param_groups[0]["lr"] *= 0.5

    found = []
    for early in (False, True):
        model = shard_net(make_net())
        optimizer = fully_shard_optimizer(OPTIMIZERS["momentum"](model.parameters()), in_backward=early)
        optimizer.register_step_pre_hook(halve)
        for tokens in batches(3, ROWS):
            loss_of(model, tokens.chunk(world)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(_locals(model.parameters()))
    assert all(map(torch.equal, *found))


def test_hooks_before_a_step_see_and_change_all_gradients(ranks):
    ranks(2, _hooked)


def _scaled(rank, world, fused):
    model = shard_net(make_net())
    before = [local.detach().clone() for local in _locals(model.parameters())]
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), in_backward=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, next(batches(1, ROWS)).chunk(world)[rank])).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, _locals(model.parameters())))


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scalers_are_refused_before_the_first_step(ranks, fused):
    ranks(2, _scaled, fused)


def _another(rank, world):
    """An optimizer that is gone steps nothing, and what comes after it may clip."""
    model, optimizer, tokens = _two_steps(rank, world)
    del optimizer
    loss_of(model, tokens).backward()
    grads = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9), grads.norm())
    model, optimizer, tokens = _two_steps(rank, world)
    del optimizer
    clip_grad_norm_(model.parameters(), 1e9)  # also before a backward, or if one leaves out some units


def test_clipping_after_such_an_optimizer(ranks):
    ranks(2, _another)


def _replaced(rank, world):
    """An optimizer that another one has replaced steps nothing, although it still exists."""
    model, old, tokens = _two_steps(rank, world)
    other = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, tokens).backward()
    with pytest.raises(RuntimeError, match=r"stepped by the backward, for another optimizer.*Delete the other one"):
        other.step()
    old.zero_grad()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), in_backward=True)
    before = [local.detach().clone() for local in _locals(model.parameters())]
    for number in range(2):
        loss_of(model, tokens).backward()
        assert all((p.grad is None) == bool(number) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, before, _locals(model.parameters())))
    with pytest.raises(RuntimeError, match="stepped by the backward, for another optimizer"):  # it did step before
        old.step()


def test_an_optimizer_that_was_replaced_steps_nothing(ranks):
    ranks(2, _replaced)


def _combined(rank, world):
    """An optimizer that wraps one whose parameters backwards step may step, also after it has been checked again."""
    model, optimizer, tokens = _two_steps(rank, world)
    combined = CombinedOptimizer([optimizer])
    for _ in range(2):
        loss_of(model, tokens).backward()
        combined.step()
        combined.zero_grad()
        fully_shard(nn.Linear(4, 4))  # so that parameters may have been replaced


def test_an_optimizer_in_a_combined_one(ranks):
    ranks(2, _combined)


def _restored(rank, world):
    """After an exception in a backward, weights and state that are loaded are not stepped by what is left of it."""

    def fail(grad):
        raise KeyError("in backward")

    x = torch.ones(2, 6) * (rank + 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Home, "of", classmethod(lambda cls, device, policy: cls(device, True, False)))
        for module in (*model, model):
            fully_shard(module, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fully_shard_optimizer(optimizer, in_backward=True)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["lr"] = 0.01
        seen = []
        for broken in (True, False):
            hidden = model[0](x)
            if broken:
                hidden.register_hook(fail)
            with pytest.raises(KeyError) if broken else nullcontext():
                model[1](hidden).square().mean().backward()
            if broken:
                model.load_state_dict(saved)
                optimizer.load_state_dict(state)
                optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == 0.01
            if broken:
                with torch.no_grad():
                    model(x)  # which waits for what is left of the backward
                seen = [local.clone() for local in _locals(model.state_dict().values())]
            else:
                optimizer.step()
    for now, loaded, first in zip(_locals(model.parameters()), seen, _locals(saved.values()), strict=True):
        assert torch.equal(loaded, first)
        assert not torch.equal(now, first)


def test_what_is_loaded_after_a_broken_backward_is_not_stepped(ranks):
    ranks(2, _restored)


def _fail(*given):
    raise KeyError("in backward")


def _going_on(rank, world, how):
    """After a backward that raised, steps go on once gradients have been cleared."""
    model, optimizer, tokens = _two_steps(rank, world)
    hook = model.blocks[0].register_full_backward_pre_hook(_fail)
    with pytest.raises(KeyError):
        loss_of(model, tokens).backward()
    hook.remove()
    if how == "zeros":
        optimizer.zero_grad(set_to_none=False)
    else:  # which the optimizer does not notice
        model.zero_grad()
        loss_of(model, tokens).backward()
        with pytest.raises(RuntimeError, match="needs one backward per step"):
            optimizer.step()
        model.zero_grad()
    for _ in range(2):
        before = [local.detach().clone() for local in _locals(model.parameters())]
        loss_of(model, tokens).backward()
        optimizer.step()
        model.zero_grad()
        assert not any(map(torch.equal, before, _locals(model.parameters())))


@pytest.mark.parametrize("how", ["zeros", "model"])
def test_steps_go_on_after_a_broken_backward(ranks, how):
    ranks(2, _going_on, how)


def _written(rank, world):
    """After an exception in a backward, nothing steps weights that are written in place, as DCP does.

    The next forward does not, and reading gradients does not, which waits for an earlier micro-batch. Neither calls an
    optimizer again that has raised in the backward.
    """
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    for module in (*model, model):
        fully_shard(module)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), in_backward=True)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = list(model.parameters())  # an exception leaves full ones in the modules
    saved = [local.detach().clone() for local in _locals(parameters)]
    for failing in ("backward", "optimizer", "last micro-batch"):
        if failing == "last micro-batch":
            with microbatch(model, is_last=False):
                model(torch.ones(2, 6)).sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            if failing == "optimizer":
                patch.setattr(optimizer.__dict__[STEPPER], "early_step", _fail)
            hidden = model[0](torch.ones(2, 6))
            if failing != "optimizer":
                hidden.register_hook(_fail)
            with pytest.raises(KeyError):
                model[1:](hidden).sum().backward()
            with torch.no_grad():
                for local, before in zip(_locals(parameters), saved, strict=True):
                    local.copy_(before)
                seen = [parameter.grad for parameter in parameters]
                assert any(grad is not None for grad in seen)
                model(torch.ones(2, 6))
            assert all(map(torch.equal, _locals(parameters), saved))
            optimizer.zero_grad()


def test_what_is_written_after_a_broken_backward_is_not_stepped(ranks):
    ranks(2, _written)


class Paths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.plain = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, by_b: bool) -> torch.Tensor:
        return self.plain((self.b if by_b else self.c)(self.a(x)))


def _beside(rank, world):
    """Parameters that are not sharded, frozen ones, and some without a gradient in some steps."""
    weights = []
    for early in (False, True):
        torch.manual_seed(0)
        model = Paths()
        model.b.bias.requires_grad_(False)
        ignored = set(model.plain.parameters())
        for unit in (model.a, model.b, model.c, model):
            fully_shard(unit, ignored_params=ignored)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        fully_shard_optimizer(optimizer, in_backward=early)
        for step in range(5):
            model(torch.ones(2, 6) * (rank + 1), by_b=step % 2 == 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(_locals(model.parameters()))
    for one, two in zip(*weights, strict=True):
        assert torch.equal(one, two)


def test_what_a_backward_does_not_step_is_stepped_afterwards(ranks):
    ranks(2, _beside)


class Gated(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        return super().forward(x) * (self.gate.sum() if gated else 1.0)


class TwoGates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: torch.Tensor, *gated: bool) -> torch.Tensor:
        for layer, uses in zip(self.layers, gated):
            x = layer(x, uses)
        return x


def _used_in_turn(rank, world):
    """In the first micro-batch only one rank uses a parameter, in the last one only the other: it is stepped once.

    Another parameter is used by every second step, so that `step` finds gradients of parameters that had none before.
    """
    found = []
    for early in (False, True):
        torch.manual_seed(0)
        model = TwoGates()
        for unit in (*model.layers, model):
            fully_shard(unit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        fully_shard_optimizer(optimizer, in_backward=early)
        for step in range(4):
            for last in (False, True):
                with microbatch(model, is_first=not last, is_last=last):
                    model(torch.ones(2, 6), step % 2 == 1, last == bool(rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(_locals(model.parameters()))
    assert all(map(torch.equal, *found))


def test_a_parameter_that_ranks_use_in_turn_is_stepped_once(ranks):
    ranks(2, _used_in_turn)


def test_only_elementwise_optimizers():
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="in_backward=True supports torch's elementwise optimizers"):
        fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), in_backward=True, whole=True)
    with pytest.raises(TypeError, match="in_backward"):
        fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), in_backward="yes")


DURING = ["reduce", "reduce", "reduce", "step 1", "reduce", "step 1"]
AT_ITS_END = ["step 2", "reduce", "step 1", "reduce", "step 1"]  # two reduces are in flight


@pytest.mark.parametrize("kind", ["plain", "beside a large frozen layer", "offload_state", "offload, micro-batches"])
def test_steps_wait_for_the_last_reduce_as_far_as_memory_allows(monkeypatch, kind):
    """Shards of two layers take as much as a reduce, so the steps of two layers are put off until the last reduce.

    Steps that copy state or weights are not put off, so that the copies run beside the backward.
    """
    events = []
    wait_for_oldest, step = Reduces._wait_for_oldest, LocalStep.step_early

    def waiting(self):
        events.append("reduce")
        wait_for_oldest(self)

    def stepping(self, optimizer, complete, reduced):
        events.append(f"step {len(complete)}")
        return step(self, optimizer, complete, reduced)

    monkeypatch.setattr(Reduces, "_wait_for_oldest", waiting)
    monkeypatch.setattr(LocalStep, "step_early", stepping)
    choices = {}
    if kind == "offload, micro-batches":
        monkeypatch.setattr(Home, "of", classmethod(lambda cls, device, policy: cls(device, True, False)))
        choices = {"offload_policy": CPUOffloadPolicy()}
    with rehearse(2):
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
        if kind == "beside a large frozen layer":
            model.append(nn.Linear(32, 1000).requires_grad_(False))
        for layer in model:
            fully_shard(layer, **choices)
        fully_shard(model, **choices)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        fully_shard_optimizer(optimizer, in_backward=True, offload_state=True if kind == "offload_state" else None)
        for _ in range(2):
            for last in (False, True) if kind == "offload, micro-batches" else (True,):
                with microbatch(model, is_first=not last or not choices, is_last=last):
                    loss = model(torch.randn(4, 32)).sum()
                    events.clear()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert events == (["reduce", "step 1"] * 6 if "offload" in kind else DURING + AT_ITS_END)


class _Segments(nn.Module):
    """A weight of the root is used in every recomputed segment, so a backward reduces it more than once."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.tanh(block(x)) * self.scale, x, use_reentrant=True)
        return x


def _in_segments(rank, world):
    found = []
    for early in (False, True):
        torch.manual_seed(0)
        model = _Segments()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), in_backward=early)
        torch.manual_seed(rank)
        for _ in range(4):
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(_locals(model.parameters()))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_parameter_that_a_backward_reduces_twice_is_stepped_once(ranks):
    ranks(2, _in_segments)


def _cleared_by_a_hook(rank, world):
    """A hook sets all gradients to None: groups that wait for their step then, beside a large one, are stepped."""
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 200))
    for module in (*layers, layers):
        fully_shard(module)
    parameters = list(layers.parameters())
    optimizer = fully_shard_optimizer(torch.optim.SGD(parameters, lr=0.1), in_backward=True)
    for step in range(2):
        layers(torch.ones(2, 6)).sum().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
            before = [local.detach().clone() for local in _locals(parameters)]
            parameters[4].register_post_accumulate_grad_hook(lambda p: optimizer.zero_grad())
    optimizer.step()
    is_stepped = [not torch.equal(*pair) for pair in zip(before, _locals(parameters), strict=True)]
    assert is_stepped == [True] * 4 + [False] * 2 + [True] * 4  # the group of the hook is left to the optimizer


def _cleared_by_the_model(rank, world):
    """A hook sets all gradients to None, through the model: those of units that are reduced later stay."""
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    for module in (*layers, layers):
        fully_shard(module)
    layers[2].weight.register_post_accumulate_grad_hook(lambda p: layers.zero_grad())
    layers(torch.ones(2, 6)).sum().backward()
    assert [layer.weight.grad is not None for layer in layers] == [True, True, False, False, False]


def test_hooks_that_clear_gradients_leave_those_that_are_not_reduced(ranks):
    ranks(2, _cleared_by_the_model)


def test_hooks_that_clear_gradients_leave_the_steps_of_other_units(ranks):
    ranks(2, _cleared_by_a_hook)
