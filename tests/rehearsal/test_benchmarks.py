"""The benchmark's model has the advertised shapes, and every system trains it as one rank of W."""

from dataclasses import replace

import pytest
import torch

from benchmarks import direct_wgrads, growth
from benchmarks.models import LLAMA_1B, LLAMA_8B, LLAMA_TINY, Llama
from benchmarks.systems import SYSTEMS
from benchmarks.table import CASES, describe, measure


@pytest.fixture
def little_work(monkeypatch):
    """Few tokens, on one thread: small products are slower on several threads of a busy machine."""
    monkeypatch.setitem(CASES, "tiny", replace(CASES["tiny"], batch=1, seq=16))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("config", "count"), [(LLAMA_1B, 1_498_482_688), (LLAMA_8B, 8_030_261_248)])
def test_parameter_counts(config, count):
    with torch.device("meta"):
        model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_later_tokens_change_no_earlier_logits():
    model = Llama(LLAMA_TINY).eval()
    tokens = torch.randint(LLAMA_TINY.vocab, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1 if changed[0, 10] == 0 else -1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.limit(120)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_measured(system, little_work):
    row = measure("tiny", system, steps=1, warmup=1)
    model = Llama(LLAMA_TINY)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    head = 4 * sum(parameter.numel() for parameter in model.head.parameters())
    world = CASES["tiny"].world
    if system == "limit":
        assert row["wire_ms"] == 0
    elif system != "ddp":  # gathered twice (the head once) and reduced once, at 360 GB/s and 10 us
        least = 1e3 * (3 * size - head) * (world - 1) / world / 360e9 + 0.010 * row["launches"]
        segments = 9 * row["launches"]  # at most: as many as a block has tensors
        assert 0.999 * least <= row["wire_ms"] <= 1.001 * least + 0.002 * segments
    assert "failed" not in describe({system: row})


@pytest.mark.limit(120)
def test_direct_weight_gradients_are_measured(little_work):
    rows = {str(direct): direct_wgrads.measure("tiny", "unreduced", direct, steps=1, warmup=1) for direct in (0, 1)}
    assert rows["0"]["loss"] == pytest.approx(rows["1"]["loss"], rel=1e-4)
    assert len(direct_wgrads.describe(rows).splitlines()) == 3


@pytest.mark.limit(120)
def test_the_host_does_as_much_per_unit_for_any_number_of_units_and_ranks(little_work):
    """In calls of functions, which do not depend on how busy the machine is; bytes are those of the formula."""
    rows = {
        (units, world): growth.measure("flatshard", units, world, "cpu", steps=1)
        for units, world in ((4, 8), (8, 8), (16, 8), (8, 256))
    }
    calls, launches = ({point: row[name] for point, row in rows.items()} for name in ("calls", "launches"))
    # Within what the interpreter may do in between, such as calling finalizers.
    assert calls[16, 8] - calls[8, 8] == pytest.approx(2 * (calls[8, 8] - calls[4, 8]), rel=0.01)
    assert calls[8, 256] == pytest.approx(calls[8, 8], rel=0.01)
    assert launches == {point: 3 * point[0] for point in rows}
    assert {point: row["bytes"] for point, row in rows.items()} == {
        point: row["formula_bytes"] for point, row in rows.items()
    }
    assert len({growth.describe({"system": "flatshard", "units": u, "world": w, **rows[u, w]}) for u, w in rows}) == 4
