"""Steps of state, and of weights, in host memory: on three streams of a GPU, with the bits of an ordinary step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from flatshard.optim import AdamW8bit, streaming
from tests.gpu.test_out_of_memory import TOKENS, WIDTH, Stack

STEPS, PIECE = 4, 1 << 18
OPTIMIZERS: dict[str, Any] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "capturable": lambda params: torch.optim.AdamW(params, lr=1e-2, capturable=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "8 bits": lambda params: AdamW8bit(params, lr=1e-2),
}
WAYS: dict[str, tuple[OffloadPolicy, dict[str, bool]]] = {
    "ordinary": (OffloadPolicy(), {}),
    "state": (OffloadPolicy(), {"offload_state": True}),
    "state, in backward": (OffloadPolicy(), {"offload_state": True, "in_backward": True}),
    "weights": (CPUOffloadPolicy(), {"in_backward": True}),
    "weights, some pinned": (CPUOffloadPolicy(pin_limit=40 << 20), {"in_backward": True}),
    "weights, not pinned": (CPUOffloadPolicy(pin_memory=False), {"in_backward": True}),
    "weights, clipped": (CPUOffloadPolicy(device_grad_bytes=1 << 40), {}),
}


def _build(kind: str, way: str) -> tuple[Any, torch.optim.Optimizer]:
    policy, options = WAYS[way]
    torch.manual_seed(0)
    model = Stack(False)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, offload_policy=policy, mp_policy=mixed)
    return model, fully_shard_optimizer(OPTIMIZERS[kind](model.parameters()), **options)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, micro: int, clips: bool = False
) -> float:
    x = torch.randn(micro, TOKENS // 8, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank)).cuda()
    total = 0.0
    for index, part in enumerate(x):
        with microbatch(model, is_first=index == 0, is_last=index == micro - 1):
            loss = model(part)
            loss.backward()
        total += loss.item() if number == STEPS - 1 else 0.0  # which waits for the device: as late as possible
    if clips:
        clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _bits(rank: int, world: int, kind: str, way: str, micro: int, clips: bool) -> tuple[float, list[Any], list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "PIECE", PIECE)
        model, optimizer = _build(kind, way)
        losses = [_step(model, optimizer, number, rank, micro, clips) for number in range(STEPS)]
        state = [optimizer.state[p] for p in model.parameters()]
        wide = [v.to_local() for entries in state for v in entries.values() if v.dim() > 0]
        if way != "ordinary":
            assert {value.device.type for value in wide} == {"cpu"}
            pinned = {value.is_pinned() for value in wide}
            assert False in pinned if "some" in way else pinned == {"not" not in way}
        counts = [float(entries.get("step", 0)) for entries in state]
        weights = [p.to_local().detach().cpu() for p in model.parameters()]
        return losses[-1], [*weights, *[value.cpu() for value in wide]], counts


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ordinary"])
@pytest.mark.parametrize(("kind", "micro"), [(kind, 1 + number % 2) for number, kind in enumerate(OPTIMIZERS)])
def test_bits_are_those_of_an_ordinary_step(gpu_ranks, kind, way, micro):
    if "clipped" in way:
        micro = 1  # gradients that are added up are in host memory, where the norm may be another in the last bit
    ordinary, streamed = (gpu_ranks(2, _bits, kind, each, micro, "clipped" in way) for each in ("ordinary", way))
    for (loss, wanted, counts), (other, found, others) in zip(ordinary, streamed):
        assert loss == other
        assert counts == others
        assert all(map(torch.equal, found, wanted))


def _peak(rank: int, world: int, way: str) -> tuple[int, int, int]:
    """Bytes of the device in steps after the second: what rests, and the most; and those of the optimizer's state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "PIECE", PIECE)
        model, optimizer = _build("fused", way)
        for number in range(STEPS):
            if number == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            _step(model, optimizer, number, rank, 1)
        peak, rests = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        return rests, peak, 8 * sum(parameter.numel() for parameter in model.parameters())


def test_state_takes_no_memory_of_the_device(gpu_ranks):
    found = {way: gpu_ranks(1, _peak, way)[0] for way in ("ordinary", "state", "state, in backward", "weights")}
    rests, peak, state = found["ordinary"]
    for way in ("state", "state, in backward", "weights"):
        assert found[way][0] < rests - 0.95 * state
        assert found[way][1] < peak - 0.75 * state, way  # three pieces are there
    assert found["weights"][0] < rests - 1.45 * state  # main weights are half of the state
