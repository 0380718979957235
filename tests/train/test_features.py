"""What `flatshard train` can be told beyond its defaults, against the same run in one process."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatshard.checkpoint import CheckpointError
from flatshard.cli import main
from flatshard.engine.tree.build import units_below
from flatshard.tools.report import Record
from flatshard.train import launch
from flatshard.train.build import build_mesh, build_model
from flatshard.train.command import check_settings
from flatshard.train.data import batch_rows, load_text, loss_scale, validation_rows
from flatshard.train.environment import has_own_gpus, slurm_ranks
from flatshard.train.log import Log, Step
from flatshard.train.model import Llama, mean_loss
from flatshard.train.settings import Mistake, TrainSettings
from flatshard.train.trainer import Trainer

TINY = TrainSettings(steps=3, batch=4, context=32, width=32, layers=2, heads=4, kv_heads=2, ffn=64, warmup=2, sample=4)
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def _train(rank, world, settings):
    losses = []
    for each in settings:
        trainer = Trainer(each, load_text(each), build_mesh(each, "cpu", world, 1))
        steps = list(trainer.steps())
        val = [None if step.val_loss is None else float(step.val_loss) for step in steps]
        losses.append(([float(step.loss) for step in steps], val, [step.sample for step in steps], trainer.sample()))
    return losses


def test_all_of_it_trains_as_in_one_process(ranks, tmp_path):
    mixture = replace(TINY, steps=5, experts=4, loss_chunk=24, val_every=2, val_rows=4, sample_every=4)
    told = replace(mixture, microbatches=2, strategy="zero1", layout="flat", reshard=False)
    told = replace(told, losses=tmp_path / "losses.jsonl", record=tmp_path / "record.json")
    sharded = ranks(2, _train, [told])
    ((expected, val, *_),) = ranks(1, _train, [mixture])[0]
    ((losses, own_val, samples, last),) = sharded[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert [value for value in own_val if value is not None] == pytest.approx([val[1], val[3]], rel=1e-4)
    assert own_val[0] is own_val[2] is None
    assert [sample is not None for sample in samples] == [False, False, False, True, False]
    assert sharded[1][0][3] == last
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses
    assert "val_loss" in lines[1]
    record = Record.read(tmp_path / "record.json", tmp_path / "losses.jsonl")
    assert len(record.data["steps"]) == 2
    assert {span["lane"] for span in record.data["spans"]} >= {"compute", "reduce"}
    assert record.data["run"]["memory"]["parameters"] > 0


def _large_embedding(rank, world, folder):
    settings = replace(TINY, model=folder)
    trainer = Trainer(settings, load_text(settings), build_mesh(settings, "cpu", world, 1))
    list(trainer.steps())
    return [name for name, _ in units_below(trainer.model)], trainer.sample()


@pytest.mark.full
def test_a_large_embedding_is_a_unit_and_tokens_beyond_bytes_are_shown(ranks, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 4096}))
    units, sample = ranks(1, _large_embedding, tmp_path)[0]
    assert any(name.endswith("embed_tokens") for name in units)
    assert "\ufffd" in sample


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero0", "zero2", "hsdp", "hfsdp"])
def test_every_strategy_trains_alike(ranks, strategy):
    expected = ranks(1, _train, [TINY])[0][0][0]
    settings = replace(TINY, strategy=strategy, replicas=2 if strategy.startswith("h") else None)
    losses = ranks(
        4, _train, [settings, replace(settings, precision="bfloat16", recompute=True, rows=strategy == "hsdp")]
    )[0]
    assert losses[0][0] == pytest.approx(expected, rel=1e-4)
    assert losses[1][0] == pytest.approx(expected, rel=2e-2)


@pytest.mark.full
def test_muon_and_formats_train(ranks, tmp_path):
    muon = replace(TINY, optimizer="muon", checkpoint=tmp_path)
    expected = ranks(1, _train, [replace(muon, checkpoint=None)])[0][0][0]
    assert ranks(2, _train, [muon])[0][0][0] == pytest.approx(expected, rel=1e-3)
    assert len(ranks(2, _train, [replace(muon, steps=4)])[0][0][0]) == 1  # goes on from its checkpoint
    formats = replace(TINY, precision="bfloat16", gather_format="int8", reduce_format="int8")
    plain = ranks(1, _train, [TINY])[0][0][0]
    losses = ranks(2, _train, [formats])[0][0][0]
    assert losses == pytest.approx(plain, rel=3e-2)
    assert losses != plain


def test_steps_in_backward_and_state_in_8_bits_train_alike(ranks, tmp_path):
    """Steps in backward change no bit. State in 8 bits is the same on any number of processes, and after a load."""
    plain = replace(TINY, clip=0.0, losses=tmp_path / "losses.jsonl")
    small = replace(plain, optimizer="adamw8bit", checkpoint=tmp_path, in_backward=True, losses=None)
    early = replace(plain, in_backward=True, losses=tmp_path / "early.jsonl")
    told, same, first, rest = ranks(2, _train, [plain, early, replace(small, steps=2), small])[0]
    assert told == same
    lines = [json.loads((tmp_path / name).read_text().splitlines()[0]) for name in ("losses.jsonl", "early.jsonl")]
    assert [line.keys() for line in lines] == [
        {"step", "loss", "lr", "grad_norm", "tokens_per_second"},
        lines[0].keys() - {"grad_norm"},
    ]
    expected = ranks(1, _train, [replace(small, checkpoint=None, in_backward=False)])[0][0][0]
    assert first[0] + rest[0] == pytest.approx(expected, rel=1e-4)
    assert expected != told[0]


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_trains_as_in_one_process(ranks, tmp_path, tied):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": tied}))
    settings = replace(TINY, model=tmp_path, loss_chunk=16)
    expected = ranks(1, _train, [replace(settings, loss_chunk=0)])[0][0][0]
    losses = ranks(2, _train, [settings, replace(settings, recompute=True, rows=not tied)])[0]
    assert losses[0][0] == pytest.approx(expected, rel=1e-4)
    assert losses[1][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.full
def test_models_of_transformers_that_are_not_causal_are_refused(tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for kind, expected in {"bert": "is not causal: tokens attend to later ones", "vit": "AutoModelForCausalLM"}.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **small}))
        with pytest.raises(Mistake, match=expected):
            build_model(replace(TINY, model=tmp_path), 256)


def test_a_loss_in_chunks_is_the_same_and_never_has_all_logits():
    torch.manual_seed(0)
    head, x, targets = nn.Linear(8, 50), torch.randn(2, 9, 8, requires_grad=True), torch.randint(50, (2, 9))
    most = []

    def projection(rows):
        most.append(len(rows))
        return head(rows)

    results = []
    for chunk in (0, 5):
        most.clear()
        loss = mean_loss(projection, x, targets, chunk)
        grads = torch.autograd.grad(loss, [x, head.weight])
        results.append((loss.detach(), *grads))
        assert max(most) == (chunk or 18)
    torch.testing.assert_close(results[0], results[1])


def test_an_epoch_takes_every_row_once_and_the_next_another_way():
    settings = replace(TINY, batch=3)
    text = load_text(settings)
    text = replace(text, tokens=text.tokens[: 32 * 7 + 5])  # six rows, and slack for another beginning
    rows = [tuple(row.tolist()) for step in range(1, 5) for row in batch_rows(text, settings, step, 0, 1)[0]]
    first, second = rows[:6], rows[6:]
    for epoch in (first, second):
        joined = b"".join(bytes(row) for row in sorted(epoch, key=lambda r: bytes(text.tokens.tolist()).find(bytes(r))))
        assert len(set(epoch)) == 6
        assert joined in bytes(text.tokens.tolist())
    assert first != second
    held = replace(settings, val_every=1, val_rows=2, context=4)
    tokens, targets = validation_rows(load_text(held), held, 1, 2)
    assert tokens.shape == (1, 4)
    assert torch.equal(tokens[0, 1:], targets[0, :-1])


def _tokenizer(path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[end]": 0, "[unk]": 1, "the": 2, "cat": 3, "sat": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))


def test_control_characters_of_a_sample_do_not_reach_the_terminal():
    text = load_text(replace(TINY, data=None))
    assert text.decode(list(b"a\x1b[2J\x07\tb\r\n")) == "a\ufffd[2J\ufffd\tb\r\n"


def test_tokens_come_from_text_files_and_datasets(tmp_path):
    _tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "text").write_text("the cat sat " * 4)
    torch.tensor([2, 3, 4] * 4, dtype=torch.int16).numpy().tofile(tmp_path / "tokens.bin")
    settings = replace(TINY, context=4, data=tmp_path / "text", tokenizer=tmp_path / "tokenizer.json")
    binary = replace(settings, data=tmp_path / "tokens.bin")
    for each in (settings, binary, replace(binary, tokenizer=None, vocab=5)):
        text = load_text(each)
        assert (text.tokens.tolist(), text.vocab) == ([2, 3, 4] * 4, 5)
        assert batch_rows(text, each, 1, 0, 1)[0].dtype == torch.int64
    assert load_text(settings).decode(load_text(settings).prompt("cat sat")) == "cat sat"
    with pytest.raises(Mistake, match="give --tokenizer FILE, or --vocab N"):
        load_text(replace(binary, tokenizer=None))
    with pytest.raises(Mistake, match="has 12 tokens; --context 12 needs more"):
        load_text(replace(binary, context=12))
    with pytest.raises(Mistake, match="has token 4; the vocabulary is 0 to 3: give a larger --vocab"):
        load_text(replace(binary, tokenizer=None, vocab=4))
    (tmp_path / "odd.bin").write_bytes(bytes(2 * 12 + 1))
    with pytest.raises(Mistake, match="its size is not a multiple of 2 bytes; give another --token-dtype"):
        load_text(replace(binary, data=tmp_path / "odd.bin"))
    datasets = pytest.importorskip("datasets")
    columns = {"text": ["the cat", "sat the cat"], "ids": [[2, 3], [4, 2, 3]], "note": ["the", None]}
    made = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="a")
    made.save_to_disk(str(tmp_path / "set"))
    settings = replace(settings, data=tmp_path / "set", end_token=0)
    for each in (settings, replace(settings, column="ids")):
        assert load_text(each).tokens.tolist() == [2, 3, 0, 4, 2, 3, 0]  # packed
    with pytest.raises(Mistake, match=r"the columns of .* are text, ids"):
        load_text(replace(settings, column="body"))
    with pytest.raises(Mistake, match="row 1 of column note is None, neither text nor"):
        load_text(replace(settings, column="note"))


def test_srun_is_understood():
    step = {"SLURM_JOB_ID": "70012", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "6"}
    step |= {"SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08,11]"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}
    assert slurm_ranks(step) == {
        "RANK": "6", "WORLD_SIZE": "9", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "gpu07", "MASTER_PORT": "30012",
    }  # fmt: skip
    for nodes, first in {"a1,b2": "a1", "r[2-3]n[07,09]-ib,b": "r2n07-ib", "x-1": "x-1"}.items():
        assert slurm_ranks({**step, "SLURM_STEP_NODELIST": nodes, "MASTER_PORT": "1"})["MASTER_ADDR"] == first
    assert slurm_ranks({"SLURM_JOB_ID": "1"}) == {}
    assert slurm_ranks({**step, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert has_own_gpus({"SLURM_GPUS_PER_TASK": "1"})
    assert not has_own_gpus(step)


def test_tensorboard_gets_what_the_log_gets(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers = torch.arange(9.0)
    for done, last in ((0, 6), (4, 8)):  # broken off after a checkpoint of step 4
        log = Log(TrainSettings(losses=tmp_path / "log.jsonl", tensorboard=tmp_path / "board"), done)
        for step in range(done + 1, last + 1):
            log.add(Step(step, numbers[step], 2 * numbers[step], 0.5, val_loss=numbers[1] if step == 5 else None))
        log.write()
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["grad_norm", "loss", "lr", "tokens_per_second", "val_loss"]
    assert [(each.step, each.value) for each in board.Scalars("loss")] == [(step, step) for step in range(1, 9)]
    assert [each.step for each in board.Scalars("val_loss")] == [5]
    assert all(each.value > 0 for each in board.Scalars("tokens_per_second"))


def test_weights_and_biases_gets_what_the_log_gets(tmp_path, monkeypatch):
    """A stand-in takes the place of the package, which wants an account."""
    got = []

    def init(project, config):
        assert (project, config["--lr"]) == ("stories", "0.1")
        return SimpleNamespace(log=lambda values, step: got.append((step, values["loss"], sorted(values))))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = Log(TrainSettings(wandb="stories", lr=0.1), 0)
    for step in (1, 2):
        log.add(Step(step, torch.tensor(5.0 / step), torch.tensor(1.0), 0.5))
    log.write()
    assert got == [(step, 5.0 / step, ["grad_norm", "loss", "lr", "tokens_per_second"]) for step in (1, 2)]
    monkeypatch.setattr("flatshard.train.log.find_spec", lambda name: None)
    with pytest.raises(Mistake, match="--wandb: wandb is not installed: pip install wandb"):
        check_settings(replace(TINY, wandb="stories"))


def _chats(path, count=12):
    lines = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}" * (1 + n)}]}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_of_conversations_answers_alone_are_learned(tmp_path):
    settings = replace(TINY, data=_chats(tmp_path / "chats.jsonl"))
    text = load_text(settings)
    learned = bytes(text.tokens[text.answers].tolist()).decode()
    assert learned == "".join(f"{n + 1}" * (1 + n) + "<|im_end|>\n" for n in range(12))
    assert bytes(text.prompt("2 + 2?")) == b"<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    tokens, targets = batch_rows(text, settings, 1, 0, 1)
    assert set(targets[targets >= 0].tolist()) <= set(b"0123456789<|im_end|>\n")
    assert (targets[:, :-1] == tokens[:, 1:])[targets[:, :-1] >= 0].all()
    logits = torch.randn(4, 32, 256)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert mean_loss(lambda x: x, logits, targets, 16) * loss_scale(text, settings, 1) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", "line 1: must have the form"),
        ("\xe4", "line 1: is not UTF-8"),
        ('{"text": "a"}', "line 1: must have the form"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "must be strings"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role assistant"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, line, expected):
    (tmp_path / "chats.jsonl").write_text(line, encoding="latin-1")
    with pytest.raises(Mistake, match=expected):
        load_text(replace(TINY, data=tmp_path / "chats.jsonl"))


def _meet(rank, world, cases):
    said = []
    for settings in cases:
        with pytest.raises((Mistake, CheckpointError)) as error:
            launch._load_alike(settings[rank])
        said.append(str(error.value))
    return said


def test_ranks_with_other_flags_or_data_are_named(ranks, tmp_path):
    chats = replace(TINY, data=_chats(tmp_path / "chats.jsonl"))
    fewer = replace(TINY, data=_chats(tmp_path / "fewer.jsonl", 11))
    bad = replace(TINY, data=tmp_path / "bad.jsonl")
    bad.data.write_text("nonsense")
    rate, data, line = ranks(2, _meet, [(TINY, replace(TINY, lr=0.5)), (chats, fewer), (chats, bad)])[0]
    assert (
        rate == "--lr is 0.003 on rank 0, and 0.5 on rank 1; start all ranks with the same command, and the same data"
    )
    assert re.match(r"--data is \d+ tokens \(checksum \w+\) on rank 0, and \d+ tokens", data)
    assert line.startswith(f"rank 1: --data {bad.data}, line 1: must have the form")


def _diverged(rank, world):
    with pytest.raises(Mistake, match="has diverged; give a smaller --lr"):
        _train(rank, world, [replace(TINY, lr=1e30)])


def test_a_run_that_has_diverged_is_named(ranks):
    ranks(2, _diverged)


def _tuned(rank, world, settings):
    losses = []
    for each in settings:
        trainer = Trainer(each, load_text(each), build_mesh(each, "cpu", world, 1))
        steps = list(trainer.steps())
        losses.append(([float(step.loss) for step in steps], float(trainer.validate())))
        if each.export is not None:
            trainer.export(each.export)
    return losses


@pytest.mark.full
def test_a_checkpoint_of_hugging_face_is_tuned_on_chats_and_exported(ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path / "base")
    alphabet = {chr(n): n - 31 for n in range(32, 127)} | {"\n": 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    wrapped.save_pretrained(tmp_path / "base")
    settings = replace(
        TINY, data=_chats(tmp_path / "chats.jsonl", 40), model=tmp_path / "base", val_every=99, val_rows=4
    )
    text = load_text(settings)
    assert text.decode(text.tokens[text.answers][:2].tolist()).startswith("1")
    one = ranks(1, _tuned, [settings])[0][0]
    two = ranks(2, _tuned, [replace(settings, microbatches=2, export=tmp_path / "out")])[0][0]
    assert two[0] == pytest.approx(one[0], rel=1e-4)
    assert two[1] == pytest.approx(one[1], rel=1e-4)
    tokens, targets = batch_rows(text, settings, 1, 0, 1)
    expected = nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    assert one[0][0] == pytest.approx(float(expected), rel=1e-4), "it begins with the weights of the checkpoint"
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == wrapped.chat_template
    loss = nn.functional.cross_entropy(tuned(tokens).logits.flatten(0, 1), targets.flatten())
    assert float(loss) < float(expected)
    with pytest.raises(Mistake, match="is not empty"):
        check_settings(replace(settings, export=tmp_path / "out"))
    with pytest.raises(Mistake, match="give --model"):
        replace(TINY, export=tmp_path / "new").validate()


def test_a_run_that_continues_keeps_its_first_recording(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    first = replace(TINY, steps=5, checkpoint=tmp_path / "run", record=tmp_path / "record.json")
    ranks(1, _train, [first, replace(first, steps=10)])
    titles = [json.loads((tmp_path / name).read_text())["title"] for name in ("record.json", "record-after-5.json")]
    assert titles == ["flatshard train, steps 4 and 5", "flatshard train, steps 9 and 10"]


def test_a_board_that_cannot_be_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("flatshard.train.log.find_spec", lambda name: name)
    assert main(["train", "--tensorboard", f"{tmp_path}/file/board"]) == 2
    assert capsys.readouterr().err == f"flatshard train: --tensorboard {tmp_path}/file/board: Not a directory\n"
    monkeypatch.setattr("flatshard.train.log.find_spec", lambda name: None)
    assert main(["train", "--tensorboard", f"{tmp_path}/board"]) == 2
    assert capsys.readouterr().err == (
        "flatshard train: --tensorboard: tensorboard is not installed: pip install tensorboard\n"
    )


def test_nodes_that_differ_need_a_number_of_replicas():
    with pytest.raises(Mistake, match=r"9 processes on 2 nodes: .* give --replicas N"):
        build_mesh(replace(TINY, strategy="hsdp"), "cpu", 9, 2)


def test_the_models_flops_count_the_chosen_experts():
    dense, sparse = (build_model(replace(TINY, experts=experts), 256) for experts in (0, 4))
    assert isinstance(sparse[0], Llama)
    # of each block: one more expert than the one layer, and the router
    assert sparse[2] - dense[2] == 6 * 2 * (3 * 32 * 64 + 32 * 4)
