"""Memory that NCCL registers, on one rank; tests/nccl has several."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flatshard import MixedPrecisionPolicy
from flatshard.engine.units.unit import unit_of
from flatshard.experimental import WirePolicy
from tests.gpu.test_capture import Trainer, ranks, run

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_registered_memory_trains_alike_and_outlives_its_process_group():
    with ranks("nccl"):
        found = []
        for registered in (False, True):
            trainer = Trainer(mp_policy=POLICY, schedule=WirePolicy(registered=registered))
            found.append((run(trainer, trainer, 6), trainer.weights()))
        root = unit_of(trainer.model).root
        assert root.gather_pool.groups
        assert root.reduce_pool.groups
    del trainer, root  # torch would end the process if that freed the memory
    assert found[0][0] == found[1][0]
    for plain, staged in zip(found[0][1], found[1][1]):
        assert torch.equal(plain, staged)


def test_nccl_communicates_in_memory_of_the_pool_and_gets_it_back():
    with ranks("nccl"):
        trainer = Trainer(schedule=WirePolicy(registered=True))
        run(trainer, trainer, 2)
        pool = unit_of(trainer.model).root.gather_pool
        before = torch.cuda.memory_reserved()
        tensor = pool.empty(1 << 24, torch.float32)
        for _ in range(3):
            pool.allocate(tensor)
            with pool.lane.entered():
                tensor.fill_(2.0)
                dist.all_gather_into_tensor(tensor, tensor, group=pool.groups[0])
            pool.lane.join()
            assert tensor.sum().item() == 2.0 * (1 << 24)
            pool.release(tensor)
        pool.drop()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before
