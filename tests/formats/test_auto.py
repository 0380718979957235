"""`gather_format="auto"`: the units whose all-gathers compute waits for are encoded, the same ones on all ranks."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from flatshard import MixedPrecisionPolicy, _recording, fully_shard
from flatshard.engine.schedule import auto_formats
from flatshard.engine.units.unit import unit_of

AUTO = MixedPrecisionPolicy(gather_format="auto", encodes=lambda name, parameter: True)
WIDTH = 32


def _model(policy: MixedPrecisionPolicy) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _formats(model: nn.Module) -> list[str | None]:
    units = [unit_of(block) for block in model]
    for unit in units:
        used = unit.groups[0].formats.gather
        assert unit.policy.gather_format == ("auto" if used is None and unit.policy.gather_format == "auto" else used)
    return [unit.policy.gather_format for unit in units]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    torch.manual_seed(100 + 10 * number + rank)
    loss = model(torch.randn(4, WIDTH)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _measured(rank, world, waits, expected):
    """Waits of one rank alone count for all; before and after the choice, the bits are those of fixed formats."""
    auto, fixed = _model(AUTO), _model(replace(AUTO, gather_format=None))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (auto, fixed)]
    mine = waits if rank == world - 1 else {}
    with mock.patch.object(_recording.Recording, "gather_waits", return_value=mine):
        for number in range(6):
            if number == 3:
                for block, gather_format in zip(fixed, expected):
                    block.set_mp_policy(replace(AUTO, gather_format=gather_format), recurse=False)
            assert _formats(auto) == (["auto"] * 4 if number <= 3 else expected)
            losses = [_step(model, optimizer, number, rank) for model, optimizer in zip((auto, fixed), optimizers)]
            assert losses[0] == losses[1]
    assert _recording.active is None
    for one, other in zip(auto.parameters(), fixed.parameters()):
        assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.parametrize(
    ("waits", "expected"), [({}, [None] * 4), ({"1": 1.0, "3": 1.0}, [None, "int8", None, "int8"])]
)
def test_all_ranks_encode_the_units_that_one_of_them_waits_for(ranks, waits, expected):
    ranks(2, _measured, waits, expected)


def _of_blocks(waits: list[_recording.Wait]) -> list[_recording.Wait]:
    return [wait for wait in waits if wait.phase != "reduce" and wait.unit in ("0", "1", "2", "3")]


def _recorded(rank, world):
    """Real waits, with evaluation in the measured step, a recording of the user's, and a policy that is set later."""
    model = _model(AUTO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    waits = _recording.Recording.gather_waits

    def spied(self, first, root):
        seen.append(_of_blocks(self.waits[first:]))
        return waits(self, first, root)

    with mock.patch.object(_recording.Recording, "gather_waits", spied), mock.patch.object(auto_formats, "_COST", 0.0):
        for number in range(3):
            _step(model, optimizer, number, rank)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        _step(model, optimizer, 3, rank)
        assert _formats(model) == ["int8"] * 4
        assert [len(found) for found in seen] == [8]  # a forward and a backward of four blocks
        model.set_mp_policy(AUTO)
        with _recording.recording() as theirs:
            for number in range(4, 6):
                _step(model, optimizer, number, rank)
                assert _recording.active is theirs
        assert _formats(model) == ["int8"] * 4
        assert [len(found) for found in seen] == [8, 8]
    assert len(_of_blocks(theirs.waits)) == 16


def test_a_step_is_measured_without_evaluation_and_beside_a_recording(ranks):
    ranks(2, _recorded)


def _ended(rank, world):
    """The recording ends with the choice, within another recording too, and with the model."""
    model = _model(AUTO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        _step(model, optimizer, number, rank)
    loss = model(torch.ones(4, WIDTH)).sum()
    with _recording.recording():
        loss.backward()
        optimizer.step()
        _step(model, optimizer, 3, rank)
    assert "auto" not in _formats(model)
    assert _recording.active is None
    other = _model(AUTO)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for number in range(3):
        _step(other, optimizer, number, rank)
    assert _recording.active is not None
    del other, optimizer
    assert _recording.active is None


def test_the_recording_ends(ranks):
    ranks(2, _ended)


def _two(rank, world):
    """Waits of another model, whose units have the same names, do not count."""
    model, other = _model(AUTO), _model(replace(AUTO, gather_format=None))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    sums = []
    waits = _recording.Recording.gather_waits

    def spied(self, first, root):
        own, others = (waits(self, first, each) for each in (root, unit_of(other).root))
        both = sum(self.seconds(w.end) - self.seconds(w.begin) for w in self.waits[first:] if w.phase != "reduce")
        sums.append((sum(own.values()), sum(others.values()), both))
        return own

    with mock.patch.object(_recording.Recording, "gather_waits", spied):
        for number in range(4):
            other(torch.ones(4, WIDTH)).sum().backward()
            _step(model, optimizer, number, rank)
    ((own, others, both),) = sums
    assert others > 0
    assert own == pytest.approx(both - others)


def test_two_models(ranks):
    ranks(2, _two)


def test_wrong_words_are_refused():
    with pytest.raises(ValueError, match="int8, float8, auto or None"):
        MixedPrecisionPolicy(gather_format="automatic")
