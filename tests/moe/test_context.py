"""Context parallelism: sequences cut over an axis that weights are sharded over too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import flatshard
from flatshard import DataParallelMeshDims, fully_shard
from tests.moe.cases import exchange

DIM, VOCAB, LENGTH = 8, 11, 12


class Attention(nn.Module):
    """Causal attention. Of a sequence on several ranks, each has its queries and fetches all keys and values."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias: that of keys has a gradient of nothing but rounding, which AdamW makes steps of.
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.group = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        first = 0
        if self.group is not None:
            rows = [len(x)] * self.group.size()  # to each rank, and of each
            k, v = (
                torch.cat(exchange(part.repeat(len(rows), 1, 1), rows, rows, self.group).chunk(len(rows)), 1)
                for part in (k, v)
            )
            first = dist.get_rank(self.group) * x.shape[1]
        seen = torch.arange(k.shape[1]) <= torch.arange(first, first + x.shape[1])[:, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.ffn = nn.LayerNorm(DIM), Attention(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.ffn(self.attention(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def _train(rank, world, how):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    if how == "flattened":
        mesh["dp", "cp"]._flatten("dp_cp")
        choices = {"mesh": mesh["dp_cp"]}
    elif how == "two axes":
        choices = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard=("dp", "cp"))}
    else:  # weights are copied over data, sharded over context
        choices = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="cp", replicate="dp")}
    reference, model = build(), build()
    for block in model.blocks:
        block.attention.group = mesh["cp"].get_group()
        fully_shard(block, **choices)
    fully_shard(model, **choices)
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held < (0.6 if how == "hybrid" else 0.3) * sum(p.numel() for p in reference.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, reference)]
    data = torch.randint(VOCAB, (3, 4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for batch in data:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        mine = [t.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("cp")] for t in (tokens, targets)]
        loss, wanted = model(*mine), reference(tokens, targets)
        loss.backward()
        wanted.backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, wanted.detach())
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.5), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["flattened", "two axes", "hybrid"])
def test_a_sequence_over_ranks_equals_one_process(ranks, how):
    ranks(4, _train, how)
