"""The formula of bytes is what training takes: per category on real ranks, in all by the allocator's own record."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from flatshard import SchedulePolicy
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.layout import planner
from flatshard.rehearsal import rehearse
from flatshard.rehearsal.clock_cpu import CpuClock, CpuWork, move_bytes
from flatshard.rehearsal.network import difference
from flatshard.train.model import LlamaConfig
from tests.tools.cases import CONFIG, Case

pytestmark = pytest.mark.sampled(3)

BF16, FP32 = torch.bfloat16, torch.float32


def storages(tensors):
    """Bytes of the storages of tensors, each once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _by_category(rank, world, case):
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.warmed_up(model)
    groups = [group for _, unit in units_below(model) for group in unit.groups]
    root = unit_of(model).root
    root.gather_pool.peak_bytes = 0
    staging = []
    reduce = root.reduces.launch

    def watched(*args):
        """At a reduce: the gradients that autograd has left, and what the reduces in flight hold."""
        for moment in (lambda: None, lambda: reduce(*args)):
            moment()
            grads = [m.full.grad for group in groups for m in group.params if m.full is not None]
            kept = [tensor for reduction in root.reduces.in_flight for tensor in reduction.held]
            mains = {id(m.sharded.grad.__dict__["_flatshard_main_grad"].local) for g in groups for m in g.params
                     if m.sharded.grad is not None}  # fmt: skip
            staging.append(storages([*grads, *(tensor for tensor in kept if id(tensor) not in mains)]))

    root.reduces.launch = watched
    case.passes(model)
    state = [local(value) for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return {
        "main": storages([group.main.local for group in groups]),
        "compute": storages(
            [group.source.compute.buffer.local for group in groups if group.source.compute is not None]
        ),
        "state": storages(state),
        "gradients": storages([local(p.grad) for p in model.parameters()]),
        "gathered": root.gather_pool.peak_bytes,
        "staging": max(staging),
    }


REAL = [
    Case((2,)),
    Case((3,), param=BF16),
    Case((2,), layout="flat", param=BF16, reduce=FP32),
    Case((2,), strategy=2, param=BF16),
    Case((2,), strategy=1),
    Case((2,), strategy=0, param=BF16),
    Case((2,), layout="auto"),
    Case((2, 2), param=BF16),
    Case((2, 2), outer="optim"),
    Case((2,), schedule=SchedulePolicy(max_gathered=3, max_reducing=1)),
    Case((2,), schedule=SchedulePolicy(max_gathered_bytes=2_100_000)),  # three blocks
]


@pytest.mark.parametrize("case", REAL, ids=str)
def test_bytes_of_real_ranks_by_category(ranks, case):
    formula = case.formula()
    resting = formula.resting
    wanted = {
        "main": resting.main,
        "compute": resting.compute,
        "state": resting.state,
        "gradients": resting.main,  # in main's dtype
        "gathered": formula.most_gathered,
        "staging": formula.most_staging,
    }
    for found in ranks(case.world, _by_category, case):
        assert found == pytest.approx(wanted, rel=0.02)


# What the allocator gave out and took back in a step, as one rank of W

TRACED = [
    Case((4,)),
    Case((4,), layout="flat"),
    Case((4,), param=BF16, reduce=FP32),
    Case((4,), strategy=2, param=BF16),
    Case((4,), strategy=0, param=BF16),
    Case((4,), tied=True),
    Case((4,), strategy=1, tied=True),
    Case((2, 4), param=BF16),
    Case((2, 4), outer="optim"),
    Case((4,), microbatches=2),
    Case((4,), strategy=1, microbatches=2, param=BF16),
    Case((2, 4), microbatches=2, param=BF16),
    Case((16,), schedule=SchedulePolicy(max_gathered=3, max_reducing=1)),
    Case((16,), schedule=SchedulePolicy(max_gathered_bytes=2_100_000)),
    Case((16,), schedule=SchedulePolicy(prefetch=False, async_reduce=False)),
]


def at_once(clock, transfer):
    """A collective on the caller's thread: the profiler sees memory that is freed there only."""
    work = CpuWork(transfer)
    move_bytes(transfer)
    work.finish()
    return work


def allocator_peak(profile, path):
    """The most that was allocated beyond what there was at the beginning."""
    profile.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event["args"]["Ev Idx"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def assert_peak_and_traffic(case, monkeypatch, tmp_path, config=CONFIG):
    monkeypatch.setattr(CpuClock, "submit", at_once)
    formula = case.formula(config)
    # On processors with matrix units oneDNN takes working memory for products in bfloat16.
    with torch.backends.mkldnn.flags(enabled=False), rehearse(case.world, "free") as rehearsal:
        model = case.build(config)
        case.warmed_up(model)
        before = rehearsal.medium.traffic.snapshot()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            case.passes(model)
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
    peak = allocator_peak(profile, tmp_path / "trace.json")
    assert peak == pytest.approx(formula.peak.total - formula.resting.total, rel=0.02)
    sizes: dict[str, list[int]] = {}
    for launch in formula.launches:
        entry = sizes.setdefault(launch.kind, [0, 0])
        entry[0] += launch.times
        entry[1] += launch.times * launch.size
    assert {kind: [entry.launches, entry.bytes] for kind, entry in traffic.items()} == sizes


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_peak_and_traffic_of_a_step(case, monkeypatch, tmp_path):
    assert_peak_and_traffic(case, monkeypatch, tmp_path)


LARGER = LlamaConfig(256, layers=2, heads=4, kv_heads=4, ffn=320, vocab=1030, max_tokens=4)  # matrices worth encoding
FORMATS = [
    Case((4,), param=BF16, gather="int8", reduces="int8", microbatches=2),
    Case((4,), param=BF16, gather="float8", reduces="bf16_fp32", layout="flat"),
    Case((4,), strategy=2, param=BF16, gather="int8", reduces="int8"),
    Case((4,), strategy=0, param=BF16, gather="int8", reduces="int8"),
    Case((4,), param=BF16, gather="int8", schedule=SchedulePolicy(max_gathered_bytes=2_000_000)),
    Case((4,), param=BF16, gather="int8", schedule=SchedulePolicy(max_gathered=3)),
    Case((2, 4), param=BF16, gather="int8", reduces=("int8", "int8")),
    Case((8, 2), param=BF16, gather="int8", reduces=("int8", "int8")),  # too many for an exchange on the outer axis
    Case((2, 4), outer="optim", param=BF16, gather="int8", reduces=("bf16_fp32", "int8")),
]


@pytest.mark.parametrize(
    "case", [FORMATS[0], *(pytest.param(case, marks=pytest.mark.full) for case in FORMATS[1:])], ids=str
)
def test_traffic_with_formats(case):
    """What travels, and that gathers take fewer bytes. Encoding on a CPU takes memory of its own."""
    formula = case.formula(LARGER)
    with rehearse(case.world, "free") as rehearsal:
        model = case.build(LARGER)
        case.warmed_up(model)
        before = rehearsal.medium.traffic.snapshot()
        case.passes(model)
        traffic = difference(rehearsal.medium.traffic.snapshot(), before)
    sizes: dict[str, list[int]] = {}
    for launch in formula.launches:
        entry = sizes.setdefault(launch.kind, [0, 0])
        entry[0] += launch.times
        entry[1] += launch.times * launch.size
    assert {kind: [entry.launches, entry.bytes] for kind, entry in traffic.items()} == sizes
    plain = replace(case, gather=None, reduces=None).formula(LARGER)
    ours, theirs = (sum(x.times * x.size for x in each.launches if not x.reduces) for each in (formula, plain))
    assert ours < theirs or case.strategy == 0


def test_peak_where_a_micro_batch_begins_beside_the_reduces_of_the_last(monkeypatch, tmp_path):
    """Those of a large embedding, whose rows do not divide, and of the first block, beside both gathered again."""
    config = LlamaConfig(128, layers=4, heads=4, kv_heads=2, ffn=352, vocab=2054, max_tokens=4)
    case = Case((8,), param=BF16, reduce=BF16, microbatches=2)
    assert_peak_and_traffic(case, monkeypatch, tmp_path, config)


@pytest.mark.parametrize("case", [Case((4,), param=BF16), Case((4,), strategy=2)], ids=str)
def test_peak_and_traffic_where_a_tensor_is_cut_on_another_dim(case, monkeypatch, tmp_path):
    """The rows of the embedding and of the head, which do not divide, are not padded but cut across."""
    monkeypatch.setattr(planner, "AUTO_FLAT_BELOW", 0)
    monkeypatch.setattr(planner, "TURN_ABOVE", 0.0)
    assert_peak_and_traffic(case, monkeypatch, tmp_path)
