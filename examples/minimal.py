"""A sharded model on one screen. Run it with: torchrun --nproc-per-node 2 examples/minimal.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

from flatshard import shard_model

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()  # NCCL for tensors on GPUs, Gloo for tensors on CPUs

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
shard_model(model)  # or fully_shard(block) for every block, then fully_shard(model), as with FSDP2
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # built after sharding

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(1, 101):
    x = torch.randn(128, 64, device=device)
    loss = nn.functional.mse_loss(model(x), x[:, :4].sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step:3}  loss {loss.item():.4f}")
dist.destroy_process_group()
