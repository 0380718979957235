"""A model and the ways to train it that the formula of bytes is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard.policy import MixedPrecisionPolicy, placements_for
from flatshard.tools.dry_run import Memory, memory_of
from flatshard.tools.group_bytes import TrainingSetup
from flatshard.tools.model_shapes import model_of
from flatshard.train.model import Llama, LlamaConfig

# Rows that divide by nothing, as vocabularies have them.
CONFIG = LlamaConfig(128, layers=4, heads=4, kv_heads=2, ffn=320, vocab=1030, max_tokens=4)


@dataclass(frozen=True)
class Case:
    """``mesh``: sizes of its axes. ``tied``: the head's weights are the embedding's."""

    mesh: tuple[int, ...]
    strategy: int = 3
    outer: str | None = None
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    layout: str = "tensor"
    schedule: flatshard.SchedulePolicy = field(default_factory=flatshard.SchedulePolicy)
    microbatches: int = 1
    tied: bool = False
    gather: str | None = None
    reduces: Any = None

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{name}={value}" for name, value in given if value != flatshard.SchedulePolicy())

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    @property
    def precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=self.param, reduce_dtype=self.reduce, gather_format=self.gather, reduce_format=self.reduces
        )

    def build(self, config: LlamaConfig = CONFIG) -> Llama:
        model = Llama(config)
        if self.tied:
            model.head.projection.weight = model.embed.weight
        return model

    def formula(self, config: LlamaConfig = CONFIG) -> Memory:
        with torch.device("meta"):
            shapes = model_of(self.build(config))
        placements = placements_for(self.strategy, self.outer, len(self.mesh))
        return memory_of(
            shapes,
            TrainingSetup(
                self.mesh,
                placements,
                self.precision,
                self.layout,
                schedule=self.schedule,
                microbatches=self.microbatches,
            ),
        )

    def shard(self, model: nn.Module, device: str = "cpu") -> torch.optim.Optimizer:
        """Shards the model; returns its optimizer."""
        flatshard.shard_model(
            model,
            mesh=init_device_mesh(device, self.mesh, mesh_dim_names=("outer", "inner")[-len(self.mesh) :]),
            strategy=self.strategy,
            outer_strategy=self.outer,
            mp_policy=self.precision,
            layout=self.layout,
            schedule=self.schedule,
        )
        return flatshard.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))

    def warmed_up(self, model: Llama) -> torch.optim.Optimizer:
        """Shards the model and trains it for two steps, after which nothing is new; returns its optimizer."""
        optimizer = self.shard(model)
        for _ in range(2):
            self.passes(model)
            optimizer.step()
            optimizer.zero_grad()
        if self.microbatches > 1:  # a forward without gradients gives back memory that stays for the next backwards
            with torch.no_grad():
                model(*2 * [torch.zeros(1, 1, dtype=torch.long)])
        return optimizer

    def passes(self, model: Llama, device: str = "cpu") -> None:
        """Forward and backward of all micro-batches. One token each: there are next to no activations."""
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        for number in range(self.microbatches):
            with flatshard.microbatch(model, is_first=number == 0, is_last=number == self.microbatches - 1):
                model(token, token).backward()
