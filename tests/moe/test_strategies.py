"""Experts on a mesh of their own under other strategies, precisions and schedules: gradients equal one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flatshard import CPUOffloadPolicy, Experts, MixedPrecisionPolicy, SchedulePolicy, microbatch, shard_model
from tests.moe.cases import Routing, Stacked, build, meshes, spread
from tests.moe.test_training import tokens

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(60)]

WIDE = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
HALF = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)


def _gradients(rank, world, choices, hybrid, recompute):
    """Of two micro-batches, in the first of which the experts of one rank of `ep` are idle."""
    dense, sparse = meshes(world, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if hybrid else dense
    reference, model = build(), spread(build(), sparse["ep"], "dtensor" if hybrid else "plain")
    apart = None if hybrid else sparse["ep"]
    shard_model(model, mesh=mesh, experts=Experts([Stacked], sparse["edp"], apart), **choices)
    for block in model.blocks if recompute else ():
        block.mixture.forward = _checkpointed(block.mixture.forward)
    for step in range(2):
        for number, routing in enumerate((Routing(closed=(4, 5, 6, 7)), Routing())):
            model.route(routing)
            reference.route(routing)
            with microbatch(model, is_first=number == 0, is_last=number == 1):
                model(tokens(rank, 2 * step + number)).backward()
            losses = [reference(tokens(other, 2 * step + number)) for other in range(world)]
            torch.stack(losses).mean().backward()
        exact = choices.get("mp_policy") != HALF
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            grad = ours.grad.full_tensor()
            tolerance = {} if exact else {"rtol": 0.02, "atol": 2e-3}
            torch.testing.assert_close(grad, theirs.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)
        model.zero_grad()
        reference.zero_grad()


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("choices", "hybrid", "recompute"),
    [
        ({"strategy": 1}, False, False),
        ({"mp_policy": HALF}, True, True),
        *(
            pytest.param(choices, hybrid, recompute, marks=pytest.mark.full)
            for choices, hybrid, recompute in [
                ({"strategy": 2}, True, False),
                ({"mp_policy": WIDE, "layout": "auto"}, False, True),
                ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, False, False),
                ({"schedule": SchedulePolicy(keep_for_next=10**6)}, False, True),
                ({"reshard_after_forward": False}, True, False),
                ({"reshard_after_forward": 2}, False, True),
                ({"strategy": 0}, False, False),
            ]
        ),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given),
)
def test_accumulated_gradients_of_experts(interpreters, choices, hybrid, recompute):
    interpreters(4, _gradients, choices, hybrid, recompute)
