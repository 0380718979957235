"""The benchmark's model has the advertised shapes, and every system trains it as one rank of W."""

from dataclasses import replace

import pytest
import torch

from benchmarks import convergence, direct_wgrads, growth, turns, whole
from benchmarks.models import LLAMA_1B, LLAMA_8B, LLAMA_TINY, Llama
from benchmarks.moe import MOE_TINY, QWEN_MOE, mixture
from benchmarks.systems import AHEAD, BASES, FORMATS, OPTIONS, get_system
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


@pytest.mark.sampled(2)
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "system",
    [
        *(base for base in BASES if base not in ("megatron-fsdp", "simple-fsdp") and "torchao" not in base),
        *(f"flatshard-{option}" for option in OPTIONS if option not in ("hsdp", "hfsdp", *FORMATS)),
        *("flatshard-rows-ahead", "flatshard-in-backward-8bit", "fsdp2-kept", "fsdp2-finer", "fsdp2-unfused"),
    ],
)
def test_every_system_is_measured(system, little_work):
    row = measure("tiny", system, steps=1, warmup=1)
    model = Llama(LLAMA_TINY)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    head = 4 * sum(parameter.numel() for parameter in model.head.parameters())
    world = CASES["tiny"].world
    if system == "limit":
        assert row["wire_ms"] == 0
    elif system != "ddp":  # gathered twice (once what is kept: the head) and reduced once, at 360 GB/s and 10 us
        gathered = size if system.endswith("kept") else 2 * size - head
        least = 1e3 * (gathered + size) * (world - 1) / world / 360e9 + 0.010 * row["launches"]
        segments = 9 * row["launches"]  # at most: as many as a block has tensors
        assert 0.999 * least <= row["wire_ms"] <= 1.001 * least + 0.002 * segments
    assert "failed" not in describe(system, {system: row})


@pytest.mark.sampled(2)
@pytest.mark.limit(120)
@pytest.mark.parametrize("system", ["fsdp2-hsdp", "flatshard-hsdp", "flatshard-hfsdp", "flatshard-megatron-hfsdp"])
def test_hybrids_send_one_part_in_eight_between_nodes(system, little_work):
    row = measure("tiny16", system, steps=1, warmup=1)
    model = Llama(LLAMA_TINY)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    head = 4 * sum(parameter.numel() for parameter in model.head.parameters())
    least = 1e3 * ((3 * size - head) * 7 / 8 / 360e9 + size / 8 / 45e9) + 0.010 * row["launches"]
    assert least <= row["wire_ms"] <= 1.001 * least + (0.015 + 0.018) * row["launches"]


@pytest.mark.full
@pytest.mark.parametrize("formats", [name for name in FORMATS if name != "auto-gathers"])  # which needs more steps
def test_formats_are_measured(formats, little_work):
    plain, row = (measure("tiny", system, steps=1, warmup=1) for system in ("flatshard", f"flatshard-{formats}"))
    assert row["launches"] == plain["launches"]
    assert row["wire_ms"] < plain["wire_ms"]


def test_the_experts_of_a_mixture_are_those_that_tokens_were_sent_to():
    config = replace(MOE_TINY, ep=1)
    torch.manual_seed(0)
    block = mixture(config).blocks[0].ffn
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 9, config.width)
    weights, chosen = block.router(x).softmax(-1).topk(config.chosen)
    wanted = torch.zeros_like(x)
    for place in range(config.chosen):
        gate, up, down = (weight[chosen[..., place]] for weight in block.experts.parameters())
        inner = torch.einsum("bsw,bswf->bsf", x, gate), torch.einsum("bsw,bswf->bsf", x, up)
        out = torch.einsum("bsf,bsfw->bsw", torch.nn.functional.silu(inner[0]) * inner[1], down)
        wanted += out * (weights[..., place] / weights.sum(-1))[..., None]
    torch.testing.assert_close(block(x), wanted)


