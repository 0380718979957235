"""`torch.compile(optimizer.step)` over sharded parameters, and of optimizers that have none."""

from __future__ import annotations

import pytest
import torch

from tests.order.cases import backward_of_all, compare, make, optimizer_of, rows, shard, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(120)]


def _compiled(rank, world, backend, optimizer_for):
    model, reference = shard(make(), reshard_after_forward=False), make()
    optimizers = [optimizer_for(each.parameters()) for each in (model, reference)]
    steps = [torch.compile(optimizers[0].step, backend=backend), optimizers[1].step]
    if rank == 0:  # once is enough for one that is not sharded
        steps[1] = torch.compile(steps[1], backend=backend)
    for number in range(3):
        with torch.no_grad():  # the weights are kept, and out of date after a step
            torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
        model(rows(rank, number)).square().mean().backward()
        backward_of_all([reference(rows(r, number)).square().mean() for r in range(world)])
        for step, optimizer in zip(steps, optimizers):
            step()
            optimizer.zero_grad()
    compare(weights_of(model), weights_of(reference))


def test_a_compiled_step_equals_one_process(interpreters):
    interpreters(2, _compiled, "eager", optimizer_of)


def _flat(rank, world):
    model = shard(make(), layout="flat")
    optimizer = optimizer_of(model.parameters())
    model(rows(rank)).square().mean().backward()
    with pytest.raises(Exception, match=r"torch\.compile of operations: not supported"):
        torch.compile(optimizer.step, backend="eager")()


def test_a_compiled_step_of_ragged_shards_is_refused(interpreters):
    interpreters(2, _flat)


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.full
def test_a_step_by_the_default_compiler_equals_one_process(interpreters):
    interpreters(2, _compiled, "inductor", _adamw)
