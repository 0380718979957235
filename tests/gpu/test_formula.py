"""The formula of bytes on a GPU: what the allocator was asked for at rest and at the fullest moment of a step."""

import gc

import pytest
import torch

from flatshard.rehearsal import rehearse
from flatshard.train.model import LlamaConfig
from tests.tools.cases import Case

BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = LlamaConfig(1024, layers=4, heads=8, kv_heads=4, ffn=2816, vocab=16390, max_tokens=16)


def requested(moment: str) -> int:
    """Bytes that tensors asked for; what the allocator gives out is rounded up."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"]


def warm_up(case: Case) -> None:
    """The workspaces of matrix products, of the forward's and of the backward's thread, are there to stay."""
    with torch.device("cuda"):
        model, token = case.build(CONFIG).to(case.param), torch.zeros(1, 1, dtype=torch.long)
    model(token, token).backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "case",
    [
        Case((8,), param=BF16),
        Case((64,), param=BF16),
        Case((8,), param=BF16, reduce=FP32),
        Case((8,), strategy=2, param=BF16),
        Case((2, 8), param=BF16),
        Case((8,), tied=True, param=BF16),
        Case((8,), microbatches=2, param=BF16),
        Case((8,), param=BF16, layout="flat"),
        Case((2, 8), outer="optim", param=BF16),
    ],
    ids=str,
)
def test_bytes_at_rest_and_at_the_peak(case):
    formula = case.formula(CONFIG)
    warm_up(case)
    gc.collect()
    before = requested("current")
    with rehearse(case.world, "free"):
        with torch.device("cuda"):
            model = case.build(CONFIG)
        optimizer = case.shard(model, "cuda")
        for _ in range(3):
            case.passes(model, "cuda")
            optimizer.step()
            optimizer.zero_grad()
        if case.microbatches > 1:  # a forward without gradients gives back memory that stays for the next backwards
            with torch.no_grad():
                model(*2 * [torch.zeros(1, 1, dtype=torch.long, device="cuda")])
        torch.cuda.synchronize()
        resting = requested("current")
        torch.cuda.reset_peak_memory_stats()
        case.passes(model, "cuda")
        torch.cuda.synchronize()
        peak = requested("peak") - resting
    assert resting - before == pytest.approx(formula.resting.total, rel=0.02)
    assert peak == pytest.approx(formula.peak.total - formula.resting.total, rel=0.02)