@pytest.mark.limit(120)
def test_a_mixture_of_experts_is_measured(little_work, monkeypatch):
    monkeypatch.setitem(CASES, "tiny-moe", replace(CASES["tiny-moe"], batch=1, seq=16))
    rows = {system: measure("tiny-moe", system, steps=1, warmup=1) for system in ("limit", "fsdp2", "flatshard")}
    assert not any("failed" in describe(system, rows) for system in rows)
    assert rows["limit"]["wire_ms"] == 0
    setup = CASES["tiny-moe"]
    with torch.device("meta"):
        sizes = {True: 0, False: 0}
        for name, parameter in mixture(setup.model).named_parameters():
            sizes[".experts." in name] += 4 * parameter.numel()
    # Dense weights among 16 ranks, experts among the two that have the same ones; tokens go there and back, twice.
    wire = 3 * (sizes[False] * 15 / 16 / 45e9 + sizes[True] / 2 / 45e9)
    for system in ("fsdp2", "flatshard"):
        assert rows[system]["wire_ms"] > 1e3 * 0.9 * wire
    with torch.device("meta"):
        whole = mixture(replace(QWEN_MOE, layers=48, ep=1))
    heads = 48 * 2 * 2048 * (2048 + 256)  # Qwen3's attention is twice as wide
    assert sum(p.numel() for p in whole.parameters()) == pytest.approx(30_532_122_624 - heads, rel=0.001)


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
    assert calls[16, 8] - calls[8, 8] <= 8 * 247  # 244 on Python 3.11 and torch 2.13, with the model's own 53
    assert launches == {point: 3 * point[0] for point in rows}
    assert {point: row["bytes"] for point, row in rows.items()} == {
        point: row["formula_bytes"] for point, row in rows.items()
    }
    assert len({growth.describe({"system": "flatshard", "units": u, "world": w, **rows[u, w]}) for u, w in rows}) == 4


@pytest.mark.full
@pytest.mark.parametrize("row", list(whole.OPTIMIZERS))
def test_optimizers_of_whole_matrices_are_measured(row, little_work, monkeypatch):
    monkeypatch.setitem(whole.CASES, "tiny", replace(whole.CASES["tiny"], batch=1, seq=16))
    found = whole.measure("tiny", row, steps=1, warmup=1)
    matrices = [shape for shape in shapes_of_blocks() if len(shape) == 2]
    size = 4 * sum(rows * columns for rows, columns in matrices)
    world = CASES["tiny"].world
    if row == "adamw":
        assert found["launches"] == 0
    elif row == "muon":  # gradients and weights in, weights out: a rank sends what it holds, and what it owns
        least = 1e3 * 3 * size / world * (world - 1) / world / 360e9
        assert 0.95 * least <= found["wire_ms"] - 0.010 * found["launches"] <= 1.25 * least
        assert 0.9 < found["share"] < 1.1
    else:
        assert found["launches"] == len(matrices)
    assert "failed" not in whole.describe({row: found})


def shapes_of_blocks() -> list[tuple[int, ...]]:
    with torch.device("meta"):
        return [tuple(p.shape) for p in Llama(LLAMA_TINY).blocks.parameters()]


def test_curves_of_several_seeds_are_compared_seed_by_seed():
    losses = {("one", 0): [3.0, 1.0], ("one", 1): [5.0, 3.0], ("other", 0): [3.0, 1.5], ("other", 1): [5.0, 3.1]}
    results = {run: {"losses": losses[run], "seconds": 1.0} for run in sorted(losses, key=str, reverse=True)}
    found = convergence.figures(["one", "other", "later"], results)
    assert found["losses"] == {"one": [4.0, 2.0], "other": [4.0, pytest.approx(2.3)]}
    assert found["ends"]["other"] == {0: 2.25, 1: pytest.approx(4.05)}
    mean, error = found["ends apart"]["other - one"]
    assert (mean, error) == (pytest.approx(0.15), pytest.approx(0.1))  # 0.25 and 0.05
    only = convergence.figures(["one"], {("one", 7): results["one", 0]})
    assert only["losses"] == {"one": [3.0, 1.0]}
    assert "ends" not in only


def test_systems_in_turns_are_compared_round_by_round(little_work):
    found = turns.measure("tiny", ["limit", "flatshard-int8-gathers"], turns.NETWORK, rounds=2, steps=1)
    assert [[len(each) for each in times] for times in found.values()] == [[1, 1], [1, 1]]
    rows = turns.compare({"one": [[1.0, 2.0, 9.0], [4.0]], "other": [[3.0], [2.0, 4.0, 7.0]]})
    assert rows["one"] == {"ms": 3.0, "min_ms": 1.0, "ratio": 1.0, "error": 0.0}
    assert rows["other"] == {"ms": 3.5, "min_ms": 2.0, "ratio": 1.25, "error": pytest.approx(0.25)}  # 1.5 and 1
    assert "other" in turns.describe(rows)


@pytest.mark.parametrize("name", ["flatshard-", "flatshard-row", "rows", "fsdp2-captured-rows", "flatshard--rows"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="no system is called"):
        get_system(name)


def test_names_are_put_together():
    assert get_system("flatshard-int8-gathers-rows-ahead").keywords == {
        "formats": "int8-gathers",
        "rows": True,
        "finer": True,
        "ahead": AHEAD,
    }
    assert get_system("flatshard-megatron-hfsdp").keywords == {"hybrid": "optim"}
