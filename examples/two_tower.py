"""Text learns to match images: a frozen vision encoder that stays whole, and a text tower that is sharded and trained.

Run it with: torchrun --nproc-per-node 2 examples/two_tower.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import flatshard

WIDTH, WORDS, CLASSES, BATCH = 64, 200, 32, 24


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=4), nn.GELU(), nn.Flatten(), nn.Linear(16 * 4, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.words = nn.Embedding(WORDS, WIDTH)
        self.text = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True) for _ in range(2))
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """How well each text of the batch fits each of its images."""
        seen = self.vision(images)
        x = self.words(tokens)
        for layer in self.text:
            x = layer(x)
        said = self.projection(x.mean(dim=1))
        return 10 * F.normalize(said, dim=1) @ F.normalize(seen, dim=1).T


device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()

torch.manual_seed(0)  # the same weights, and the same images and texts of each class, on every rank
model = TwoTowers()
pictures = torch.randn(CLASSES, 3, 8, 8, device=device)
sentences = torch.randint(WORDS, (CLASSES, 8), device=device)

model.vision.requires_grad_(False)
flatshard.no_shard(model.vision)  # before fully_shard: it is neither cut nor gathered, and no hook slows it down
for layer in model.text:
    flatshard.fully_shard(layer)
flatshard.fully_shard(model)
if dist.get_rank() == 0:
    print(flatshard.summary(model))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
flatshard.fully_shard_optimizer(optimizer)  # steps flat local tensors, without a dispatch for each parameter

torch.manual_seed(1 + dist.get_rank())  # other examples on every rank
for step in range(1, 61):
    chosen = torch.randperm(CLASSES, device=device)[:BATCH]
    images = pictures[chosen] + 0.1 * torch.randn(len(chosen), 3, 8, 8, device=device)
    scores = model(images, sentences[chosen])
    loss = F.cross_entropy(scores, torch.arange(len(chosen), device=device))
    loss.backward()
    flatshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step == 1 or step % 20 == 0) and dist.get_rank() == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")
dist.destroy_process_group()
