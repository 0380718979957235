"""Captured steps on a GPU: equal to eager ones, bit for bit, with everything that people do between them."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    capture,
    clip_grad_norm_,
    fully_shard_optimizer,
    shard_model,
)
from flatshard.rehearsal import rehearse
from flatshard.train.model import Llama, LlamaConfig

CONFIG = LlamaConfig(64, layers=3, heads=4, kv_heads=2, ffn=96, vocab=101, max_tokens=16)
STEPS = 50


@contextmanager
def ranks(kind: str) -> Iterator[None]:
    """One rank over NCCL, or the first of four that are rehearsed."""
    if kind == "rehearsal":
        with rehearse(4, "free"):
            yield
        return
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def deterministic():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


class Trainer:
    """A model, and a step of it: micro-batches, clipping, a learning rate that changes."""

    def __init__(
        self,
        micro: int = 2,
        local: bool = True,
        lr: Any = None,
        hsdp: bool = False,
        recompute: bool = False,
        config: LlamaConfig = CONFIG,
        **choices: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.micro = Llama(dataclasses.replace(config, recompute=recompute)), micro
        self.shard(hsdp, choices)
        self.lr = torch.tensor(1e-3, device="cuda") if lr is None else lr
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, capturable=True, foreach=True)
        if local:
            fully_shard_optimizer(self.optimizer)

    def shard(self, hsdp: bool, choices: dict[str, Any]) -> None:
        world = dist.get_world_size()
        shape = (world // 2, 2) if hsdp else (world,)
        shard_model(self.model, mesh=init_device_mesh("cuda", shape), **choices)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for number, row in enumerate(tokens):
            with flatshard.microbatch(self.model, is_first=number == 0, is_last=number == self.micro - 1):
                loss = self.model(row[:, :-1], row[:, 1:]) / self.micro
                loss.backward()
            total += loss.detach()
        clip_grad_norm_(self.model, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def weights(self) -> list[torch.Tensor]:
        found = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [local.detach().clone() for local in found]


def tokens(step: int, micro: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(101, (micro, 3, length), generator=torch.Generator().manual_seed(step)).cuda()


def run(trainer: Trainer, step: Any, steps: int = STEPS, first: int = 0) -> list[float]:
    """Two batches in turn, from number ``first`` on: a loss that does not fall on them is that of a wrong step."""
    losses = []
    for number in range(steps):
        trainer.lr.fill_(1e-3 * (1 - number / steps))
        losses.append(step(tokens(first + number % 2, trainer.micro)).item())
    return losses


IN_BYTES = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    gather_format="int8",
    reduce_format="int8",
    block=32,
    stochastic=True,
    encodes=lambda name, parameter: "." in name,
)
CASES: dict[str, dict[str, Any]] = {
    "zero 3": {},
    "zero 3, kept": {"reshard_after_forward": False},
    "zero 3, kept for the next": {"schedule": SchedulePolicy(keep_for_next=1 << 30)},
    "zero 3, flat": {"layout": "auto"},
    "zero 2": {"strategy": 2},
    "zero 1": {"strategy": 1},
    "zero 0": {"strategy": 0},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bfloat16, zero 1": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "strategy": 1},
    "through DTensor": {"local": False},
    "one micro-batch": {"micro": 1},
    "recompute": {"recompute": True},
    "int8": {"mp_policy": IN_BYTES},
    "int8, zero 1": {"mp_policy": IN_BYTES, "strategy": 1},
    "int8, hsdp": {"mp_policy": dataclasses.replace(IN_BYTES, reduce_format=("int8", "bf16_fp32")), "hsdp": True},
    "hsdp": {"hsdp": True},
    "hfsdp": {"hsdp": True, "outer_strategy": "optim"},
}


@pytest.mark.parametrize("kind", ["nccl", "rehearsal"])
@pytest.mark.parametrize("case", CASES)
def test_captured_steps_are_eager_steps(case, kind):
    if "hsdp" in CASES[case] and kind == "nccl":
        pytest.skip("two axes need more than one rank")
    if "int8" in case and kind == "rehearsal":
        pytest.skip("other ranks' pieces are this rank's there, and bytes of other tensors mean nothing")
    with ranks(kind):
        eager = Trainer(**CASES[case])
        wanted = run(eager, eager)
        captured = Trainer(**CASES[case])
        assert run(captured, capture(captured)) == wanted
        for ours, theirs in zip(captured.weights(), eager.weights()):
            assert torch.equal(ours, theirs)
    assert wanted[-2] < wanted[0]  # of one batch


@pytest.mark.parametrize("kind", ["nccl", "rehearsal"])
def test_between_replays_everything_works(kind, tmp_path):
    """Evaluation, an eager step, saving and loading: after each, replays go on as eager steps would."""
    with ranks(kind):
        found = []
        for is_captured in (False, True):
            trainer = Trainer()
            step = capture(trainer, other_shapes="eager") if is_captured else trainer
            losses = run(trainer, step, 6)
            with torch.no_grad():
                losses.append(trainer.model(tokens(7)[0], tokens(8)[0]).item())
            losses += run(trainer, step, 2)
            losses.append(trainer(tokens(9)).item())  # as it is
            losses.append(step(tokens(9, length=7)).item())  # another shape
            state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            losses += run(trainer, step, 2)
            trainer.model.load_state_dict(state)
            with flatshard.gathered(trainer.model):
                losses.append(sum(p.float().abs().sum().item() for p in trainer.model.parameters()))
            losses += run(trainer, step, 2)
            found.append((losses, trainer.weights()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))


def test_a_stale_graph_raises_and_can_be_renewed():
    with ranks("rehearsal"):
        trainer = Trainer()
        step = capture(trainer)
        run(trainer, step, 5)
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.3
        with pytest.raises(RuntimeError, match="stale: a hyperparameter of the optimizer"):
            step(tokens(0))
        step.renew()
        run(trainer, step, 5)
        trainer.model.blocks[0].requires_grad_(False)
        with pytest.raises(RuntimeError, match="stale: parameters"):
            step(tokens(0))
        step.renew()
        run(trainer, step, 5)
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
        with pytest.raises(RuntimeError, match="stale: the optimizer's state"):
            step(tokens(0))
        step.renew()
        run(trainer, step, 5)
        with pytest.raises(ValueError, match=r"captured for \(2, 3, 9\) int64 but was called with \(2, 3, 5\)"):
            step(tokens(0, length=5))


def test_other_shapes_are_captured_too():
    with ranks("rehearsal"):
        found = []
        for is_captured in (False, True):
            trainer = Trainer()
            step = capture(trainer, other_shapes="capture") if is_captured else trainer
            found.append([step(tokens(n, length=(9, 7, 5)[n % 3])).item() for n in range(12)])
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["nccl", "rehearsal"])
@pytest.mark.parametrize("case", ["zero 3", "zero 3, kept", "zero 1", "bfloat16", "by rows"])
def test_a_graph_keeps_its_memory_whatever_comes_after_it(case, kind):
    """Other graphs, eager steps in between, and a heap that is emptied and filled with NaN."""
    config = dataclasses.replace(CONFIG, vocab=1 << 15)  # an optimizer's state that is worth to be moved
    choices = {"rows": True} if case == "by rows" else CASES[case]
    with ranks(kind):
        found = []
        for is_captured in (False, True):
            trainer = Trainer(config=config, **choices)
            steps = [capture(trainer, other_shapes="capture") if is_captured else trainer for _ in range(2)]
            losses = []
            for number in range(24):
                batch = tokens(number, length=(9, 7, 5)[number % 3])
                if number % 7 == 6:
                    with torch.no_grad():
                        losses.append(trainer.model(batch[0], batch[1]).item())
                losses.append((trainer if number % 11 == 10 else steps[number // 3 % 2])(batch).item())
                torch.cuda.empty_cache()
                junk = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 24)]
                del junk
            found.append((losses, trainer.weights()))
        assert found[0][0] == found[1][0]
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))


def test_a_micro_batch_alone_is_captured_where_gradients_stay():
    with ranks("rehearsal"):
        found = []
        for is_captured in (False, True):
            trainer = Trainer()

            def micro(rows: torch.Tensor, trainer: Trainer = trainer) -> torch.Tensor:
                loss = trainer.model(rows[:, :-1], rows[:, 1:])
                loss.backward()
                return loss.detach()

            step = capture(micro) if is_captured else micro
            losses = []
            for number in range(6):
                losses += [step(row).item() for row in tokens(number)]
                trainer.optimizer.step()
                trainer.optimizer.zero_grad(set_to_none=False)
            found.append((losses, trainer.weights()))
        assert found[0][0] == found[1][0]
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))


def test_dropout_differs_from_replay_to_replay():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).cuda()
    with ranks("rehearsal"):
        flatshard.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return out.detach()

        replayed = capture(step)
        x = torch.ones(4, 8, device="cuda")
        masks = [(replayed(x) == 0).clone() for _ in range(6)]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks[3:]))


def test_what_cannot_be_captured_is_refused():
    with ranks("rehearsal"):
        trainer = Trainer()
        with pytest.raises(TypeError, match="takes tensors on a GPU, not 3"):
            capture(trainer)(3)
        with pytest.raises(TypeError, match="takes tensors on a GPU, not a tensor on cpu"):
            capture(trainer)(torch.zeros(1))
        trainer = Trainer(lr=1e-3)
        trainer.optimizer.param_groups[0]["capturable"] = False
        step = capture(trainer)
        for number in range(3):
            step(tokens(number))
        with pytest.raises(ValueError, match=r"AdamW\(..., capturable=True\)"):
            step(tokens(3))
        offloaded = Trainer(offload_policy=flatshard.CPUOffloadPolicy(), lr=1e-3, local=False)
        offloaded.optimizer.param_groups[0]["capturable"] = False
        step = capture(offloaded)
        for number in range(3):
            step(tokens(number))
        with pytest.raises(ValueError, match="has CPUOffloadPolicy"):
            step(tokens(3))
        trainer = Trainer()
        trainer(tokens(0))
        batch = tokens(1)
        with pytest.raises(RuntimeError, match=r"with flatshard\.capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            trainer(batch)
        trainer(tokens(2))


def test_a_step_that_reads_a_value_says_so_and_leaves_the_model_usable():
    with ranks("rehearsal"):
        trainer, control = Trainer(), Trainer()

        def reading(batch: torch.Tensor) -> float:
            return trainer(batch).item()

        step = capture(reading)
        for number in range(3):
            step(tokens(number))
        with pytest.raises(RuntimeError, match=r"cannot be captured: .*capturing.*must not read values"):
            step(tokens(3))
        for number in (0, 1, 2, 4):
            control(tokens(number))
        trainer(tokens(4))
        for ours, theirs in zip(trainer.weights(), control.weights()):
            assert torch.equal(ours, theirs)


def test_memory_of_a_captured_step():
    """All of it comes back. It is more than an eager step reserves: what the optimizer keeps lies in other segments."""
    with ranks("rehearsal"):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        found = []
        for is_captured in (False, True):
            config = LlamaConfig(512, layers=4, heads=8, kv_heads=4, ffn=1536, vocab=8000, max_tokens=256)
            model = Llama(config)
            shard_model(model, mesh=init_device_mesh("cuda", (4,)))
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True, capturable=True))

            def step(rows: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                loss = model(rows[:, :-1], rows[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            call = capture(step) if is_captured else step
            rows = torch.randint(8000, (4, 257), device="cuda")
            for _ in range(5):
                call(rows)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                call(rows)
            torch.cuda.synchronize()
            found.append((torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved()))
            del model, optimizer, step, call, rows
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # torch's own, one per stream
            torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() - before < 1 << 20
    eager, captured = found
    workspace = 33 << 20  # of cuBLAS, for one more stream
    assert captured[1] <= 1.25 * eager[1] + workspace, found


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_dropout_is_that_of_the_forward(reentrant):
    """The loss is linear in the weights, so it is their product with the gradient, if backward saw the same masks."""
    weights = [torch.rand(64, device="cuda", requires_grad=True) for _ in range(3)]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        parts = [checkpoint(lambda w: F.dropout(w, 0.5), weight, use_reentrant=reentrant) for weight in weights]
        loss = torch.cat(parts).sum() + F.dropout(weights[0], 0.5).sum()
        grads = torch.autograd.grad(loss, weights) if not reentrant else _by_backward(loss, weights)
        return loss.detach(), sum((w.detach() * g).sum() for w, g in zip(weights, grads))

    captured = capture(step)
    seen = []
    for _ in range(8):
        loss, product = captured()
        torch.testing.assert_close(loss, product)
        seen.append(loss.item())
    assert len(set(seen)) == len(seen)


def _by_backward(loss, weights):
    loss.backward()
    grads = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    return grads
