"""Plans of torch's `parallelize_module`: sequence-parallel norms, embeddings cut by vocabulary, the loss in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import flatshard
from flatshard import fully_shard, fully_shard_optimizer

DIM, VOCAB, LENGTH = 8, 12, 6


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(DIM), Feedforward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def parallelized(model: Decoder, tp) -> Decoder:
    """Between blocks, each rank has its part of every sequence; in them, its part of the features."""
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            tp,
            {
                "norm": SequenceParallel(),
                "ffn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "ffn.up": ColwiseParallel(),
                "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def train_beside(model, reference, mesh):
    """Several steps of both with AdamW and clipping, compared."""
    data, tp = mesh.size() // mesh["tp"].size(), mesh["tp"].size()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, reference)]
    fully_shard_optimizer(optimizers[0])
    batches = torch.randint(VOCAB, (3, 2 * data, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for batch in batches:
        mine = batch.chunk(data)[mesh.get_rank() // tp]
        with loss_parallel():
            logits = model(mine[:, :-1])
            assert isinstance(logits, DTensor)
            assert logits.to_local().shape[-1] == VOCAB // tp
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
        wanted = F.cross_entropy(reference(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        wanted.backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        assert norm > 0.2
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.2), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, rtol=1e-4, atol=1e-5)


def _train(rank, world, choices):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = build(), parallelized(build(), mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **choices)
    fully_shard([model.norm, model.head], mesh=mesh["dp"], **choices)
    fully_shard(model, mesh=mesh["dp"], **choices)
    assert model.embed.weight.placements[1] == Shard(0)  # by vocabulary
    assert model.norm.weight.placements[1] == Replicate()
    train_beside(model, reference, mesh)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        *(pytest.param(given, marks=pytest.mark.full) for given in ({"strategy": 2}, {"reshard_after_forward": False})),
    ],
    ids=str,
)
def test_sequence_parallel_norms_vocabulary_and_loss(ranks, choices):
    ranks(4, _train, choices)
