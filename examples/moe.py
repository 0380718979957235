"""A mixture of eight experts over four ranks: two halves, each of them on two ranks, which shard it.

Run it with: torchrun --nproc-per-node 4 examples/moe.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard

WIDTH, EXPERTS = 32, 8


class Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group, and get theirs; gradients go the way back."""

    @staticmethod
    def forward(ctx, x, got, sent, group):
        ctx.splits = sent, got, group
        result = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(result, x.contiguous(), got, sent, group=group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.splits), None, None, None


class Experts(nn.Module):
    def __init__(self, group):
        super().__init__()
        everyones = torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5
        self.up = nn.Parameter(everyones.chunk(group.size())[group.rank()].clone())  # this rank's
        self.down = nn.Parameter(torch.zeros(len(self.up), 2 * WIDTH, WIDTH))

    def forward(self, x, counts):  # rows by expert, and how many of each
        parts = zip(x.split(counts), self.up, self.down)
        return torch.cat([torch.relu(part @ up) @ down for part, up, down in parts])


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.router, self.experts, self.group = nn.Linear(WIDTH, EXPERTS), Experts(group), group

    def forward(self, x):  # (tokens, WIDTH)
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        sent = expert.bincount(minlength=EXPERTS).view(self.group.size(), -1)  # to each rank, for each of its experts
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        out, back = sent.sum(1).tolist(), got.sum(1).tolist()  # here the host waits; the next block is on its way
        arrived = Exchange.apply(x[order], back, out, self.group)
        local = torch.arange(got.shape[1], device=x.device).repeat(len(got)).repeat_interleave(got.flatten()).argsort()
        done = self.experts(arrived[local], got.sum(0).tolist())
        home = Exchange.apply(torch.empty_like(done).index_copy(0, local, done), out, back, self.group)
        return x + torch.empty_like(x).index_copy(0, order, home) * weight[:, None]


device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
world = dist.get_world_size()
data = init_device_mesh(device.type, (world,), mesh_dim_names=("data",))
sparse = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("same", "apart"))

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(Block(sparse["apart"].get_group()) for _ in range(2)), nn.Linear(WIDTH, WIDTH))
experts = flatshard.Experts([Experts], mesh=sparse["same"], apart=sparse["apart"])
table = flatshard.shard_model(model, mesh=data, experts=experts)
if dist.get_rank() == 0:
    print(table)
optimizer = flatshard.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

torch.manual_seed(99)  # a task of eight kinds, each with a matrix of its own
kinds, matrices = torch.randn(EXPERTS, WIDTH).to(device), torch.randn(EXPERTS, WIDTH, WIDTH).to(device) / WIDTH**0.5
torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(1, 201):
    kind = torch.randint(EXPERTS, (256,), device=device)
    x = kinds[kind] + 0.5 * torch.randn(256, WIDTH, device=device)
    loss = nn.functional.mse_loss(model(x), torch.einsum("nij,nj->ni", matrices[kind], x))
    loss.backward()
    norm = flatshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 0 and dist.get_rank() == 0:
        print(f"step {step:3}  loss {loss.item():.4f}  norm {norm.item():.3f}")
dist.destroy_process_group()
