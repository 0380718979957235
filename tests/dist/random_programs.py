"""Random programs: a training script of random statements, for a sharded model and for a whole one in one process.

`Program(seed)` is the same on every rank. `run` executes its statements on both models and compares what each shows:
losses, outputs, norms, gradients and weights. Statements: accumulation of several kinds, recomputation, clipping,
evaluation, forwards that are dropped, exceptions in forward and backward, `gathered` to read and to write,
`copy.deepcopy`, freezing, state dicts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import fully_shard, microbatch

DIM, ROWS = 6, 2


class Deliberate(Exception):
    """Raised by a statement that interrupts a pass."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.recompute: str | None = None
        self.fails = ""  # "forward" or "backward": the next one raises

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            self.fails = ""
            raise Deliberate
        if self.fails == "backward" and x.requires_grad:
            x.register_hook(self._fail)
        if self.recompute is None or not torch.is_grad_enabled():
            return self._body(x)
        return checkpoint(self._body, x, use_reentrant=self.recompute == "reentrant")

    def _fail(self, grad: torch.Tensor) -> None:
        if self.fails:
            self.fails = ""
            raise Deliberate


class Net(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(rng.choice((1, 2, 3))))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, DIM, bias=False)
        if rng.random() < 0.3:
            self.head.weight = self.embed.weight
        if rng.random() < 0.3:
            self.blocks[0].down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Program:
    """The statements of one seed, and the choices that its model is sharded with."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.whole = Net(self.rng).double()
        self.choices: dict[str, Any] = {"strategy": self.rng.choice((1, 2, 3, 3, 3))}
        if self.choices["strategy"] == 3:
            self.choices["reshard_after_forward"] = self.rng.choice((True, True, False, "auto"))
        self.inner = self.rng.random() < 0.3  # a unit within a block
        self.parts = self.rng.random() < 0.5  # units of the embedding and of the head
        self.adam = self.rng.random() < 0.5
        self.wrapped = self.rng.random() < 0.5  # by fully_shard_optimizer
        self.sync = self.rng.choice(("each", "no_sync", "microbatch"))
        names = [*_STATEMENTS, "train", "train", "train"]
        self.statements = [self.rng.choice(names) for _ in range(8)] + ["train"]

    def __str__(self) -> str:
        told = {name: value for name, value in vars(self).items() if name not in ("rng", "whole")}
        return f"{told}\n{self.whole}"

    def shard(self) -> Any:
        model = copy.deepcopy(self.whole)
        for block in model.blocks:
            if self.inner:
                fully_shard(block.up, **self.choices)
            fully_shard(block, **self.choices)
        if self.parts and model.head.weight is not model.embed.weight:
            fully_shard(model.embed, **self.choices)
            fully_shard([model.norm, model.head], **self.choices)
        return fully_shard(model, **self.choices)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.adam:
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, foreach=False)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5, foreach=False)


class Run:
    """Both models, and what the statements do to them."""

    def __init__(self, program: Program, rank: int, world: int) -> None:
        self.program, self.rank, self.world, self.rng = program, rank, world, program.rng
        self.whole, self.model = program.whole, program.shard()
        self.optimizers = [program.optimizer(each) for each in (self.model, self.whole)]
        if program.wrapped:
            flatshard.fully_shard_optimizer(self.optimizers[0])
        self.batches = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this rank, and those of all ranks."""
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        rows = torch.randn(self.world * ROWS, DIM, dtype=torch.float64, generator=generator)
        return rows.chunk(self.world)[self.rank], rows

    def both(self, change: Callable[[Any], None]) -> None:
        for each in (self.model, self.whole):
            change(each)

    # Statements

    def train(self) -> None:
        rng, count = self.rng, self.rng.choice((1, 1, 2, 3))
        recompute, clips = rng.choice((None, None, "reentrant", "non-reentrant")), rng.random() < 0.5
        self.both(lambda each: [setattr(block, "recompute", recompute) for block in each.blocks])
        for number in range(count):
            mine, rows = self.batch()
            with self._synchronised(number, count):
                loss = self.model(mine).square().mean() / count
                loss.backward()
            (self.whole(rows).square().mean() / count).backward()
        self.compare_gradients()
        if clips:
            norms = [
                flatshard.clip_grad_norm_(self.model.parameters(), 0.1),
                nn.utils.clip_grad_norm_(self.whole.parameters(), 0.1),
            ]
            _close(_full(norms[0]), norms[1], "norm")
        to_none = rng.random() < 0.7
        for optimizer in self.optimizers:
            optimizer.step()
        if rng.random() < 0.5:
            self.both(lambda each: each.zero_grad(set_to_none=to_none))
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=to_none)

    @contextmanager
    def _synchronised(self, number: int, count: int) -> Iterator[None]:
        is_last, kind = number == count - 1, self.program.sync
        if kind == "no_sync":
            self.model.set_requires_gradient_sync(is_last)
        is_marked = kind == "microbatch"
        with microbatch(self.model, is_first=number == 0, is_last=is_last) if is_marked else nullcontext():
            yield

    def evaluate(self) -> None:
        mine, _ = self.batch()
        with torch.inference_mode() if self.rng.random() < 0.3 else torch.no_grad():
            outputs = [each(mine) for each in (self.model, self.whole)]
        _close(outputs[0], outputs[1], "output")

    def drop(self) -> None:
        self.model(self.batch()[0])

    def fail(self) -> None:
        """What is interrupted leaves nothing behind, whichever rank's block it is."""
        block, where = self.rng.randrange(len(self.model.blocks)), self.rng.choice(("forward", "backward"))
        self.model.blocks[block].fails = where
        try:
            self.model(self.batch()[0]).sum().backward()
        except Deliberate:
            if where == "backward":
                self.both(lambda each: each.zero_grad())
        else:
            assert where == "backward"  # that of a block whose input needs no gradient
            self.model.blocks[block].fails = ""
            self.both(lambda each: each.zero_grad())

    def read(self) -> None:
        with flatshard.gathered(self.model):
            for (name, mine), theirs in zip(self.model.named_parameters(), self.whole.parameters()):
                assert not isinstance(mine, DTensor)
                _close(mine, theirs, name)
            if self.rng.random() < 0.5:
                self.evaluate()

    def write(self) -> None:
        with flatshard.gathered(self.model.blocks[0], write=True), torch.no_grad():
            self.both(lambda each: each.blocks[0].up.weight.mul_(0.5))

    def copy(self) -> None:
        twin = copy.deepcopy(self.model)
        mine, _ = self.batch()
        twin(mine).sum().backward()
        with torch.no_grad():
            _close(twin(mine), self.whole(mine), "output of a copy")

    def freeze(self) -> None:
        block, on = self.rng.randrange(len(self.whole.blocks)), self.rng.random() < 0.5
        self.both(lambda each: each.blocks[block].up.requires_grad_(on))

    def reload(self) -> None:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.model.load_state_dict(state)

    # What is compared

    def compare_gradients(self) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.whole.parameters()):
            assert (mine.grad is None) == (theirs.grad is None), f"gradient of {name}"
            if mine.grad is not None:
                _close(_full(mine.grad), theirs.grad, f"gradient of {name}")

    def compare_weights(self) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.whole.parameters()):
            _close(_full(mine), theirs, name)


_STATEMENTS = ("train", "evaluate", "drop", "fail", "read", "write", "copy", "freeze", "reload")


def run(seed: int, rank: int, world: int) -> None:
    program = Program(seed)
    running, done = Run(program, rank, world), list[str]()
    try:
        for statement in program.statements:
            done.append(statement)
            getattr(running, statement)()
            running.compare_weights()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nafter {done}\n{program}") from error


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _close(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10, msg=lambda text: f"{what}: {text}")
