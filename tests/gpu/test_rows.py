"""Embeddings by rows on a GPU: between ranks that share it, and in a CUDA graph, where nothing can be counted."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from flatshard import CPUOffloadPolicy, capture, fully_shard, fully_shard_optimizer
from flatshard.rehearsal import rehearse
from tests.dist.test_rows import VOCAB, _model, _shard, _texts


def _equals(rank, world):
    plain, model = _model().cuda(), _shard(_model())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        batch = [[text.cuda() for text in texts] for texts in _texts(step, world, 2)]
        for texts in batch:
            (plain(*texts) / world).backward()
        model(*batch[rank]).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad.to_local(), theirs.grad.chunk(world)[rank])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.embed.weight.to_local(), plain.embed.weight.detach().chunk(world)[rank])


def test_ranks_that_share_a_gpu_equal_one_process(gpu_ranks):
    gpu_ranks(2, _equals)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def _trained(captured, steps=12):
    with rehearse(4, "free"):
        model = _shard(_model())
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True))

        def step(*texts):
            loss = model(*texts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = capture(step) if captured else step
        losses = [run(*(text.cuda() for text in _texts(number, 1, 2)[0])).clone() for number in range(steps)]
        weights = [parameter.to_local().clone() for parameter in model.parameters()]
    return [*losses, *weights]


@pytest.mark.usefixtures("deterministic")
def test_captured_look_ups_are_eager_ones():
    for captured, eager in zip(_trained(True), _trained(False)):
        assert torch.equal(captured, eager)


def test_tables_in_host_memory_are_refused():
    with rehearse(4, "free"), pytest.raises(ValueError, match="cannot be used with optional=True or CPUOffloadPolicy"):
        fully_shard(nn.Embedding(VOCAB, 4), rows=True, offload_policy=CPUOffloadPolicy())
