"""What `fsdp_no_shard` changes for a vision-language model with a frozen encoder: bytes on the wire, and memory.

    python -m benchmarks.frozen_encoder            as one rank of 8, on this machine's CPU, over a modelled network

The encoder has 12 blocks of width 768 (85M parameters), the language model 12 blocks of width 1024 (151M). Weights are
counted in bytes that rest on a rank, and in those that are gathered at most at a time.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from benchmarks.table import NETWORK
from flatshard.engine.units.unit import unit_of
from flatshard.megatron import MixedPrecisionPolicy, fsdp_no_shard, fully_shard_model, fully_shard_optimizer
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.network import difference


class VisionLanguage(nn.Module):
    def __init__(self, scale: int) -> None:
        super().__init__()
        vision, text = 768 // scale, 1024 // scale
        self.encoder = nn.ModuleList(block(vision) for _ in range(12))
        self.bridge = nn.Linear(vision, text)
        self.blocks = nn.ModuleList(block(text) for _ in range(12))
        self.encoder.requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        for layer in self.encoder:
            image = layer(image)
        x = self.bridge(image)
        for layer in self.blocks:
            x = layer(x)
        return x


def block(width: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


def measure(marked: bool, scale: int, world: int = 8) -> dict[str, float]:
    with rehearse(world, NETWORK) as rehearsal:
        torch.manual_seed(0)
        model = VisionLanguage(scale).bfloat16()
        if marked:
            fsdp_no_shard(model.encoder)
        model = fully_shard_model(
            model,
            fsdp_unit_modules=[nn.TransformerEncoderLayer],
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
        )
        optimizer = fully_shard_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
        image = torch.randn(1, 16, 768 // scale).bfloat16()
        gathered = 0
        for _ in range(3):
            before = rehearsal.medium.traffic.snapshot()
            model(image).square().mean().backward()
            pool = unit_of(model.module).root.gather_pool
            gathered = max(gathered, pool.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
        tensors = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        return {
            "launches": sum(entry.launches for entry in traffic.values()),
            "wire MB": sum(entry.wire_bytes for entry in traffic.values()) / 1e6,
            "resting MB": sum(t.numel() * t.element_size() for t in tensors) / 1e6,
            "gathered MB": gathered / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="divides the widths")
    options = parser.parse_args()
    for marked in (False, True):
        figures = "".join(f"{name}: {value:10.1f}   " for name, value in measure(marked, options.scale).items())
        print(f"{'fsdp_no_shard(encoder)' if marked else 'all sharded':24}{figures}")


if __name__ == "__main__":
    main()
