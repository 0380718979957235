"""The kernel of `AdamW8bit` gives the bits of torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatshard.buffer import kernels
from flatshard.optim import AdamW8bit

# Rows of whole blocks, of less than one, and of some more; and vectors, which have no codes.
SHAPES = [(7, 512), (11, 300), (5, 8, 9), (6, 8), (13,), (3000, 4096), (1, 64), (40_000, 257)]


def run(dtype: torch.dtype) -> tuple[list[nn.Parameter], AdamW8bit]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)

    parameters = [nn.Parameter(draw(shape, 0.2)) for shape in SHAPES]
    optimizer = AdamW8bit(parameters, lr=1e-2)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = draw(parameter.shape, 10.0 ** (step - 2))
            parameter.grad[0] = 0.0
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_the_kernel(monkeypatch, dtype):
    launched = []
    monkeypatch.setattr(kernels, "usable", lambda tensor: launched.append(tensor) or True)
    parameters, optimizer = run(dtype)
    assert len(launched) == 4 * sum(len(shape) > 1 and shape != (6, 8) for shape in SHAPES)
    monkeypatch.setattr(kernels, "usable", lambda tensor: False)
    by_operations, reference = run(dtype)
    for found, wanted in zip(parameters, by_operations):
        assert torch.equal(found, wanted), found.shape
        assert found._version >= 4  # autograd notices the steps
        assert optimizer.state[found].keys() == reference.state[wanted].keys()
        for key, value in reference.state[wanted].items():
            assert torch.equal(optimizer.state[found][key], value), (found.shape, key)
