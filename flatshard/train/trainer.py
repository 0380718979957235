"""Training itself: shard a model, step, sample. Every rank calls the same methods in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from flatshard import checkpoint
from flatshard.api import fully_shard
from flatshard.checkpoint.errors import exchange, together
from flatshard.policy import MixedPrecisionPolicy
from flatshard.train.data import batch_rows, first_words
from flatshard.train.log import Log
from flatshard.train.model import Llama
from flatshard.train.settings import FILE, Settings
from flatshard.train.stop import Stop


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

    def __init__(self, settings: Settings, text: Tensor, mesh: DeviceMesh, stop: Stop | None = None) -> None:
        self.settings = settings
        self.text = text
        self.mesh = mesh
        self.stop = stop or Stop()
        self.stopped = 0  # the signal that has ended the run early
        self.device = torch.device(mesh.device_type)
        settings.validate().rows_per_rank(mesh.size())  # refuse before anything is built
        torch.manual_seed(settings.seed)  # all ranks make the same weights, then keep their shards
        self.model = Llama(settings.model)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._shard()
        self.optimizer = self._make_optimizer()
        self.done = self.reached = self._resume()  # steps that a checkpoint has, and that have been made
        self._log: Log | None = None
        if settings.checkpoint is not None and mesh.get_local_rank() == 0:
            settings.write(settings.checkpoint / FILE)
        if settings.losses is not None and mesh.get_local_rank() == 0:
            self._log = Log(settings.losses, self.done)

    def _resume(self) -> int:
        """Continue from the newest checkpoint of the settings; the number of its step, 0 where there is none.

        Rank 0 says which that is: storage that ranks share may show a new folder to some of them later than to others.
        """
        folder = self.settings.checkpoint
        if folder is None:
            return 0
        ranks = exchange("checkpoint_load")
        newest = together(ranks, lambda: _name_of(checkpoint.latest(folder)) if ranks.rank == 0 else None)[0]
        if newest is None:
            return 0
        found = folder / newest
        extra = checkpoint.load(found, self.model, self.optimizer)
        self.settings.check_continues(extra["recipe"], found)
        return int(extra["step"])

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
        """Train, one step each time the next is asked for. Batches follow from the number of the step alone.

        It ends after the last step, or after one in which a rank was asked to; either is saved.
        """
        saving: checkpoint.Pending | None = None
        try:
            for number in range(self.done + 1, self.settings.steps + 1):
                step = self._step(number)
                self.reached = number
                if self._log is not None:
                    self._log.add(step)
                self.stopped = self.stop.agreed()
                if self.settings.checkpoint is not None and (self.stopped or self._is_saved(number)):
                    saving = self._save(self.settings.checkpoint / f"step-{number}", number)
                yield step
                if self.stopped:
                    break
            if self._log is not None:
                self._log.write()
        finally:
            if saving is not None:
                saving.wait()

    def _is_saved(self, number: int) -> bool:
        return number == self.settings.steps or number % self.settings.save_every == 0

    def _save(self, path: Path, number: int) -> checkpoint.Pending:
        if self._log is not None:
            self._log.write()
        extra = {"step": number, "recipe": self.settings.recipe}
        return checkpoint.save(path, self.model, self.optimizer, extra, keep_last=self.settings.keep, asynchronous=True)

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


def _name_of(path: Path | None) -> str | None:
    return None if path is None else path.name
