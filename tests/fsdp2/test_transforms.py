"""torch.func and forward-mode differentiation through a sharded model: as if it were whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard.engine.units.unit import unit_of

DIM, ROWS = 6, 4


class Flow(nn.Module):
    """A velocity field: what jvp is taken through when average velocities are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in "abc")
        self.out = nn.Linear(DIM, DIM)

    def forward(self, z: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
        x = z + self.time(t)
        for block in self.blocks:
            x = x + block(x)
        return {"u": self.out(x)}


Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_jvp(model: Model, z: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    u, along = torch.func.jvp(model, (z, t), (v, torch.ones_like(t)))
    return F.mse_loss(u, (v - t * along).detach())


def by_jvp_with_gradients_of_tangents(model: Model, z: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    u, along = torch.func.jvp(model, (z, t), (v, torch.ones_like(t)))
    return F.mse_loss(u, v - t * along)


def by_duals(model: Model, z: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        u, along = forward_ad.unpack_dual(model(forward_ad.make_dual(z.clone().requires_grad_(), v), t))
        return F.mse_loss(u, v - t * along)


def by_vmap(model: Model, z: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(torch.vmap(model)(z, t), v)


def by_jacobians(model: Model, z: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Of inputs alone; no gradient of the parameters."""
    with torch.no_grad():
        forwards = torch.vmap(torch.func.jacfwd(model))(z, t)
        backwards = torch.vmap(torch.func.jacrev(model))(z, t)
        torch.testing.assert_close(forwards, backwards)
        gradient = torch.func.grad(lambda z: model(z, t).square().sum())(z)
    return backwards.square().mean() + gradient.square().mean()


WAYS = [by_jvp, by_jvp_with_gradients_of_tangents, by_duals, by_vmap, by_jacobians]


def _as_one_process(rank, world, way, reshard, dtype):
    torch.manual_seed(0)
    reference = Flow()
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32 if dtype else None)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    tolerance = {"rtol": 5e-2, "atol": 2e-2} if dtype else {}
    launched = []
    for _ in range(4):
        z, v = torch.randn(2, ROWS * world, DIM)
        t = torch.rand(ROWS * world, 1)
        wanted = way(lambda *args: reference(*args)["u"], z, v, t)
        mine = [part.chunk(world)[rank] for part in (z, v, t)]
        found = way(lambda *args: model(*args)["u"], *mine)
        one = way(lambda *args: reference(*args)["u"], *mine)
        torch.testing.assert_close(found, one, **tolerance)
        if wanted.requires_grad:
            wanted.backward()
            found.backward()
            for ours, theirs in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, **tolerance)
                assert ours.shape == theirs.shape, "sharded parameters are shown after backward"
        root = unit_of(model).root
        launched.append((root.gather_lane.launched, root.reduce_lane.launched))
        assert root.gather_pool.live_bytes == 0 or not wanted.requires_grad
        for each in (model, reference):
            each.zero_grad()
    return [tuple(late - early for early, late in zip(*pair)) for pair in pairwise(launched[1:])]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_transforms_of_a_sharded_model(ranks, way):
    for steps in ranks(2, _as_one_process, way, None, None):
        for gathers, reduces in steps:
            if way is not by_jacobians:  # as an ordinary step: blocks twice, the root once
                assert (gathers, reduces) == (7, 4)


@pytest.mark.parametrize(("reshard", "dtype"), [(True, None), (False, None), (None, torch.bfloat16)])
def test_jvp_of_a_sharded_model(ranks, reshard, dtype):
    gathered = {None: 7, True: 8, False: 4}[reshard]
    for steps in ranks(2, _as_one_process, by_jvp, reshard, dtype):
        assert steps == [(gathered, 4)] * 2
