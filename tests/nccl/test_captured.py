"""Captured steps and registered memory over several NCCL ranks; tests/gpu has them on one."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flatshard import MixedPrecisionPolicy, capture, fully_shard
from flatshard.engine.units.unit import unit_of
from flatshard.experimental import WirePolicy
from tests.gpu.test_capture import CASES, Trainer, run, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]

STEPS = 12
ONE_AXIS = [case for case, choices in CASES.items() if "hsdp" not in choices]
TWO_AXES = [case for case, choices in CASES.items() if "hsdp" in choices]


class OnTwoMeshes(Trainer):
    """Blocks and the root in turn on all ranks, and on two by two."""

    def shard(self, hsdp: bool, choices: dict[str, Any]) -> None:
        flat = init_device_mesh("cuda", (4,), mesh_dim_names=("all",))
        hybrid = init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner"))
        for unit, mesh in zip((*self.model.blocks, self.model), itertools.cycle((hybrid, flat))):
            fully_shard(unit, mesh=mesh, **choices)


def same(ours: Trainer, theirs: Trainer) -> None:
    for mine, wanted in zip(ours.weights(), theirs.weights()):
        assert torch.equal(mine, wanted)


def _captured(rank: int, world: int, kind: type[Trainer], choices: dict[str, Any]) -> list[float]:
    """Bit for bit: both reduce the same numbers by the same collectives."""
    torch.use_deterministic_algorithms(True)
    eager = kind(**choices)
    wanted = run(eager, eager, STEPS, 10 * rank)
    captured = kind(**choices)
    step = capture(captured)
    assert run(captured, step, STEPS, 10 * rank) == wanted
    assert step._graphs
    same(captured, eager)
    return wanted


def _of_case(rank: int, world: int, case: str) -> list[float]:
    return _captured(rank, world, Trainer, CASES[case])  # some have functions in them, which cannot be sent


@pytest.mark.parametrize(("world", "case"), [*((2, c) for c in ONE_AXIS), *((4, c) for c in TWO_AXES)])
def test_captured_steps_are_eager_steps(nccl_ranks, world, case):
    for losses in nccl_ranks(world, _of_case, case):
        assert losses[-2] < losses[0]  # of one batch


def test_a_graph_with_collectives_of_two_meshes(nccl_ranks):
    for losses in nccl_ranks(4, _captured, OnTwoMeshes, {}):
        assert losses[-2] < losses[0]


def _destroyed(rank: int, world: int) -> None:
    """Graphs of two models, of which one goes with its model and one is captured anew, while another is replayed."""
    torch.use_deterministic_algorithms(True)
    found = []
    for is_captured in (False, True):
        first, second = Trainer(), Trainer(strategy=1)
        one, two, three = (capture(t) if is_captured else t for t in (first, second, second))
        losses = []
        for number in range(6):
            batch = tokens(10 * rank + number % 2)
            losses += [step(batch).item() for step in (one, two, three)]
        del one, first
        gc.collect()
        torch.cuda.empty_cache()
        junk = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 24)]
        del junk
        losses += run(second, two, 4, 10 * rank)
        if is_captured:
            three.renew()  # its graph goes, and that of `two` stays
        for _ in range(2):
            losses += run(second, three, 4, 10 * rank)
            losses += run(second, two, 2, 10 * rank)
        found.append((losses, second.weights()))
        del two, three
        gc.collect()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found[1][1], found[0][1]))


def test_a_graph_is_destroyed_while_others_live(nccl_ranks):
    nccl_ranks(2, _destroyed)


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _registered(rank: int, world: int) -> list[tuple[list[float], list[torch.Tensor]]]:
    """Steps in ordinary memory, in registered memory, and captured in that."""
    torch.use_deterministic_algorithms(True)
    found = []
    for registered, is_captured in ((False, False), (True, False), (True, True)):
        trainer = Trainer(mp_policy=POLICY, schedule=WirePolicy(registered=registered))
        step = capture(trainer) if is_captured else trainer
        found.append((run(trainer, step, 8, 10 * rank), trainer.weights()))
        root = unit_of(trainer.model).root
        assert bool(root.gather_pool.groups) == bool(root.reduce_pool.groups) == registered
    return found


def test_registered_memory_trains_alike(nccl_ranks):
    for plain, registered, captured in nccl_ranks(2, _registered):
        assert plain[0] == pytest.approx(registered[0], rel=1e-5)
        assert registered[0] == captured[0]
        assert plain[0][-2] < plain[0][0]
        for one, two, three in zip(plain[1], registered[1], captured[1]):
            torch.testing.assert_close(one, two)
            assert torch.equal(two, three)
