"""Whole tensors of sharded models: streamed, exported, and exchanged with transformers."""

from __future__ import annotations

import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard import fully_shard
from flatshard.checkpoint import (
    CheckpointError,
    export_safetensors,
    files,
    full,
    iter_full_tensors,
    load_safetensors,
    reader,
)
from tests.checkpoint.cases import PLACES, assert_same, full_state, make, shard


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that are made within."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and type(result) is torch.Tensor and func._schema.name.startswith(_MAKING):
            self.total += result.untyped_storage().nbytes()
        return result


_MAKING = ("aten::empty", "aten::zeros", "aten::new_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::full")


def _streamed(rank, world, place, bucket):
    wanted = {name: value for name, value in make(1).state_dict().items() if name != "head.weight"}
    model = shard(make(1), world, place)
    largest = max(value.numel() * value.element_size() for value in wanted.values())
    for large in (full._LARGE, 256):  # by adding; and from so many bytes on, each tensor where it is to be
        seen = {}
        with mock.patch.object(full, "_LARGE", large), Allocated() as allocated:
            for name, tensor in iter_full_tensors(model, bucket):
                assert tensor.shape == wanted[name].shape, name
                seen[name] = bool((tensor == wanted[name]).all())
        assert all(seen.values()), seen
        assert list(seen) == list(wanted)
        assert largest <= allocated.total <= max(bucket, largest + 16), (allocated.total, bucket, largest)


@pytest.mark.parametrize(
    ("place", "bucket"), [(PLACES[0], 1), (PLACES[1], 3000), (PLACES[7], 3000), (PLACES[4], 10**6)]
)
def test_whole_tensors_in_one_bucket_of_memory(ranks, place, bucket):
    ranks(4, _streamed, place, bucket)


def _exported(rank, world, place, folder):
    files.SUMMED = 64  # bytes; so that files of small tensors have many blocks
    model = shard(make(1), world, place)
    export_safetensors(model, f"{folder}/one", dtype=None)
    export_safetensors(model, f"{folder}/many", "2KB", bucket_bytes=3000)
    export_safetensors(model, f"{folder}/half", dtype=torch.bfloat16)
    read = []
    readinto = reader.Reader._read

    def counted(self, name, box, start, into):
        read.append(len(into))
        return readinto(self, name, box, start, into)

    reader.Reader._read = counted
    for kind in ("one", "many"):
        other = shard(make(2), world, place)
        read.clear()
        load_safetensors(other, f"{folder}/{kind}")
        assert_same(full_state(other), full_state(model))
        own = [value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes for value in _once(other)]
        around = 2 * files.SUMMED * len(own)
        assert sum(own) <= sum(read) < sum(own) + around, "each rank reads its own rows and what is in their blocks"
    reader.Reader._read, files.SUMMED = readinto, 1 << 16
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        load_safetensors(other, f"{folder}/none")


def _once(model):
    return {id(value): value for value in model.state_dict(keep_vars=True).values()}.values()


@pytest.mark.parametrize("place", [PLACES[0], PLACES[1], PLACES[7]], ids=str)
def test_export_and_load(ranks, tmp_path, place):
    ranks(4, _exported, place, str(tmp_path))
    wanted = {name: value for name, value in make(1).state_dict().items() if name != "head.weight"}
    assert_same(load_file(tmp_path / "one" / "model.safetensors"), wanted)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        assert (tmp_path / "many" / name).stat().st_size < 4000
        found.update(load_file(tmp_path / "many" / name))
    assert_same(found, wanted)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert load_file(tmp_path / "half" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    assert sorted(os.listdir(tmp_path / "one")) == ["model.safetensors"]


def test_foreign_files_are_named(tmp_path):
    model = torch.nn.Linear(3, 2)
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'bias' is not in the checkpoint"):
        load_safetensors(model, tmp_path)
    load_safetensors(model, tmp_path, strict=False)
    assert not model.weight.any()
    content = (tmp_path / "model.safetensors").read_bytes()
    for cut in (0, 5, 30, len(content) - 1):
        (tmp_path / "model.safetensors").write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
            load_safetensors(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "../x"}}')
    with pytest.raises(CheckpointError, match=r"names '../x', which is not a file in this folder"):
        load_safetensors(model, tmp_path)
    with pytest.raises(ValueError, match="max_shard_size='5 parsec'"):
        export_safetensors(model, tmp_path, "5 parsec")


def _with_transformers(rank, world, folder, tied, layout):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )

    def sharded(seed):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            fully_shard(layer, layout=layout)
        return fully_shard(model, layout=layout)

    torch.manual_seed(1)
    plain = LlamaForCausalLM(config)
    tokens = torch.arange(12).view(2, 6)
    wanted = plain(tokens).logits
    # theirs to ours
    if rank == 0:
        plain.save_pretrained(f"{folder}/theirs", max_shard_size="20KB")
    dist.barrier()
    model = sharded(2)
    load_safetensors(model, f"{folder}/theirs")
    torch.testing.assert_close(model(tokens).logits, wanted)
    model.reshard()
    # ours to theirs
    export_safetensors(model, f"{folder}/ours", 20_000)
    if rank == 0:
        config.save_pretrained(f"{folder}/ours")
        back = LlamaForCausalLM.from_pretrained(f"{folder}/ours", dtype=torch.float32)
        assert_same(back.state_dict(), plain.state_dict())
        assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
        torch.testing.assert_close(back(tokens).logits, wanted, rtol=0, atol=0)


def _tied_and_not(rank, world, folder):
    _with_transformers(rank, world, f"{folder}/apart", False, "tensor")
    _with_transformers(rank, world, f"{folder}/tied", True, "flat")


@pytest.mark.limit(180)
def test_round_trip_with_transformers(ranks, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ranks(2, _tied_and_not, str(tmp_path))  # in one call: importing transformers takes a rank longer than either
