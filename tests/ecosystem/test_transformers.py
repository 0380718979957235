"""Models of Transformers, sharded by `shard_model`: training, generation between steps, files both collectives."""

from __future__ import annotations

import filecmp
import functools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flatshard
from flatshard import FSDPModule, hf, shard_model
from flatshard.checkpoint import export_safetensors, iter_full_tensors, load_safetensors

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.full) for name in REST)])
def test_training_and_generation_equal_one_process(ranks, name):
    for units in ranks(2, _train, name, {}, None):
        assert units >= 3


def _stops(rank, world):
    """A generation that ends early on the first rank, which goes through the forwards of the other with it."""
    architecture = ARCHITECTURES["qwen3-moe"]
    model, reference = architecture.make(), architecture.make()
    shard_model(model)
    prompt = torch.arange(5).view(1, 5) + 7
    choices = {"max_new_tokens": 8, "do_sample": False}
    third = int(reference.generate(prompt, **choices, eos_token_id=None)[0, 7])
    choices["eos_token_id"] = third if rank == 0 else None
    wanted = reference.generate(prompt, **choices)
    assert torch.equal(model.generate(prompt, **choices), wanted)
    return wanted.shape[1]


def test_ranks_generate_until_the_last_one_stops(ranks):
    first, second = ranks(2, _stops)
    assert first < second == 13


def _dropped(rank, world):
    """Every rank leaves out other layers, drawn by itself."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(4, 4),
        num_feat_extract_layers=2,
        vocab_size=12,
        layerdrop=0.5,
        mask_time_prob=0.0,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    torch.manual_seed(0)
    model = transformers.Wav2Vec2ForCTC(config).train()
    shard_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    for _ in range(6):
        loss = model(torch.randn(2, 800), labels=torch.randint(1, 12, (2, 4))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)


@pytest.mark.full
def test_layers_that_ranks_drop_by_chance(ranks):
    ranks(2, _dropped)


def _loaded(rank, world, folder):
    """Transformers shards a model itself while it loads it, by what it takes for PyTorch's `fully_shard`."""
    from transformers.distributed import DistributedConfig

    architecture = ARCHITECTURES["llama"]
    reference = architecture.make()
    if rank == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    flatshard.install()
    try:
        made = getattr(transformers, architecture.model)
        model = made.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=world))
        assert isinstance(model, FSDPModule)
        inputs = architecture.inputs(torch.Generator().manual_seed(rank))
        torch.testing.assert_close(model(**inputs).loss, reference(**inputs).loss)
        for (title, parameter), wanted in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(_whole(parameter), wanted, rtol=0, atol=0, msg=title)
    finally:
        flatshard.uninstall()


@pytest.mark.full
def test_transformers_loads_into_a_model_that_it_shards(ranks, tmp_path):
    pytest.importorskip("accelerate")
    ranks(2, _loaded, str(tmp_path / "model"))


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

    for size in ("1GB", "20KB"):
        model.save_pretrained(folder / "ours", max_shard_size=size)
        compare(made.from_pretrained(folder / "ours"), model)
        if rank == 0:  # the same files as of an unsharded one, to the last byte
            architecture.make().save_pretrained(folder / "theirs", max_shard_size=size)
            names = [sorted(path.name for path in (folder / whose).iterdir()) for whose in ("ours", "theirs")]
            assert names[0] == names[1]
            assert filecmp.cmpfiles(folder / "ours", folder / "theirs", names[0], False)[0] == names[0]
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


class _Alive(TorchDispatchMode):
    """The most bytes that tensors on the CPU which are made within have had at once."""

    def __init__(self):
        super().__init__()
        self._storages, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _plain(tensor)}
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if _plain(tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._storages.values()))
        return results


def _plain(tensor):
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def _streamed(rank, world, folder):
    """Bytes of the model, of its largest tensor, and what a save has had in memory."""
    architecture = ARCHITECTURES["qwen3-moe"]
    config = getattr(transformers, architecture.config)(**{**architecture.options, "num_hidden_layers": 8})
    model = getattr(transformers, architecture.model)(config)
    shard_model(model)
    hf.iter_full_tensors = functools.partial(iter_full_tensors, bucket_bytes=1)
    try:
        with _Alive() as alive:
            model.save_pretrained(folder)
    finally:
        hf.iter_full_tensors = iter_full_tensors
    sizes = [parameter.nbytes for parameter in model.parameters()]
    return sum(sizes), max(sizes), alive.most


def test_a_save_has_a_bucket_in_memory_at_a_time(ranks, tmp_path):
    (whole, largest, writer), (_, _, other) = ranks(2, _streamed, str(tmp_path))
    assert largest <= other <= 2 * largest + 1024  # and the names of tensors, which a thread of Gloo may free later
    # Experts are fused: cut in two, the halves are copies, and so may be one of the pieces.
    assert largest <= writer <= 3 * largest + 1024 < whole / 4
