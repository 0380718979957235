"""Training on ranks: the loss falls, does not depend on the number of ranks, and samples are the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flatshard.checkpoint import save
from flatshard.train.data import batch_rows, load_text
from flatshard.train.settings import TrainSettings
from flatshard.train.trainer import Trainer
from tests.bench import RankError

TINY = TrainSettings(steps=6, batch=4, context=32, width=32, layers=2, heads=4, kv_heads=2, ffn=64, warmup=2, sample=8)


def _train(rank, world, settings):
    trainer = Trainer(settings, load_text(settings), init_device_mesh("cpu", (world,)))
    steps = [(float(step.loss), float(step.grad_norm)) for step in trainer.steps()]
    full = {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}
    return torch.tensor(steps), trainer.sample(), full


def test_the_loss_falls(ranks):
    settings = replace(TINY, steps=40, batch=8, lr=1e-2)
    (losses, sample, _), *others = ranks(2, _train, settings)
    assert losses[0, 0] == pytest.approx(5.545, abs=0.2)  # ln 256: nothing is known yet
    assert losses[-5:, 0].mean() < 3.2
    assert sample.startswith("Once there was a miller called Hanna, ")
    for other_losses, other_sample, _ in others:
        assert torch.equal(other_losses, losses)
        assert other_sample == sample


@pytest.mark.parametrize("recompute", [False, True])
def test_the_number_of_processes_does_not_matter(ranks, recompute):
    settings = replace(TINY, recompute=recompute, clip=0.5)
    expected, _, expected_weights = ranks(1, _train, settings)[0]
    losses, _, weights = ranks(2, _train, settings)[0]
    assert expected[:, 1].min() > settings.clip, "clipping must take part"
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for name, weight in weights.items():
        # where a gradient is all rounding, AdamW makes a step of full size of it
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=2 * settings.lr, msg=name)


def test_bfloat16_trains_like_float32(ranks):
    expected, _, _ = ranks(2, _train, TINY)[0]
    losses, _, weights = ranks(2, _train, replace(TINY, precision="bfloat16"))[0]
    torch.testing.assert_close(losses[:, 0], expected[:, 0], rtol=2e-2, atol=0)
    assert not torch.equal(losses, expected)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_ranks_share_the_rows_of_a_batch():
    text = load_text(TINY)
    tokens, targets = batch_rows(text, TINY, 3, 0, 1)
    assert tokens.shape == targets.shape == (4, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    parts = [batch_rows(text, TINY, 3, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
    assert not torch.equal(batch_rows(text, TINY, 4, 0, 1)[0], tokens)


def test_the_last_byte_of_a_file_is_trained_on(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"0123456789")
    settings = replace(TINY, data=file, context=9)
    tokens, targets = batch_rows(load_text(settings), settings, 1, 0, 1)
    assert bytes(tokens[0].tolist()) == b"012345678"
    assert bytes(targets[0].tolist()) == b"123456789"


def test_the_learning_rate_warms_up_and_falls():
    settings = replace(TINY, steps=100, warmup=10, lr=1.0)
    rates = [settings.lr_at(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    constant = replace(settings, schedule="constant", warmup=0)
    assert {constant.lr_at(step) for step in range(1, 101)} == {1.0}


def _resumed(rank, world, settings, stop):
    trainer = Trainer(settings, load_text(settings), init_device_mesh("cpu", (world,)))
    losses = {}
    for step in trainer.steps():
        losses[step.number] = (float(step.loss), float(step.grad_norm), step.lr)
        if step.number == stop:
            break
    return trainer.done, losses


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(ranks, tmp_path):
    whole = ranks(2, _resumed, replace(TINY, steps=12), 12)[0][1]
    settings = replace(TINY, steps=12, checkpoint=tmp_path, save_every=3, keep=2)
    done, first = ranks(2, _resumed, settings, 7)[0]
    assert done == 0
    again, second = ranks(2, _resumed, settings, 12)[0]
    assert again == 6
    assert {**first, **second} == whole  # exactly
    assert first[7] == second[7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["settings.yaml", "step-12", "step-9"]
    assert ranks(2, _resumed, replace(settings, steps=5), 5)[0] == (12, {})
    assert "steps: 12" in (tmp_path / "settings.yaml").read_text()  # a run without steps leaves it
    other, third = ranks(4, _resumed, replace(settings, steps=13), 13)[0]
    assert other == 12
    assert third.keys() == {13}


def _saved_alone(rank, world, settings, path):
    trainer = Trainer(settings, load_text(settings), init_device_mesh("cpu", (world,)))
    save(path, trainer.model, trainer.optimizer)


def test_a_checkpoint_of_another_run_is_refused(ranks, tmp_path):
    ranks(2, _resumed, replace(TINY, steps=1, checkpoint=tmp_path), 1)
    with pytest.raises(RankError, match="was trained with --seed 0, not 7; give the same flags"):
        ranks(2, _resumed, replace(TINY, steps=2, seed=7, checkpoint=tmp_path), 2)
    ranks(2, _saved_alone, TINY, tmp_path / "alone" / "step-1")
    with pytest.raises(RankError, match="alone/step-1 does not have the step and the settings of a run"):
        ranks(2, _resumed, replace(TINY, steps=2, checkpoint=tmp_path / "alone"), 2)
    broken = tmp_path / "step-2"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    with pytest.raises(RankError, match="step-2 is not a complete checkpoint, and step 2 needs its name: remove it"):
        ranks(2, _resumed, replace(TINY, steps=2, checkpoint=tmp_path), 2)
