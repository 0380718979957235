"""`Trainer`: shard a model, train, validate, sample. All ranks must call the same methods in the same order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from flatshard import checkpoint
from flatshard._recording import Recording, recording
from flatshard.api import microbatch
from flatshard.buffer import Exchange
from flatshard.captured import Captured, capture
from flatshard.checkpoint.errors import CheckpointError, from_all_ranks, on_all_ranks
from flatshard.optim.clip import clip_grad_norm_
from flatshard.train.build import Causal, build_model, build_optimizer, set_capturable, shard
from flatshard.train.data import Text, batch_rows, loss_scale, validation_rows
from flatshard.train.log import Log, Step
from flatshard.train.model import NO_TARGET
from flatshard.train.settings import FILE, Mistake, TrainSettings
from flatshard.train.stop import Stop

_STOP_INTERVAL = 16  # tokens of a sample between two checks whether the run is to end
_RECORDED = (3, 5)  # first and last step that --record records


class Trainer:
    """A sharded model and its optimizer on a mesh of one or two axes."""

    def __init__(self, settings: TrainSettings, text: Text, mesh: DeviceMesh, stop: Stop | None = None) -> None:
        self.settings = settings
        self.text = text
        self.mesh = mesh
        self.stop = stop or Stop()
        self.stopped = 0  # the signal that has ended the run early
        self.device = torch.device(mesh.device_type)
        settings.validate().rows_per_rank(mesh.size())  # raises before anything is built
        built = on_all_ranks(Exchange("control"), lambda: build_model(settings, text.vocab), Mistake)
        self.model, blocks, self.flops_per_token = built
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        shard(self.model, blocks, settings, mesh)
        self.optimizer = build_optimizer(self.model, blocks, settings)
        self.done = self.reached = self._resume()  # last step of the checkpoint, and last step so far
        self._lr = torch.zeros((), device=self.device) if settings.capture else None
        self._update = capture(self._eager) if settings.capture else self._eager
        set_capturable(self.optimizer, self._lr)
        if settings.record is not None and settings.steps < self.done + _RECORDED[1]:
            least = f"--steps of at least {self.done + _RECORDED[1]}"
            raise Mistake(f"--record {settings.record}: needs {least}, to record step {_RECORDED[1]} of this run")
        self._record = settings.record if mesh.get_rank() == 0 else None
        if self._record is not None and self.done:  # keep the file that was written before the run was continued
            self._record = self._record.with_stem(f"{self._record.stem}-after-{self.done}")
        self._log: Log | None = None
        on_all_ranks(Exchange("control"), lambda: self._open_log() if mesh.get_rank() == 0 else None)

    def _open_log(self) -> None:
        settings = self.settings
        if settings.checkpoint is not None and self.done < settings.steps:
            settings.write(settings.checkpoint / FILE)
        if any(each is not None for each in (settings.losses, settings.tensorboard, settings.wandb)):
            self._log = Log(settings, self.done)

    def _resume(self) -> int:
        """Load the newest checkpoint of the run; returns the number of its step, or 0 if there is none.

        Rank 0 chooses the checkpoint, because shared storage may show a new folder to some ranks later than to others.
        """
        folder = self.settings.checkpoint
        if folder is None:
            return 0
        ranks = Exchange("control")
        newest = from_all_ranks(ranks, on_all_ranks(ranks, lambda: _newest(folder) if ranks.rank == 0 else None))[0]
        if newest is None:
            return 0
        path = folder / newest
        try:
            extra = checkpoint.load(path, self.model, self.optimizer)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. If you remove {path}, the run continues from the previous checkpoint"
            ) from error
        if not isinstance(extra, dict) or not {"step", "recipe"} <= extra.keys():
            lacks = "does not have the step and the settings of a run, so another program wrote it"
            raise Mistake(f"{path} {lacks}; give another --checkpoint")
        self.settings.check_continues(extra["recipe"], path)
        return int(extra["step"])

    def steps(self) -> Iterator[Step]:
        """Train one step for each item that is requested. A batch depends only on the seed and the number of the step.

        Ends after the last step, or after a step in which a rank received a signal. Both are saved.
        """
        saving: checkpoint.PendingSave | None = None
        try:
            with ExitStack() as stack:  # so that an exception ends the recording too
                for number in range(self.done + 1, self.settings.steps + 1):
                    if self._record is not None and number == self.done + _RECORDED[0]:
                        recorded = stack.enter_context(recording())
                    step = self._step(number)
                    if self._record is not None and number == self.done + _RECORDED[1]:
                        stack.close()
                        self._record.write_text(json.dumps(self._recorded(recorded, number)))
                    self.reached = number
                    if self._log is not None:
                        self._log.add(step)
                    self.stopped = self.stop.agreed()
                    is_due = number == self.settings.steps or number % self.settings.save_every == 0
                    if self.settings.checkpoint is not None and (self.stopped or is_due):
                        saving = self._save(self.settings.checkpoint / f"step-{number}", number)
                    yield step
                    if self.stopped:
                        break
            if self._log is not None:
                self._log.write()
        finally:
            if saving is not None:
                saving.wait()

    def _save(self, path: Path, number: int) -> checkpoint.PendingSave:
        if self._log is not None:
            self._log.write()
        extra = {"step": number, "recipe": self.settings.recipe}
        return checkpoint.save(path, self.model, self.optimizer, extra, keep_last=self.settings.keep, asynchronous=True)

    def _recorded(self, recorded: Recording, number: int) -> dict[str, Any]:
        """The recording for `flatshard report`, which ends with step ``number``."""
        states = self.optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, DTensor)]
        parameters = _local_bytes(list(self.model.parameters()))
        tokens = self.settings.batch * self.settings.context / self.mesh.size()
        run = {"rank": 0, "world": self.mesh.size(), "device": self.mesh.device_type, "torch": torch.__version__}
        run |= {"tokens_per_step": tokens, "flops_per_step": tokens * self.flops_per_token}
        run["memory"] = {"parameters": parameters, "optimizer state": _local_bytes(held)}
        steps = recorded.to_dict(before=self.done + _RECORDED[0] - 1)
        return {"title": f"flatshard train, steps {number - 1} and {number}", "run": run, **steps}

    def _step(self, number: int) -> Step:
        settings = self.settings
        tokens, targets = batch_rows(self.text, settings, number, self.mesh.get_rank(), self.mesh.size())
        lr = settings.lr_at(number)
        if self._lr is not None:
            self._lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        share = torch.tensor(loss_scale(self.text, settings, number))
        batch = tokens.to(self.device), targets.to(self.device), share.to(self.device)
        is_first = isinstance(self._update, Captured) and self._update.captures_next
        loss, norm = self._captured(batch) if is_first else self._update(*batch)
        loss, norm = self._mean(loss), None if norm is None else norm.clone()  # the next replay overwrites results
        validates = settings.val_every and number % settings.val_every == 0
        val_loss = self.validate() if validates else None
        samples = settings.sample and settings.sample_every and number % settings.sample_every == 0
        return Step(number, loss, norm, lr, val_loss, self.sample() if samples else None)

    def _eager(self, tokens: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run one step; returns the mean loss of this rank's rows, and the norm of the gradient before clipping.

        With ``--in-backward``, the backward has freed the gradients, and there is no norm.
        ``share``: the result of `loss_scale`. Ranks and micro-batches may have different numbers of targets that count.
        """
        parts = self.settings.microbatches
        loss = torch.zeros((), device=self.device)
        for place, (inputs, labels) in enumerate(zip(tokens.chunk(parts), targets.chunk(parts))):
            with microbatch(self.model, is_last=place == parts - 1):
                part = self.model(inputs, labels) * share / parts
                part.backward()
            loss += part.detach()
        norm = None
        if not self.settings.in_backward:
            norm = clip_grad_norm_(self.model.parameters(), self.settings.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _captured(self, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Run the step that is captured as a CUDA graph. If this fails on one rank, Mistake on all ranks."""
        try:
            return on_all_ranks(Exchange("control"), lambda: self._update(*batch))
        except CheckpointError as error:
            raise Mistake(f"--capture: {error}") from error

    def _mean(self, value: Tensor) -> Tensor:
        """The mean of a value over all ranks."""
        value = value / self.mesh.size()
        # One axis after another: torch would do the same for two axes, with a warning.
        names = self.mesh.mesh_dim_names or ()
        for axis in [self.mesh] if self.mesh.ndim == 1 else [self.mesh[name] for name in names]:
            value = DTensor.from_local(value, axis, [Partial()]).full_tensor()
        return value

    @torch.no_grad()
    def validate(self) -> Tensor:
        """The mean loss on the validation data. All ranks must call it."""
        tokens, targets = validation_rows(self.text, self.settings, self.mesh.get_rank(), self.mesh.size())
        parts = max(1, len(tokens) // max(1, self.settings.batch // self.mesh.size()))
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for inputs, labels in zip(tokens.chunk(parts), targets.chunk(parts)):
            total += self.model(inputs.to(self.device), labels.to(self.device)) * len(inputs)
        self.model.train()
        loss = self._mean(total / len(tokens))
        if self.text.answers is None:
            return loss
        return loss / self._mean((targets != NO_TARGET).float().mean().to(self.device))

    @torch.no_grad()
    def sample(self) -> str:
        """The prompt and what the model writes after it, until a signal. All ranks must call it, and get the same."""
        settings = self.settings
        draw = torch.Generator(self.device).manual_seed(settings.seed)
        prompt = self.text.beginning() if settings.prompt is None else self.text.prompt(settings.prompt)
        written = torch.tensor([prompt], device=self.device)
        self.model.eval()
        for number in range(settings.sample):
            if number % _STOP_INTERVAL == 0:
                self.stopped = self.stop.agreed()
                if self.stopped:
                    break
            scores = self.model(written[:, -settings.context :])[:, -1].float()
            if number == 0 and scores.isnan().any():
                raise Mistake("no sample: the model computes NaN, so the training has diverged; give a smaller --lr")
            if settings.temperature > 0:
                chances = torch.softmax(scores / settings.temperature, dim=-1)
                following = torch.multinomial(chances, 1, generator=draw)
            else:
                following = scores.argmax(dim=-1, keepdim=True)
            written = torch.cat((written, following), dim=1)
        self.model.train()
        return self.text.decode(written[0].tolist())

    def export(self, folder: Path) -> None:
        """Write the model, its configuration and its tokenizer to ``folder``, in Hugging Face's format."""
        assert isinstance(self.model, Causal)
        assert self.settings.model is not None
        inner, source = self.model.inner, self.settings.model
        checkpoint.export_safetensors(inner, folder, progress=False)
        if self.mesh.get_rank() == 0:
            inner.config.save_pretrained(folder)
            for pattern in ("*token*", "chat_template*", "generation_config.json", "vocab*", "merges.txt"):
                for file in source.glob(pattern) if source.is_dir() else ():
                    shutil.copy(file, folder)


def _local_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors if isinstance(tensor, DTensor))


def _newest(folder: Path) -> str | None:
    """The name of the newest checkpoint. CheckpointError if an incomplete one has the name of a later step."""
    latest = checkpoint.latest(folder)
    done = 0 if latest is None else _step_of(latest)
    odd = next((path for path in folder.glob("step-*") if _step_of(path) > done), None)
    if odd is not None:
        raise CheckpointError(f"{odd} is not a complete checkpoint, and step {_step_of(odd)} needs its name: remove it")
    return None if latest is None else latest.name


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else 0
