"""Models of Transformers, sharded by `shard_model`: training, generation between steps, files both ways."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flatshard import FSDPModule, shard_model
from flatshard.checkpoint import export_safetensors, load_safetensors

transformers = pytest.importorskip("transformers", minversion="5")
from tests.ecosystem.architectures import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.limit(300)  # the first test imports Transformers in every rank
# With encoders that `generate` calls alone; with experts that files hold one by one; and tied.
FEW = ("t5", "llava", "qwen3-moe")
REST = [name for name in ARCHITECTURES if name not in FEW]
RECOMPUTE = {"none": None, "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


def _generated(architecture, model, number):
    inputs = architecture.inputs(torch.Generator().manual_seed(50 + number))
    prompt = {name: inputs[name] for name in architecture.prompt}
    with torch.no_grad():
        return model.generate(**prompt, max_new_tokens=4, do_sample=False)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _train(rank, world, name, choices, recompute):
    """Three steps with a generation before each; the number of units."""
    architecture = ARCHITECTURES[name]
    model, reference = architecture.make(), architecture.make()
    if recompute is not None:
        model.train().gradient_checkpointing_enable(recompute)
        reference.train()
    shard_model(model, **choices)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference)]
    for number in range(3):
        if architecture.prompt and recompute is None:
            assert torch.equal(*(_generated(architecture, each, number) for each in (model, reference)))
        batches = [architecture.inputs(torch.Generator().manual_seed(10 * number + r)) for r in range(world)]
        model(**batches[rank]).loss.backward()
        (sum(reference(**batch).loss for batch in batches) / world).backward()
        for (title, parameter), wanted in zip(model.named_parameters(), reference.parameters()):
            assert (parameter.grad is None) == (wanted.grad is None), title
            if wanted.grad is not None:
                found = _whole(parameter.grad)
                torch.testing.assert_close(
                    found, wanted.grad, rtol=1e-3, atol=1e-5, msg=lambda text, title=title: f"{title}: {text}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return sum(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.full) for name in REST)])
def test_training_and_generation_equal_one_process(ranks, name):
    for units in ranks(2, _train, name, {}, None):
        assert units >= 3


@pytest.mark.full
@pytest.mark.parametrize("strategy", [0, 1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_strategy_equals_one_process(ranks, name, strategy):
    ranks(2, _train, name, {"strategy": strategy}, None)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("clip", "mamba")])
def test_recomputation_equals_one_process(ranks, name, recompute):
    ranks(2, _train, name, {}, RECOMPUTE[recompute])


def _files(rank, world, name, folder):
    """From a sharded model to files that `from_pretrained` reads, two ways; and back from those of an unsharded one."""
    transformers.logging.set_verbosity_error()
    architecture, folder = ARCHITECTURES[name], Path(folder)
    made = getattr(transformers, architecture.model)
    model = architecture.make()
    shard_model(model)

    def compare(found, wanted):
        for title, value in wanted.state_dict().items():
            torch.testing.assert_close(
                _whole(found.state_dict()[title]), _whole(value), rtol=0, atol=0, msg=lambda _, t=title: t
            )

    def fresh():
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()

    model.save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    compare(made.from_pretrained(folder), model)
    fresh()
    export_safetensors(model, folder, progress=False)
    if rank == 0:
        model.config.save_pretrained(folder)
    dist.barrier()
    compare(made.from_pretrained(folder), model)
    fresh()
    other = architecture.make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    if rank == 0:
        other.save_pretrained(folder)
    dist.barrier()
    load_safetensors(model, folder, progress=False)
    compare(model, other)
    model(**architecture.inputs(torch.Generator().manual_seed(rank))).loss.backward()


@pytest.mark.parametrize("name", [*FEW[1:], *(pytest.param(name, marks=pytest.mark.full) for name in (FEW[0], *REST))])
def test_files_go_both_ways(ranks, name, tmp_path):
    ranks(2, _files, name, str(tmp_path / "files"))
