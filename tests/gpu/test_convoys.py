"""Groups of a unit that one launch gathers, on a GPU: what decodes or turns them comes after all have arrived."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from flatshard.rehearsal import rehearse
from tests.order.cases import rows
from tests.order.test_convoys import CASES, DIM, gathers_of, make, shard

ONE_AXIS = [case for case in CASES if "mesh" not in CASES[case]]


def _train(case):
    model = shard(make().cuda(), **CASES[case])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for step in range(4):
        loss = model(rows(0, step, dim=DIM).cuda()).square().mean()
        loss.backward()
        found.append([loss.detach(), *[p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]])
        optimizer.step()
        optimizer.zero_grad()
    return found, gathers_of(model)


@pytest.mark.parametrize("case", ONE_AXIS)
def test_one_launch_has_the_values_of_many(case):
    with rehearse(4, "free"):
        found, names = _train(case)
        with mock.patch("flatshard.engine.schedule.gathers.CoalescedGather", return_value=nullcontext()):
            wanted, apart = _train(case)
    assert len(names) == 3 * 4 * (1 if case == "kept" else 2)
    assert len(apart) == 3 * len(names)
    for ours, theirs in zip(found, wanted):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _on_one_gpu(rank, world):
    """Gradients of a step are those of one process, row by row: Gloo gathers no DTensor of a GPU."""
    model = shard(make().cuda())
    for step in range(3):
        reference, batches = make().cuda(), [rows(r, step, dim=DIM).cuda() for r in range(world)]
        model.zero_grad()
        model(batches[rank]).square().mean().backward()
        (sum(reference(batch).square().mean() for batch in batches) / world).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                part = reference.get_parameter(name).grad.chunk(world)[rank]
                torch.testing.assert_close(parameter.grad.to_local(), part, msg=name)


def test_two_ranks_share_a_gpu(gpu_ranks):
    gpu_ranks(2, _on_one_gpu)
