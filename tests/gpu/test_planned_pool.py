"""The planned pool on a GPU: addresses that stay, memory that does not grow, and numbers that do not change."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from flatshard import SchedulePolicy, fully_shard
from flatshard.buffer import Pool
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import unit_of
from flatshard.rehearsal import rehearse
from tests.dist.models import make_net, train
from tests.dist.test_engine import ROWS, STEPS, shard_net


def addresses(pool: Pool) -> dict[int, list[int]]:
    """By buffer, where it lies each time it is allocated from now on."""
    found: dict[int, list[int]] = defaultdict(list)
    allocate = pool.allocate

    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        had = tensor.untyped_storage().nbytes()
        allocate(tensor, *args, **kwargs)
        if not had:
            found[id(tensor)].append(tensor.data_ptr())

    pool.allocate = watched  # type: ignore[method-assign]
    return found


def chain(widths: tuple[int, ...], **schedule: Any) -> tuple[nn.Sequential, Pool]:
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], widths[0]]))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model, schedule=SchedulePolicy(**schedule))
    return model, find_root(unit_of(model), model).gather_pool


def slot_bytes(pool: Pool) -> int:
    assert not pool._taken
    return sum(slot.size for slot in pool._free)


# far below what the driver gives memory in; of several sizes; an even and an odd number of layers
@pytest.mark.parametrize("widths", [(8, 16, 512, 16), (1024, 1024, 1030, 1024), (512, 4096, 1024, 1024, 2048)])
def test_gathered_weights_stay_where_they_are(widths):
    with rehearse(8, "h100-nvlink"):
        used = []
        for planned in (False, True):
            model, pool = chain(widths, planned_pool=planned)
            data = torch.randn(4, widths[0], device="cuda", requires_grad=True)
            model(data).sum().backward()
            with torch.no_grad():
                model(data)  # the plan is made at its start
            found = addresses(pool)
            for _ in range(3):
                model(data).sum().backward()
                model.zero_grad()
                with torch.no_grad():
                    model(data)
                torch.cuda.empty_cache()  # other memory comes and goes
            used.append(slot_bytes(pool))
            if planned:
                assert len(found) == len(widths)
                assert all(len(places) >= 3 * 3 - 1 for places in found.values())
                assert all(len(set(places)) == 1 for places in found.values()), found
                assert (pool.planner.plans, pool.planner.missed) == (1, 0)
            del model, pool, found
        assert used[1] <= used[0]


def test_what_a_plan_does_not_need_goes_back_to_the_device():
    """All layers at once, by hand; then buffers that take less."""
    width = 4096  # 64 MiB a layer
    with rehearse(8, "h100-nvlink"):
        model, pool = chain((width,) * 6, planned_pool=True)
        data = torch.randn(4, width, device="cuda", requires_grad=True)
        for _ in range(2):
            model(data).sum().backward()
        for layer in model:
            layer.unshard()
        for layer in model:
            layer.reshard()
        model.zero_grad()
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        model.to(torch.bfloat16)  # other buffers, half as large
        for _ in range(3):
            model(data.bfloat16()).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert len(pool.planner.plan.slot_of) == 6
        assert pool.planner.statistics.bytes < 3 * 2 * (width + 1) * width
        assert reserved - torch.cuda.memory_reserved() > 3 * 4 * width * width


def _losses(rank: int, world: int, planned: bool) -> list[float]:
    mesh = torch.distributed.init_device_mesh("cuda", (world,))
    model = shard_net(make_net(), mesh=mesh, schedule=SchedulePolicy(planned_pool=planned))
    losses = []
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses += train(model, optimizer, STEPS, ROWS, rank, world, device="cuda")
        model.blocks = model.blocks[::-1]  # another order: what shares a slot is wanted together
    return losses


def test_losses_are_those_without_a_plan(gpu_ranks):
    for plain, planned in zip(gpu_ranks(2, _losses, False), gpu_ranks(2, _losses, True)):
        assert planned == pytest.approx(plain, rel=1e-5)
