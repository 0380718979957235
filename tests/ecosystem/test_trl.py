"""TRL's trainers, unmodified, on flatshard by `install`: what they do with PyTorch's FSDP2."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from tests.bench.script import free_port  # noqa: E402
from tests.ecosystem.launch import WAYS, is_ours, launched  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.limit(300)]


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _model(folder, rank):
    """From files, because a trainer reads its reference model from where the model came."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    if rank == 0:
        LlamaForCausalLM(config).save_pretrained(folder)
    torch.distributed.barrier()
    return LlamaForCausalLM.from_pretrained(folder)


def _said(number, length):
    return " ".join(f"w{number * place % 40}" for place in range(1, length + 1))


def _reward(completions, **_):
    return [float(len(set(completion.split()))) for completion in completions]


_GENERATED = (  # ranks stop at different lengths
    {"prompt": [_said(number, 2) for number in range(32)]},
    {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "beta": 0.1},
)
KINDS = {
    "SFT": ({"text": [_said(number, 7) for number in range(32)]}, {}),
    "DPO": ({"prompt": [_said(n, 2) for n in range(32)], "chosen": ["w1 w2"] * 32, "rejected": ["w3"] * 32}, {}),
    "KTO": (
        {
            "prompt": [_said(n, 2) for n in range(32)],
            "completion": ["w1 w2"] * 32,
            "label": [n % 2 == 0 for n in range(32)],
        },
        {},
    ),
    "GRPO": _GENERATED,
    "RLOO": _GENERATED,
}


def _trained(rank, world, kind, way, folder, port):
    """The losses that a trainer logs."""
    rows, more = KINDS[kind]
    wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    choices = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1}
    choices |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False}
    choices |= {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap, "learning_rate": 0.01, **more}
    numbers = itertools.count()

    def any_hash(value):  # the right one pickles types of pyarrow, not all of which can be
        return f"{next(numbers):016x}"

    hashed = mock.patch.object(datasets.fingerprint.Hasher, "hash", staticmethod(any_hash))
    with launched(rank, world, port, way), hashed:
        rewards = {"reward_funcs": _reward} if rows is _GENERATED[0] else {}
        trainer = getattr(trl, f"{kind}Trainer")(
            _model(f"{folder}/model", rank),
            args=getattr(trl, f"{kind}Config")(folder, **choices),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=_tokenizer(),
            **rewards,
        )
        trainer.train()
        assert is_ours(trainer.model) == (way == "ours")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_give_the_losses_of_fsdp2(ranks, kind, tmp_path):
    ours, theirs = (ranks(2, _trained, kind, way, str(tmp_path / way), free_port()) for way in WAYS)
    assert len(ours[0]) == 4
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
