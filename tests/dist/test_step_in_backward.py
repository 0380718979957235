"""Optimizers whose parameters are stepped by the backward: the same weights and state, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from flatshard.engine.weights.offload import Home
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "micro"), [("adamw", 1), ("fused", 2), ("momentum", 2)])
def test_weights_and_state_are_the_same(ranks, kind, case, micro):
    ranks(2, _equal, kind, case, micro)


def _misused(rank, world):
    tokens = next(batches(1, ROWS)).chunk(world)[rank]
    model = shard_net(make_net())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), in_backward=True)
    for _ in range(2):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="nothing left to clip"):
        clip_grad_norm_(model.parameters(), 1.0)
    for _ in range(2):
        loss_of(model, tokens).backward()
    with pytest.raises(RuntimeError, match=r"is one backward per step; mark micro-batches by flatshard\.microbatch"):
        optimizer.step()
    optimizer.zero_grad()
    before = [local.detach().clone() for local in _locals(model.parameters())]
    loss_of(model, tokens).backward()
    optimizer.step()
    assert not all(map(torch.equal, before, _locals(model.parameters())))


def test_more_backwards_and_clipping_are_refused(ranks):
    ranks(2, _misused)


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


def test_only_elementwise_optimizers():
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="in_backward=True: is for torch's elementwise optimizers"):
        fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), in_backward=True, whole=True)
    with pytest.raises(TypeError, match="in_backward"):
        fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), in_backward="yes")
