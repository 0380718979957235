"""torchtitan's models with its own code to shard them, unmodified, on flatshard by `install`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import flatshard

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.full, pytest.mark.limit(400)]
# model, tied embeddings, compiled blocks, a loss that calls the head chunk by chunk, and degrees of parallelism
CASES = {
    "dense": ("llama3", False, False, False, {}),
    "tied, chunked loss": ("llama3", True, False, True, {}),
    "compiled": ("llama3", False, True, False, {}),
    "experts": ("deepseek_v3", False, False, True, {}),
    "replicas": ("llama3", False, False, False, {"dp_replicate": 2}),
    "tensor parallel": ("llama3", False, False, False, {"tp": 2}),
}


def _imported(name):
    """torchtitan on a machine without CUDA. Kernels of modules that it imports and does not use there want Triton."""
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_compat

    fake = mock.MagicMock()
    missing = {} if importlib.util.find_spec("triton") else {"triton": fake, "triton.language": fake.language}
    with mock.patch.dict(sys.modules):
        sys.modules.update(missing)
        import torchtitan.tools.utils as tools

        tools.device_type, tools.device_module = "cpu", torch.cpu
        found = [importlib.import_module(f"torchtitan.models.{name}{part}") for part in ("", ".config_registry")]
        kept = {title: module for title, module in sys.modules.items() if title not in missing}
    sys.modules.update(kept)
    return found


def _train(rank, world, case, way):
    """Losses and norms of three steps."""
    name, tied, compiled, chunked, more = CASES[case]
    models, registry = _imported(name)
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as theirs
    from torchtitan.models.common.attention import ScaledDotProductAttention

    if way == "ours":
        flatshard.install()
    try:
        config = getattr(registry, f"{name}_debugmodel")()
        config.model_spec = spec = models.model_registry("debugmodel", attn_backend="flex")
        config.training.seq_len, config.training.local_batch_size = 16, 2
        config.training.mixed_precision_param = "float32"
        config.parallelism.spmd_backend = "partial_dtensor"
        if compiled:
            config.compile = CompileConfig(enable=True, components=["model"], backend="aot_eager")
        theirs.set_spmd_backend("partial_dtensor")
        degrees = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | more
        dims = ParallelDims(**degrees, world_size=world, spmd_backend="partial_dtensor")
        spec.model.layers = spec.model.layers[:2]
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention is CUDA's
        if tied:
            spec.model.enable_weight_tying = True
        spec.model.update_from_config(config=config)
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        assert isinstance(model, flatshard.FSDPModule) == (way == "ours")
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the control would have Gloo scale sums
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
            for title, parameter in model.named_parameters():
                rng = torch.Generator().manual_seed(len(title))
                whole = 0.02 * torch.randn(parameter.shape, generator=rng) + ("norm" in title)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        return _steps(model.train(), config, rank // degrees["tp"], chunked)
    finally:
        flatshard.uninstall()


def _steps(model, config, rank, chunked):
    from torchtitan.config import CompileConfig

    wrapper = config.loss.build(compile_config=CompileConfig()) if chunked else None
    if wrapper is not None:
        wrapper.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for number in range(3):
        rng = torch.Generator().manual_seed(10 * number + rank)
        tokens, labels = (torch.randint(0, 2048, (2, 16), generator=rng) for _ in range(2))
        output = model(tokens, torch.arange(16).expand(2, 16))
        if isinstance(output, DTensor):  # under tensor parallelism the vocabulary is cut
            output = output.full_tensor()
        if wrapper is not None:
            loss, _ = wrapper(output, labels, torch.tensor(64.0))
        else:
            loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / 64
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    return found


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_gives_the_losses_of_fsdp2(ranks, case):
    more = CASES[case][-1]
    world = 2 * more.get("dp_replicate", 1) * more.get("tp", 1)
    ours, theirs = (ranks(world, _train, case, way) for way in ("ours", "theirs"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
