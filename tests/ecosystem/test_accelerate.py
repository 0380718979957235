"""Accelerate and Transformers' Trainer, unmodified, on flatshard by `install`: what they do with PyTorch's FSDP2."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5")
accelerate = pytest.importorskip("accelerate")
from tests.bench.script import free_port  # noqa: E402
from tests.ecosystem.architectures import ARCHITECTURES  # noqa: E402
from tests.ecosystem.launch import WAYS, in_host_memory, is_ours, launched  # noqa: E402
from tests.fsdp2.test_offload import keep_apart  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.limit(300)]
LAYER = "LlamaDecoderLayer"


def _accelerated(rank, world, way, precision, offloads, folder, port):
    """Losses, norms and whole weights of three steps; state saved, spoilt and loaded."""
    architecture = ARCHITECTURES["llama-tied"]
    batches = [architecture.inputs(torch.Generator().manual_seed(number)) for number in range(8)]
    with launched(rank, world, port, way), pytest.MonkeyPatch.context() as patch:
        keep_apart(patch)
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[LAYER],
            cpu_ram_efficient_loading=True,
            cpu_offload=offloads and way == "ours",  # FSDP2 pins memory, which takes a GPU
            state_dict_type="SHARDED_STATE_DICT",
        )
        accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
        model = architecture.make().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert is_ours(model) == (way == "ours")
        assert way == "theirs" or in_host_memory(model) == {offloads}
        found = []
        for number in range(3):
            with accelerator.accumulate(model):
                loss = model(**batches[2 * number + rank]).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found += [loss.item(), float(norm)]
        accelerator.save_state(folder)
        before = model(**batches[6]).loss.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        accelerator.load_state(folder)
        assert model(**batches[6]).loss.item() == before
        assert accelerator.unwrap_model(model) is model
        weights = accelerator.get_state_dict(model)
        dist.barrier()
        return found, {name: value.clone() for name, value in weights.items()} if rank == 0 else None


@pytest.mark.parametrize(("precision", "offloads"), [("no", False), ("bf16", False), ("no", True)])
def test_accelerate_gives_the_losses_of_fsdp2(ranks, precision, offloads, tmp_path):
    ours, theirs = (ranks(2, _accelerated, way, precision, offloads, str(tmp_path / way), free_port()) for way in WAYS)
    for (found, weights), (wanted, others) in zip(ours, theirs):
        torch.testing.assert_close(found, wanted, rtol=1e-5 if precision == "no" else 1e-2, atol=1e-5)
        if others is not None:
            assert list(weights) == list(others)
            torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-5 if precision == "no" else 1e-2)


def _trained(rank, world, way, kind, compiled, folder, port):
    """Losses that the Trainer logs, and what it writes; a second one goes on from the first one's checkpoint."""
    from transformers import Trainer, TrainingArguments

    units = {"transformer_layer_cls_to_wrap": [LAYER], "cpu_ram_efficient_loading": True}

    architecture = ARCHITECTURES["llama-tied"]
    rows = [architecture.inputs(torch.Generator().manual_seed(number)) for number in range(16)]
    data = [{name: value[0] for name, value in row.items()} for row in rows]
    found = []
    for steps in (2, 4):
        with launched(rank, world, port, way):
            arguments = TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=2,
                max_steps=steps,
                logging_steps=1,
                save_steps=2,
                report_to=[],
                fsdp="full_shard auto_wrap",
                fsdp_config={"version": 2, "state_dict_type": kind, **units},
                learning_rate=0.01,
                lr_scheduler_type="constant",
                disable_tqdm=True,
                torch_compile=compiled,
                torch_compile_backend="eager" if compiled else None,
            )
            trainer = Trainer(model=architecture.make().train(), args=arguments, train_dataset=data)
            trainer.train(resume_from_checkpoint=steps > 2)
            assert is_ours(trainer.model) == (way == "ours")
            found += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-2:]
            trainer.save_model(f"{folder}/final")
            if kind == "SHARDED_STATE_DICT" and way == "ours":  # PyTorch's writes nothing then, and says nothing
                dist.barrier()
                _compare_with_checkpoint(rank, folder)
    return found, sorted(os.listdir(f"{folder}/final")) if os.path.exists(f"{folder}/final") else None


def _compare_with_checkpoint(rank, folder):
    """What `save_model` has written is what Accelerate makes of the last sharded checkpoint, on all ranks."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    last = max(name for name in os.listdir(folder) if name.startswith("checkpoint-"))
    merge_fsdp_weights(f"{folder}/{last}/pytorch_model_fsdp_0", f"{folder}/merged")
    if rank == 0:
        merged, written = (load_file(f"{folder}/{name}/model.safetensors") for name in ("merged", "final"))
        assert set(written) <= set(merged)  # tied weights once
        for name, value in written.items():
            torch.testing.assert_close(value, merged[name], rtol=0, atol=0)
    dist.barrier()


@pytest.mark.parametrize(
    ("kind", "compiled"), [("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", False), ("SHARDED_STATE_DICT", True)]
)
def test_the_trainer_gives_the_losses_of_fsdp2(ranks, kind, compiled, tmp_path):
    ours, theirs = (ranks(2, _trained, way, kind, compiled, str(tmp_path / way), free_port()) for way in WAYS)
    for (found, files), (wanted, others) in zip(ours, theirs):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert {"model.safetensors", "config.json", "training_args.bin"} <= {*files}
        assert others == (files if kind == "FULL_STATE_DICT" else None)


def _best(rank, world, folder, port):
    """The best checkpoint that a rank has noted and loaded, and the losses of evaluations, the last one with it."""
    from transformers import Trainer, TrainingArguments

    architecture = ARCHITECTURES["llama-tied"]
    rows = [architecture.inputs(torch.Generator().manual_seed(number)) for number in range(16)]
    data = [{name: value[0] for name, value in row.items()} for row in rows]
    wrap = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": [LAYER]}
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    common = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 3, "learning_rate": 0.01}
    with launched(rank, world, port, "ours"):
        arguments = TrainingArguments(folder, fsdp="full_shard auto_wrap", fsdp_config=wrap, **every, **common)
        model = architecture.make().train()
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        best = os.path.basename(trainer.state.best_model_checkpoint or "")
        return best, losses, trainer.evaluate()["eval_loss"] if best else None


def test_ranks_load_the_same_best_checkpoint(ranks, tmp_path):
    for best, losses, loss in ranks(2, _best, str(tmp_path), free_port()):
        assert best == f"checkpoint-{1 + losses.index(min(losses))}"
        assert loss == pytest.approx(min(losses), rel=1e-5)
