"""Models and a training loop in Megatron-Core's manner, without Megatron-Core."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

DIM, HIDDEN, TP = 6, 8, 2


class _Copied(torch.autograd.Function):
    """Identity; its gradient is the sum over a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    """The sum over a group; its gradient is identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    """Cut by columns, then by rows, over a tensor-parallel group; parameters are plain and marked."""

    def __init__(self, group=None) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(1)
        parts, part = (1, 0) if group is None else (group.size(), group.rank())
        self.up = nn.Linear(DIM, HIDDEN // parts)
        self.down = nn.Linear(HIDDEN // parts, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        if group is None:
            return
        whole = ParallelMLP()
        self.up.weight.data.copy_(whole.up.weight.data.chunk(parts, 0)[part])
        self.up.bias.data.copy_(whole.up.bias.data.chunk(parts, 0)[part])
        self.down.weight.data.copy_(whole.down.weight.data.chunk(parts, 1)[part])
        self.norm.load_state_dict(whole.norm.state_dict())
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1

    def forward(self, x):
        x = self.norm(x)
        if self.group is None:
            return x + self.down(torch.tanh(self.up(x)))
        out = _Summed.apply(self.down(torch.tanh(self.up(_Copied.apply(x, self.group)))), self.group)
        return x + out


class Experts(nn.Module):
    """Every token goes to all experts but one, of which each rank of the group has some; one process has them all."""

    def __init__(self, group=None, number=2) -> None:
        super().__init__()
        self.group, self.number = group, number
        torch.manual_seed(2)
        whole = [nn.Linear(DIM, DIM) for _ in range(number)]
        count = number if group is None else number // group.size()
        self.first = 0 if group is None else count * group.rank()
        self.idle = -1  # gets no token
        self.local = nn.ModuleList(whole[self.first : self.first + count])
        if group is not None:
            for parameter in self.local.parameters():
                parameter.allreduce = False

    def forward(self, x):
        used = [expert for number, expert in enumerate(self.local, self.first) if number != self.idle]
        if self.group is None:
            return x + sum(torch.tanh(expert(x)) for expert in used) / self.number
        everyones = _Gathered.apply(x, self.group)
        made = sum((torch.tanh(expert(everyones)) for expert in used), 0 * everyones)
        made = _Copied.apply(made, self.group)  # gradients of all ranks' rows
        made = _Summed.apply(made, self.group) / self.number
        return x + made.chunk(self.group.size())[self.group.rank()]


class _Gathered(torch.autograd.Function):
    """All ranks' rows; gradients are those of all ranks for the rows of this one."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class Model(nn.Module):
    def __init__(self, tp=None, ep=None, experts=2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ParallelMLP(tp), Experts(ep, experts), ParallelMLP(tp)])
        torch.manual_seed(3)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def groups_of(**members):
    """The process groups of this rank, each from the ranks of all such groups."""
    found = {}
    for name, lists in members.items():
        made = [dist.new_group(ranks) for ranks in lists]
        found[name] = next(group for group, ranks in zip(made, lists) if dist.get_rank() in ranks)
    return SimpleNamespace(**found)
