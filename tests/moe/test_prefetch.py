"""What is gathered when the host waits for the counts of tokens that are on their way to the experts."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flatshard import Experts, SchedulePolicy, fully_shard, shard_model
from flatshard.engine.schedule.gathers import Gathers
from tests.moe.cases import Stacked, build, meshes, spread
from tests.moe.test_training import tokens

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(60)]


def _log(rank, world, how, recompute):
    """In the third step: gathers, and waits for counts, in the order in which the host comes to them."""
    dense, sparse = meshes(world, 2)
    edp, ep = sparse["edp"], sparse["ep"]
    model = spread(build(3), ep, "dtensor")
    if how == "model":
        shard_model(model, mesh=dense, experts=Experts([Stacked], edp))
    else:
        for block in model.blocks:
            fully_shard(block.mixture.experts, mesh=edp, data_mesh=dense)
            fully_shard(block, mesh=dense)
        fully_shard(model, mesh=dense, schedule=SchedulePolicy())
    if recompute:
        for block in model.blocks:
            block.mixture.forward = functools.partial(checkpoint, block.mixture.forward, use_reentrant=False)
    for step in range(2):
        model(tokens(rank, step)).backward()
    log: list[str] = []
    gather, exchange = Gathers.launch, dist.all_to_all_single
    groups = {id(ep.get_group()): "wait"}

    def gathered(self, unit, **options):
        log.append(unit.name)
        gather(self, unit, **options)

    def exchanged(output, *args, group=None, **kwargs):
        if not output.is_floating_point():
            log.append(groups[id(group)])
        return exchange(output, *args, group=group, **kwargs)

    Gathers.launch, dist.all_to_all_single = gathered, exchanged
    loss = model(tokens(rank, 2))
    log.append("backward")
    loss.backward()
    Gathers.launch, dist.all_to_all_single = gather, exchange
    return log


def before_waits(log: list[str]) -> list[set[str]]:
    """Per wait, what has been gathered before it."""
    return [set(log[:place]) for place, what in enumerate(log) if what == "wait"]


@pytest.mark.parametrize(("how", "recompute"), [("model", False), ("units", False), ("units", True)])
def test_experts_and_the_next_block_are_on_their_way_before_the_host_waits(interpreters, how, recompute):
    for log in interpreters(4, _log, how, recompute):
        at = log.index("backward")
        forward, backward = log[:at], log[at + 1 :]
        inside = ".mixture.experts" if how == "units" else ""
        for number, gathered in enumerate(before_waits(forward)):
            assert {
                f"blocks.{number}{inside}",
                *(f"blocks.{next_}" for next_ in (number + 1,) if next_ < 3),
            } <= gathered
        assert len(before_waits(forward)) == 3
        if recompute:  # each block goes through its exchange again
            for number, gathered in zip((2, 1, 0), before_waits(backward)):
                assert {f"blocks.{number}{inside}", f"blocks.{max(number - 1, 0)}"} <= gathered
            assert len(before_waits(backward)) == 3
        if how == "units":  # two blocks, and the experts of one of them
            assert "blocks.2" not in before_waits(forward)[0]
            assert "blocks.1.mixture.experts" not in before_waits(forward)[0]


def _blocks_elsewhere(rank, world):
    """Blocks on another mesh than the root are no experts: one at a time is gathered ahead."""
    dense, sparse = meshes(world, 2)
    model = build(4)
    for block in model.blocks:
        fully_shard(block, mesh=sparse["edp"])
    fully_shard(model, mesh=dense)
    log: list[str] = []
    gather, forward = Gathers.launch, model.blocks[0].forward

    def gathered(self, unit, **options):
        log.append(unit.name)
        gather(self, unit, **options)

    def first(x):
        log.append("first")
        return forward(x)

    model.blocks[0].forward = first
    for step in range(2):
        log.clear()
        Gathers.launch = gathered
        model(tokens(rank, step)).backward()
        Gathers.launch = gather
    return log[: log.index("first")]


def test_blocks_on_another_mesh_than_the_root_are_gathered_one_ahead(interpreters):
    for log in interpreters(4, _blocks_elsewhere):
        assert log[1:] == ["blocks.0", "blocks.1"]
