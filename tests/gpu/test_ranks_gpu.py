"""Two ranks share one GPU, with CUDA in use in the test process as well."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _sum_on_device(rank: int, world: int) -> tuple[int, torch.Tensor]:
    total = torch.full((1000,), float(rank + 1), device="cuda")
    dist.all_reduce(total)
    return torch.cuda.current_device(), total


def test_ranks_share_the_device(gpu_ranks):
    here = torch.full((1000,), 3.0, device="cuda")  # CUDA starts in this process before the ranks do
    for _ in range(2):
        for device, total in gpu_ranks(2, _sum_on_device):
            assert device == 0
            assert total.device.type == "cpu"
            assert torch.equal(total, here.cpu())
