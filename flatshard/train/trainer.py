"""Training itself: shard a model, step, sample. Every rank calls the same methods in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from flatshard.api import fully_shard
from flatshard.policy import MixedPrecisionPolicy
from flatshard.train.data import batch_rows, first_words
from flatshard.train.model import Llama
from flatshard.train.settings import Settings


@dataclass(frozen=True)
class Step:
    """One optimizer step. The tensors have no dims and are equal on all ranks; reading one waits for the device.

    ``loss``: mean over the whole batch, before the update, in nats per byte. ``grad_norm``: before clipping.
    """

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float


class Trainer:
    """A sharded model and its optimizer on a mesh of one axis."""

    def __init__(self, settings: Settings, text: Tensor, mesh: DeviceMesh) -> None:
        self.settings = settings
        self.text = text
        self.mesh = mesh
        self.device = torch.device(mesh.device_type)
        settings.rows_per_rank(mesh.size())  # refuse before anything is built
        torch.manual_seed(settings.seed)  # all ranks make the same weights, then keep their shards
        self.model = Llama(settings.model)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._shard()
        self.optimizer = self._make_optimizer()

    def _shard(self) -> None:
        policy = MixedPrecisionPolicy()
        if self.settings.precision == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(self.model, mesh=self.mesh, mp_policy=policy)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.settings.lr, betas=(0.9, 0.95), fused=True)

    def steps(self) -> Iterator[Step]:
        """Train, one step each time the next is asked for."""
        for number in range(1, self.settings.steps + 1):
            yield self._step(number)

    def _step(self, number: int) -> Step:
        tokens, targets = batch_rows(self.text, self.settings, number, self.mesh.get_local_rank(), self.mesh.size())
        loss = self.model(tokens.to(self.device), targets.to(self.device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or float("inf"))
        assert isinstance(norm, DTensor)
        lr = self.settings.lr_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(number, self._mean(loss.detach()), norm.full_tensor(), lr)

    def _mean(self, value: Tensor) -> Tensor:
        """The mean over ranks, on each of them."""
        mean: Tensor = DTensor.from_local(value / self.mesh.size(), self.mesh, [Partial()]).full_tensor()
        return mean

    @torch.no_grad()
    def sample(self) -> str:
        """What the model writes after the prompt, prompt included. All ranks run it together and get the same text."""
        settings = self.settings
        draw = torch.Generator(self.device).manual_seed(settings.seed)
        prompt = first_words(self.text) if settings.prompt is None else settings.prompt.encode()
        written = torch.tensor([list(prompt)], device=self.device)
        self.model.eval()
        for _ in range(settings.sample):
            scores = self.model(written[:, -settings.context :])[:, -1].float()
            if settings.temperature > 0:
                chances = torch.softmax(scores / settings.temperature, dim=-1)
                following = torch.multinomial(chances, 1, generator=draw)
            else:
                following = scores.argmax(dim=-1, keepdim=True)
            written = torch.cat((written, following), dim=1)
        self.model.train()
        return bytes(written[0].tolist()).decode(errors="replace")
