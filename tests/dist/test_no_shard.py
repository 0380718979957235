"""`no_shard`: what is marked stays whole on every rank; frozen parts cost nothing, trainable ones train as the rest."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import flatshard
from flatshard import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch, no_shard
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from tests.bench.script import as_script, free_port
from tests.dist.models import assert_rows
from tests.dist.test_engine import full
from tests.dist.test_strategies import STRATEGIES, mesh_of, world_of

DIM, ROWS = 6, 24


class Towers(nn.Module):
    """A frozen encoder, and blocks that are trained on what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, DIM))
        self.encoder.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.gain = nn.Parameter(torch.randn(5, DIM))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain.mean(0))


def make(device="cpu"):
    torch.manual_seed(3)
    with torch.device(device):
        return Towers()


def shard(model, **kwargs):
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def run(rank, world, model, reference, steps=2, micro=1, scoped=True):
    """Train both and compare every step's gradients, and the weights at the end."""
    optimizers = []
    for each in (model, reference):
        trained = [parameter for parameter in each.parameters() if parameter.requires_grad]
        optimizers.append(fully_shard_optimizer(torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)))
    rng = torch.Generator().manual_seed(5)
    for step in range(steps):
        for number, rows in enumerate(torch.randn(micro, ROWS, DIM, generator=rng)):
            with microbatch(model, is_first=not scoped or number == 0, is_last=not scoped or number == micro - 1):
                (model(rows.chunk(world)[rank]).square().mean() / micro).backward()
            (reference(rows).square().mean() / micro).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for each, optimizer in zip((model, reference), optimizers):
            optimizer.step()
            each.zero_grad()
        del step
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        assert_rows(ours.detach(), theirs.data, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _frozen(rank, world, case, own_unit):
    axes, strategy, outer = case
    kwargs = {"mesh": mesh_of(axes, world), "strategy": strategy, "outer_strategy": outer}
    model, reference = make(), make()
    keys, before = list(model.state_dict()), list(model.encoder.parameters())
    no_shard(model.encoder)
    if own_unit:
        fully_shard(model.encoder, **kwargs)
    shard(model, **kwargs)
    assert list(model.state_dict()) == keys
    # The very parameters, whole; and no hook on any module of the encoder, whether it is a unit of its own or not.
    assert all(new is old for new, old in zip(model.encoder.parameters(), before))
    for module in model.encoder.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._backward_hooks
    run(rank, world, model, reference)
    size = sum(4 * p.numel() for p in before)
    rows = [row for row in flatshard.summary(model).rows if row.placements == "no_shard"]
    assert sum(row.bytes_per_rank for row in rows) == size
    assert {(row.kept, row.trainable) for row in rows} == {("always", False)}
    root = unit_of(model).root
    assert not any("encoder" in op.name for lane in (root.gather_lane, root.reduce_lane) for op in lane.history)
    held = sum(group.layout.payload for _, unit in units_below(model) for group in unit.groups)
    assert held == sum(p.numel() for p in make().parameters() if p.requires_grad)
    # Unfrozen later, its gradients would stay each rank's own: that is refused.
    model.encoder[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight' was frozen and marked with no_shard"):
        model(torch.ones(2, DIM)).sum().backward()
    model.encoder.requires_grad_(False)
    model.zero_grad()
    assert model.encoder[0].weight.grad is None
    model(torch.ones(2, DIM)).sum().backward()
    copy.deepcopy(model.encoder[0].weight)


def some(chosen):
    """The others are left to the full product."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in STRATEGIES]


@pytest.mark.parametrize("case", some(STRATEGIES[::2]), ids=str)
def test_a_frozen_encoder_is_left_alone(ranks, case):
    ranks(world_of(case), _frozen, case, STRATEGIES.index(case) // 2 % 2 == 0)


def _saved(rank, world):
    sent, most = [], []
    for marked in (False, True):
        model, reference = make(), make()
        if marked:
            no_shard(model.encoder)
        fully_shard(model.encoder)
        shard(model)
        if not marked:
            (group,) = unit_of(model.encoder).groups
            encoder = 4 * world * sum(segment.piece for segment in group.layout.segments)
        run(rank, world, model, reference)  # the ranks agree on the order at the end of the first step
        root = unit_of(model).root
        root.gather_lane.history.clear()
        root.gather_pool.peak_bytes = 0
        run(rank, world, model, reference, steps=1)
        sent.append(sum(op.numbytes for op in root.gather_lane.history))
        most.append(root.gather_pool.peak_bytes)
    # Without the mark it is gathered once a step: no gradient goes through a frozen encoder that comes first.
    assert sent[0] - sent[1] == encoder >= 4 * sum(p.numel() for p in make().encoder.parameters())
    assert most[0] - most[1] > 0


def test_a_marked_encoder_saves_its_bytes_on_the_wire_and_in_the_pool(ranks):
    ranks(2, _saved)


def _trainable(rank, world, case, layout):
    axes, strategy, outer = case
    model, reference = make(), make()
    no_shard(model.blocks[1])
    no_shard(model.gain)
    mesh = mesh_of(axes, world)
    shard(model, mesh=mesh, strategy=strategy, outer_strategy=outer, layout=layout)
    assert list(model.state_dict()) == list(reference.state_dict())
    run(rank, world, model, reference, micro=2)
    run(rank, world, model, reference, micro=2, scoped=False)
    root = unit_of(model).root
    lanes = {root.gather_lane, root.gather_pool.refresh_lane}
    for lane in lanes:
        lane.history.clear()
    run(rank, world, model, reference, steps=1, micro=3)
    names = [op.name for lane in lanes for op in lane.history if op.kind == "all_gather"]
    (marked,) = unit_of(model.blocks[1]).groups
    sharded_state = strategy != "no_shard"
    # Refreshed once per step and per sharded axis, and gathered for no pass.
    refreshes = sum(type(p).__name__ == "Flat" for p in marked.main.placements)
    assert refreshes == (0 if not sharded_state else 2 if outer == "optim" else 1)
    assert names.count("refresh blocks.1") == refreshes
    assert names.count("blocks.1") == 0
    assert marked.source.is_resident
    assert marked.main.local.numel() == marked.layout.buffer_numel(1)
    assert marked.layout.num_shards == (1 if not sharded_state else 4 if outer == "optim" else 2)
    rows = {row.unit: row for row in flatshard.summary(model).rows}
    assert rows["blocks.1"].kept == "always"
    if strategy == "optim_grads_params":
        assert rows["blocks.0"].kept == "no"
        gain = next(g for g in unit_of(model).groups if [m.name for m in g.params] == ["gain"])
        assert gain.source.is_resident
        assert [g.source.is_resident for g in unit_of(model).groups].count(True) == 1


@pytest.mark.parametrize("case", some([*STRATEGIES[1::2], STRATEGIES[8]]), ids=str)
def test_trainable_marked_parameters_are_averaged_and_refreshed_once_per_step(ranks, case):
    ranks(world_of(case), _trainable, case, ("tensor", "flat")[STRATEGIES.index(case) // 2 % 2])


def _meta(rank, world, strategy):
    torch.manual_seed(rank)  # ranks that would initialise differently
    model = make("meta")
    model.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM, bias=False)).to("meta")
    model.encoder[2].weight = model.encoder[0].weight  # tied, and whole
    model.encoder.requires_grad_(False)
    no_shard(model.encoder)
    no_shard(model.blocks[1])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, strategy=strategy, mp_policy=policy)
    before = str(flatshard.summary(model))

    def init(module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.3)

    flatshard.materialize(model, init)
    assert len(str(flatshard.summary(model)).splitlines()) == len(before.splitlines())
    assert model.encoder[0].weight is model.encoder[2].weight
    assert model.encoder[0].weight.dtype == torch.bfloat16
    assert not model.encoder[0].weight.requires_grad
    assert unit_of(model.blocks[1]).groups[0].source.is_resident
    values = [full(p) if hasattr(p, "full_tensor") else p for p in model.parameters()]
    model(torch.ones(2, DIM)).float().sum().backward()
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())
    model.encoder[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="marked with no_shard"):
        model(torch.ones(2, DIM)).float().sum().backward()
    return [value.detach().float().clone() for value in values]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_marks_survive_the_meta_device_and_values_are_those_of_any_world(ranks, strategy):
    results = [result for world in (1, 2, 3) for result in ranks(world, _meta, strategy)]
    for values in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, results[0]))


def _too_late(rank, world):
    model = make()
    shard(model)
    for target in (model, model.blocks[0], model.blocks[0][0], model.head, model.head.weight, model.encoder):
        with pytest.raises(ValueError, match="already sharded; call no_shard before fully_shard"):
            no_shard(target)
    model.unshard()
    with pytest.raises(ValueError, match="already sharded"):
        no_shard(model.head.weight)
    model.reshard()
    with pytest.raises(TypeError, match="not str"):
        no_shard("encoder")
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(partly[1])
    with pytest.raises(ValueError, match="already sharded"):
        no_shard(partly)
    fully_shard(partly)  # the refused call has marked nothing
    assert not unit_of(partly).groups[0].source.is_resident
    assert not any(row.kept == "always" for row in flatshard.summary(model).rows)


def test_a_mark_that_comes_too_late_is_refused(ranks):
    assert ranks(2, _too_late) == [None] * 2


@pytest.mark.full
def test_the_two_tower_example_runs(ranks):
    example = Path(__file__).parents[2] / "examples" / "two_tower.py"
    printed, *others = ranks(2, as_script, str(example), free_port())
    assert not any(others)
    assert "no_shard" in printed
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) >= 3
    assert losses[-1] < 0.5 * losses[0]
