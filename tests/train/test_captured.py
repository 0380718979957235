"""`flatshard train --capture` without a GPU: all but the graph is real, and the graph is a stand-in that runs the step.

tests/gpu/test_train.py has the real one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flatshard import captured
from flatshard.cli import main
from flatshard.train.data import load_text
from flatshard.train.settings import TrainSettings
from flatshard.train.trainer import Trainer
from tests.bench import RankError

TINY = TrainSettings(steps=8, batch=4, context=32, width=32, layers=2, heads=4, kv_heads=2, ffn=64, warmup=2, sample=4)


class _Graph:
    """Each replay runs the step on the tensors that it was captured with, and writes to those that it returned then."""

    def __init__(self, step):
        self._step, self.output, self.replays = step, (torch.zeros(()), torch.zeros(())), 0

    def replay(self):
        self.replays += 1
        torch._foreach_copy_(list(self.output), list(self._step()))


def _stand_in(stack, graphs, refuse=None):
    def make(step, roots, lasting, segments):
        if refuse is not None:
            raise RuntimeError(refuse)
        graphs.append(_Graph(step))
        return graphs[-1], graphs[-1].output, mock.Mock()  # what recomputed segments draw from

    for name in ("_check_arguments", "_check_capturable"):
        stack.enter_context(mock.patch.object(captured, name))
    stack.enter_context(mock.patch.object(captured, "_captured", make))
    stack.enter_context(mock.patch("torch.cuda.synchronize"))


def _train(rank, world, settings, refuse=None):
    """Losses, norms and how often a graph was replayed, for each of the settings, one after another."""
    found = []
    for each in settings:
        graphs = []
        with ExitStack() as stack:
            _stand_in(stack, graphs, refuse)
            trainer = Trainer(each, load_text(each), init_device_mesh("cpu", (world,)))
            steps = list(trainer.steps())  # read after the last one, so that what is overwritten shows
        figures = [
            (float(s.loss), float(s.grad_norm), s.lr, float(s.loss if s.val_loss is None else s.val_loss))
            for s in steps
        ]
        found.append((figures, sum(graph.replays for graph in graphs)))
    return found


def test_captured_steps_are_those_of_a_run_without_and_a_run_goes_on_either_way(ranks, tmp_path):
    plain = replace(TINY, steps=10, microbatches=2, recompute=True, loss_chunk=16, val_every=4, val_rows=4)
    plain = replace(plain, warmup=8, schedule="constant")  # alike in shorter runs
    kept = replace(plain, checkpoint=tmp_path)
    parts = [replace(kept, steps=5, capture=True), replace(kept, steps=6), replace(kept, capture=True)]
    (expected, none), (losses, replays), *continued = ranks(1, _train, [plain, replace(plain, capture=True), *parts])[0]
    # A graph reads its learning rate in float32.
    assert losses == [pytest.approx(step, rel=1e-5) for step in expected]
    assert [none, replays, *[number for _, number in continued]] == [0, 7, 2, 0, 1]
    joined = [step for steps, _ in continued for step in steps]
    assert joined == [pytest.approx(step, rel=1e-5) for step in expected]


def test_a_step_that_cannot_be_captured_ends_all_ranks_with_a_line(ranks):
    with pytest.raises(RankError, match="Mistake: --capture: rank 0: RuntimeError: it looks at the GPU"):
        ranks(2, _train, [replace(TINY, capture=True)], "it looks at the GPU")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--offload", "with --offload: a CUDA graph cannot update weights in host memory"),
        ("--experts 4", "with --experts"),
        ("--optimizer muon", "with --optimizer muon"),
        ("--record x.json", "with --record"),
        ("--processes 2", "a GPU for each of the 2 processes on this machine, which has 0"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_in_words(flags, expected, capsys):
    with mock.patch("torch.cuda.device_count", return_value=0):
        assert main(["train", "--capture", *flags.split()]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert expected in err
    assert "--capture" in err
