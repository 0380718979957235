"""What `fully_shard` can be told: placements that are legal train right, and all that is not is refused, unchanged."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from flatshard import MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from flatshard.layout import Flat, Partial, Replicate
from tests.dist.models import assert_rows
from tests.dist.test_accumulation import MICRO, Say, chain
from tests.dist.test_counts import DIM
from tests.dist.test_errors import refused
from tests.dist.test_strategies import mesh_of


def legal(axes):
    """All placements that the constructor lets pass."""
    kinds = Replicate(), Partial("avg"), Flat()
    found = []
    for choice in itertools.product(kinds, repeat=3 * axes):
        try:
            found.append(Placements(choice[:axes], choice[axes : 2 * axes], choice[2 * axes :]))
        except ValueError:
            continue
    return found


def _trains(rank, world, axes, numbers):
    for number in numbers:
        placements = legal(axes)[number]
        layout = ("tensor", "flat")[number % 2]
        model, reference = chain(), chain()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh_of(axes, world), strategy=placements, layout=layout)
        optimizers = [
            fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (model, reference)
        ]
        rng = torch.Generator().manual_seed(1)
        for _ in range(2):
            for micro in range(MICRO):
                rows = torch.randn(8, DIM, generator=rng)
                with Say.root(model, micro):
                    model(rows.chunk(world)[rank]).square().mean().backward()
                reference(rows).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            note = f"{placements}: %s"
            assert_rows(ours.detach(), theirs.data, rtol=1e-4, atol=1e-6, msg=lambda m, note=note: note % m)


@pytest.mark.parametrize(
    ("axes", "part"), [(1, 0), (2, 0), *(pytest.param(2, part, marks=pytest.mark.full) for part in range(1, 5))]
)
def test_every_legal_placement_equals_one_process(ranks, axes, part):
    """All of one axis, and a fifth of the many of two axes; the full product has the rest."""
    numbers = range(part, len(legal(axes)), 1 if axes == 1 else 5)
    assert len(numbers) > 3
    ranks(2**axes, _trains, axes, list(numbers))


def test_illegal_placements_are_refused():
    whole, cut, partial = (Replicate(),), (Flat(),), (Partial("avg"),)
    for given, words in (
        ((cut, cut, whole), "shards parameter or gradient but not optimizer"),
        ((whole, cut, whole), "shards parameter or gradient but not optimizer"),
        ((whole, whole, cut), "has Replicate for gradient"),
        ((partial, cut, cut), "only gradient can be"),
        ((cut, cut, partial), "only gradient can be"),
        ((cut, (Flat(), Flat()), cut), "different lengths"),
        (((Replicate(), Replicate()), (Flat(), Partial("avg")), (Flat(), Flat())), "a later one is not"),
    ):
        with pytest.raises(ValueError, match=words):
            Placements(*given)
    with pytest.raises(TypeError, match="parameter"):
        Placements((Shard(0),), cut, cut)
    with pytest.raises(TypeError, match="gradient"):
        Placements(cut, Flat(), cut)


def _refused(rank, world):
    line, square = mesh_of(1, world), mesh_of(2, world)
    cut = Placements((Flat(),), (Flat(),), (Flat(),))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for kwargs, kind, words in (
        ({"strategy": "zero3"}, ValueError, ["zero3", "optim_grads_params", "0 to 3"]),
        ({"strategy": 4}, ValueError, ["strategy=4"]),
        ({"strategy": -1}, ValueError, ["strategy=-1"]),
        ({"strategy": True}, ValueError, ["strategy=True"]),
        ({"outer_strategy": "no_shard"}, ValueError, ["outer_strategy", "two axes"]),
        ({"outer_strategy": "optim", "mesh": line}, ValueError, ["outer_strategy", "two axes"]),
        ({"outer_strategy": "optim_grads", "mesh": square}, ValueError, ["outer_strategy='optim_grads'"]),
        ({"outer_strategy": "optim", "strategy": "optim", "mesh": square}, ValueError, ["optim_grads_params"]),
        ({"strategy": cut, "mesh": square}, ValueError, ["Placements have 1 axes", "has 2"]),
        ({"strategy": cut, "outer_strategy": "optim"}, ValueError, ["already says it"]),
        ({"reshard_after_forward": 3}, ValueError, ["reshard_after_forward", "factor of 4, not 3"]),
        ({"reshard_after_forward": 4, "mesh": square}, ValueError, ["factor of 2, not 4"]),
        ({"reshard_after_forward": 0}, ValueError, ["reshard_after_forward", "not 0"]),
        ({"reshard_after_forward": 2.0}, ValueError, ["reshard_after_forward", "2.0"]),
        ({"layout": "rows"}, ValueError, ["layout='rows'", "tensor, flat, auto"]),
        ({"gradient_scale": "tokens"}, ValueError, ["gradient_scale='tokens'"]),
        ({"gradient_scale": math.inf}, ValueError, ["finite"]),
        ({"gradient_scale": True}, ValueError, ["gradient_scale=True"]),
        ({"mp_policy": torch.bfloat16}, TypeError, ["mp_policy", "MixedPrecisionPolicy"]),
        ({"schedule": MixedPrecisionPolicy()}, TypeError, ["schedule", "SchedulePolicy"]),
        ({"mesh": [0, 1]}, TypeError, ["mesh=[0, 1]", "DeviceMesh"]),
    ):
        refused(model, lambda kwargs=kwargs: fully_shard(model, **kwargs), kind, *words)


def test_wrong_choices_are_refused_and_change_nothing(ranks):
    assert ranks(4, _refused) == [None] * 4
