"""PEFT: adapters beside a frozen base in one unit; what is saved and merged. And storage that is no floating point."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import MixedPrecisionPolicy, fully_shard, gathered, no_shard, shard_model
from flatshard.engine.weights.extensions import is_extended

pytestmark = pytest.mark.limit(300)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _base(kind):
    """A small Llama, of bfloat16 or with layers of torchao's bytes."""
    from tests.ecosystem.architectures import ARCHITECTURES

    base = ARCHITECTURES["llama"].make()
    if kind == "bfloat16":
        base.to(torch.bfloat16)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(base.requires_grad_(False), Int8WeightOnlyConfig(), lambda m, name: "proj" in name)
    return base


def _adapted(kind):
    """A small Llama with adapters, which are float32."""
    import peft

    base = _base(kind)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _trained(rank, world, kind, folder):
    import peft

    from tests.ecosystem.architectures import ARCHITECTURES

    architecture = ARCHITECTURES["llama"]
    model, reference, half = _adapted(kind), _adapted(kind), kind == "bfloat16"
    shard_model(model)
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, reference)]
    optimizers = [torch.optim.AdamW(parameters, lr=0.01) for parameters in trained]
    tolerance = {"rtol": 0.2, "atol": 0.02} if half else {"rtol": 1e-3, "atol": 1e-5}
    for number in range(3):
        batches = [architecture.inputs(torch.Generator().manual_seed(10 * number + who)) for who in range(world)]
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            model(**batches[rank]).loss.backward()
            (sum(reference(**batch).loss for batch in batches) / world).backward()
        for parameter, wanted in zip(*trained):
            torch.testing.assert_close(_whole(parameter.grad), wanted.grad, **tolerance)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(_base(kind), folder).state_dict()
    for name, value in model.state_dict().items():
        if is_extended(value):
            continue
        torch.testing.assert_close(_whole(value).float(), loaded[name].float(), msg=lambda _, n=name: n)
    batch = architecture.inputs(torch.Generator().manual_seed(7))
    with torch.no_grad():
        before = model(**batch).logits
    if kind == "float32":
        with gathered(model, write=True):
            model.merge_adapter()
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-3, atol=1e-4)
        model.unmerge_adapter()  # and on the shards
        torch.testing.assert_close(model.merge_and_unload()(**batch).logits, before, rtol=1e-3, atol=1e-4)
    dist.barrier()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_adapters_train_as_on_one_process_and_are_saved_and_merged(ranks, kind, tmp_path):
    pytest.importorskip("peft")
    if kind == "int8":
        pytest.importorskip("torchao")
    pytest.importorskip("transformers", minversion="5")
    ranks(2, _trained, kind, str(tmp_path / "adapters"))


def _prompted(rank, world, kind, folder):
    """What is saved of a model with trained prompts, which PEFT computes while it saves, and one that is loaded."""
    import peft
    from safetensors.torch import load_file

    from tests.ecosystem.architectures import ARCHITECTURES

    def make():
        torch.manual_seed(1)
        options = {} if kind == "PromptTuningConfig" else {"encoder_hidden_size": 8}
        return peft.get_peft_model(_base("float32"), getattr(peft, kind)("CAUSAL_LM", num_virtual_tokens=3, **options))

    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    shard_model(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.save_pretrained(folder)
    model(**ARCHITECTURES["llama"].inputs(torch.Generator().manual_seed(rank))).loss.backward()
    assert any(p.grad is not None for p in model.parameters())
    if rank == 0:
        reference.save_pretrained(f"{folder}-whole")
        ours, theirs = (load_file(f"{name}/adapter_model.safetensors") for name in (folder, f"{folder}-whole"))
        assert ours["prompt_embeddings"].equal(theirs["prompt_embeddings"])
    dist.barrier()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_trained_prompts_are_saved(ranks, kind, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("transformers", minversion="5")
    ranks(2, _prompted, kind, str(tmp_path / "prompts"))


class Quantised(nn.Module):
    """Weights held as bytes with a scale per row, as QLoRA holds them."""

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 255, (7, 4), dtype=torch.uint8, generator=rng)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.shift = nn.Parameter(torch.randint(-3, 3, (7,), dtype=torch.int32, generator=rng), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, generator=rng))

    def forward(self, x):
        return x @ ((self.codes.float() + self.shift[:, None]) * self.scale[:, None]).t()


def _bytes(rank, world):
    model, reference = fully_shard(Quantised()), Quantised()
    assert _whole(model.codes).equal(reference.codes)
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(who)) for who in range(world)]
    output = model(batches[rank])
    assert output.equal(reference(batches[rank]))
    output.sum().backward()
    (sum(reference(batch).sum() for batch in batches) / world).backward()
    torch.testing.assert_close(_whole(model.scale.grad), reference.scale.grad)


def test_integers_are_gathered_as_they_are(ranks):
    ranks(2, _bytes)


def _quantised(rank, world, config):
    """A frozen base of torchao's weights is sharded, or stays whole; what is trained is sharded."""
    from torchao import quantization

    for whole in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65)).requires_grad_(False)
        quantization.quantize_(model, getattr(quantization, config)())
        model.append(nn.Linear(65, 8))
        reference, kind = copy.deepcopy(model), type(model[0].weight)
        for layer in model[:2]:
            no_shard(layer.weight) if whole else fully_shard(layer)
        fully_shard(model)
        if not whole:
            assert type(model[0].weight._local_tensor) is kind
            assert model[0].weight._local_tensor.shape == (32, 64)
        batches = torch.randn(world, 3, 64, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            output = model(batches[rank])
            assert output.equal(reference(batches[rank]))
            output.square().mean().backward()
            (sum(reference(batch).square().mean() for batch in batches) / world).backward()
            torch.testing.assert_close(_whole(model[2].weight.grad), reference[2].weight.grad)


@pytest.mark.full
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantised_weights_of_torchao_are_gathered_as_they_are(ranks, config):
    pytest.importorskip("torchao")
    ranks(2, _quantised, config)
