"""A step on whole matrices launches its all-to-alls in one order on every rank, each an interpreter of its own."""

from __future__ import annotations

import copy

from torch.distributed.device_mesh import init_device_mesh

from flatshard import whole_optimizer
from flatshard.optim.assignment import newton_schulz
from tests.whole.cases import Net, assert_equal_bits, give, gradients, inside, muon, shard


def _launches(rank: int, world: int) -> list[tuple[str, int]]:
    mesh = init_device_mesh("cpu", (world,))
    reference = Net(depth=3)
    model = shard(copy.deepcopy(reference), mesh=mesh)
    found = []
    for each in (reference, model):
        optimizer = whole_optimizer(muon, each, inside, split={"*qkv*": 3}, cost=newton_schulz, bucket_bytes=300)
        for step in range(2):
            give(each, gradients(reference, step))
            optimizer.step()
    assert_equal_bits(model, reference)
    stepper = optimizer.__dict__["_flatshard_stepper"]
    (lane,) = {bucket.lane for bucket in stepper.buckets}
    found = [operation.name for operation in lane.history]
    optimizer.state_dict()
    return [found, [(each.name, each.owner) for each in stepper.matrices]]


def test_all_ranks_launch_alike(interpreters):
    first, *others = interpreters(3, _launches)
    assert len(first[0]) > 8
    assert all(other == first for other in others)
