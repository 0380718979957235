"""Ranks that differ in their models, or in what they do in check mode, hear of it: all of them, and by name."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard, gathered
from flatshard.buffer import Lane
from flatshard.engine import steps
from flatshard.engine.parameters.values import checksum, scrambled
from flatshard.engine.schedule.agreement import patience
from flatshard.engine.tree.build import units_below
from tests.order.cases import DIM, Chain, make, rows, shard

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(60)]


# Models


def _double(model):
    model.blocks[1].double()


def _frozen(model):
    model.blocks[1].up.weight.requires_grad_(False)


def _wider(model):
    model.blocks[1].up = nn.Linear(DIM, 16)


def _more(model):
    model.blocks.append(nn.Linear(DIM, DIM))


def _renamed(model):
    block = model.blocks[1]
    block.other = block._modules.pop("up")


def _swapped(model):
    """The same bytes, in another order."""
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def _one_value(model):
    with torch.no_grad():
        model.blocks[2].down.bias[-1] += 1


CHANGES = [
    (_double, "blocks.1.up.weight"),
    (_frozen, "blocks.1.up.weight"),
    (_wider, "blocks.1.up.weight"),
    (_more, "blocks.3"),
    (_renamed, "blocks.1."),
    (_swapped, "blocks.0.up.weight"),
    (_one_value, "blocks.2.down.bias"),
]
SETTINGS = [
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    {"reshard_after_forward": False},
    {"schedule": SchedulePolicy(max_gathered=3)},
    {"strategy": 2},
    {"layout": "flat"},
]


def _told(model, *args, **kwargs):
    try:
        model(*args, **kwargs).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _different_models(rank, world):
    found = []
    for change, _ in CHANGES:
        model = make()
        if rank == 1:
            change(model)
        found.append(_told(shard(model), rows(0)))
    for setting in SETTINGS:
        found.append(_told(shard(make(), **setting if rank == 1 else {}), rows(0)))
    return found


def test_models_that_differ_are_refused_on_all_ranks_and_the_difference_is_named(interpreters):
    found = interpreters(3, _different_models)
    assert found[0] == found[1] == found[2]
    for message, (change, name) in zip(found[0], CHANGES):
        assert "ranks differ in their models" in message, change
        assert "rank 0" in message, change
        assert "rank 1" in message, change
        assert f"'{name}" in message, change
    for message, setting in zip(found[0][len(CHANGES) :], SETTINGS, strict=True):
        assert "ranks differ in their models" in message, setting


class Offset(nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.offset = nn.Parameter(offset)

    def forward(self, x):
        return x + self.offset


def _values(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def model():
        torch.manual_seed(rank)
        return Chain()

    first = shard(model(), mesh=mesh, values="first")
    with gathered(first):
        kept = [p.detach().clone() for p in first.parameters()]
    told = [_told(shard(model(), mesh=mesh), rows(0)), _told(first, rows(0))]
    told.append(_told(shard(model(), values="own"), rows(0)))
    with pytest.warns(
        UserWarning, match="training mixes their values. Parameter 'output.weight' was sharded with other values"
    ):
        told.append(_told(shard(model(), values="warn"), rows(0)))
    loaded = shard(model(), offload_policy=CPUOffloadPolicy())
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.fill_(0.5)  # as a checkpoint would: nothing is left of what they were sharded with
    told.append(_told(loaded, rows(0)))
    for devices in ("meta", "meta"), ("cpu", "meta"):  # of the first rank, and of the others
        meta = shard(make(device=devices[rank > 0]))
        meta.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in meta.parameters():
                parameter.fill_(0.5)
        told.append(_told(meta, rows(0)))
    replaced = fully_shard(nn.Linear(DIM, DIM, bias=False))
    replaced.weight = nn.Parameter(torch.zeros_like(replaced.weight))
    told.append(_told(replaced, rows(0)))
    told.append(_told(fully_shard(Offset(torch.randn(1))), rows(0)))  # nobody but the first rank has a part
    with torch.no_grad():
        view = torch.ones(DIM + 1)[1:]  # not where words of eight bytes can be
    told.append(_told(fully_shard(Offset(view)), rows(0)))
    return told, kept


def test_values_are_compared_unless_they_have_been_replaced_or_are_meant_to_differ(interpreters):
    wanted = [parameter.detach() for parameter in make().parameters()]
    for told, kept in interpreters(4, _values):
        assert "Parameter 'output.weight' was sharded with other values on rank 1 than on rank 0" in told[0]
        assert told[1:] == ["nothing"] * 9
        torch.testing.assert_close(kept, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3), torch.zeros(300, 5), torch.zeros(2, 64, dtype=torch.bool), torch.tensor(1.0), torch.arange(999)],
)
def test_a_checksum_changes_with_the_lowest_and_the_highest_bit_of_any_element(tensor):
    data = tensor.clone().reshape(-1).view(torch.uint8)
    before = scrambled(checksum(data.view(tensor.dtype)))
    for place in [*range(0, len(data), max(1, len(data) // 50)), len(data) - 1]:
        for bit in (1, 128) if tensor.dtype != torch.bool else (1,):
            data[place] ^= bit
            assert scrambled(checksum(data.view(tensor.dtype))) != before
            data[place] ^= bit


def _exchanges(rank, world):
    """How many numbers the ranks exchange, each time, before the first launch."""
    count = []
    model = shard(make())
    with mock.patch.object(Lane, "max_over_ranks", autospec=True, side_effect=Lane.max_over_ranks) as most:
        model.unshard()
        count = [len(call.args[2]) for call in most.call_args_list]
    return count, sum(len(group.params) for _, unit in units_below(model) for group in unit.groups)


def test_the_comparison_takes_two_small_exchanges(interpreters):
    for count, parameters in interpreters(2, _exchanges):
        assert count == [2, 3 * parameters]


def _other_meshes(rank, world):
    """One rank has a block on a mesh of its own, which the others do not: nobody must wait for anybody there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    flat, inner = init_device_mesh("cpu", (4,)), mesh["inner"]
    model = make()
    for number, block in enumerate(model.blocks):
        fully_shard(block, mesh=inner if rank == 1 and number == 1 else flat)
    return _told(fully_shard(model, mesh=flat), rows(0))


def test_ranks_with_other_meshes_are_told_before_they_meet_there(interpreters):
    for told in interpreters(4, _other_meshes):
        assert "ranks differ in their models" in told
        assert "rank 0: meshes [(4,)]" in told
        assert "rank 1: meshes [(4,), (2,)]" in told


# Check mode


class Free(nn.Module):
    """Layers that are run in the order that is said."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x, order=(0, 1, 2), scaled=True):
        for number in order:
            x = torch.tanh(self.blocks[number](x))
        return x * self.scale if scaled else x


def _step(model, optimizer, *args, forwards=1, backward=True, steps=True):
    for _ in range(forwards):
        loss = model(*args).sum()
        if backward:
            loss.backward()
    if steps:
        optimizer.step()
        optimizer.zero_grad()


def _evaluate(model, optimizer, x):
    with torch.no_grad():
        model(x)


def _in_eval(model, optimizer, x):
    model.eval()
    try:
        _step(model, optimizer, x)
    finally:
        model.train()


SEEDED = {
    "skipped branch": (lambda m, o, x: _step(m, o, x, (0, 2)), "'blocks.2'"),
    "last layer skipped": (lambda m, o, x: _step(m, o, x, (0, 1)), "'blocks.2'"),
    "other order": (lambda m, o, x: _step(m, o, x, (1, 0, 2)), "'blocks.1'"),
    "a layer twice": (lambda m, o, x: _step(m, o, x, (0, 0, 1, 2)), "'blocks.0'"),
    "unused parameter": (lambda m, o, x: _step(m, o, x, (0, 1, 2), False), "reduce"),
    "extra forward": (lambda m, o, x: (m(x), _step(m, o, x)), "forward"),
    "evaluation": (_evaluate, "forward without gradients"),
    "in eval": (_in_eval, "evaluation mode"),
    "no backward": (lambda m, o, x: (_step(m, o, x, backward=False), _step(m, o, x)), "forward"),
    "uneven micro-batches": (lambda m, o, x: (_step(m, o, x, forwards=2), _step(m, o, x)), "of step"),
    "other dtype": (lambda m, o, x: m.double(), "bytes of unit"),
    "no step": (lambda m, o, x: (_step(m, o, x, steps=False), _step(m, o, x)), "of step"),
}


def _checked(rank, world):
    own = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for _ in range(rank):
        own.step()  # steps of something that is not sharded are nobody's business
        steps.taken()
    with mock.patch.dict(os.environ, FLATSHARD_CHECK="1"):
        found = {}
        for kind, (differently, _) in SEEDED.items():
            model = shard(make(Free))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                _step(model, optimizer, rows(rank))
            try:
                if rank == 1:
                    differently(model, optimizer, rows(rank))
                for _ in range(2):
                    _step(model, optimizer, rows(rank))
            except RuntimeError as error:
                found[kind] = str(error)
        return found


def test_in_check_mode_a_rank_that_goes_another_way_is_named_on_all(interpreters):
    found = interpreters(3, _checked)
    for kind, (_, name) in SEEDED.items():
        messages = {each.get(kind) for each in found}
        assert len(messages) == 1, (kind, messages)
        message = messages.pop() or "nothing"
        for part in ("ranks differ in what they do next: rank 0", "; rank 1", name, "of step 3"):
            assert part in message, (kind, message)


@pytest.mark.parametrize("given", ["maybe", "-1", "nan"])
def test_a_check_mode_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv("FLATSHARD_CHECK", given)
    with pytest.raises(ValueError, match="FLATSHARD_CHECK"):
        patience()


def test_values_that_are_no_choice_are_refused(ranks):
    ranks(1, _refused)


def _refused(rank, world):
    with pytest.raises(ValueError, match="values='rank0': must be one of same, warn, first, own"):
        fully_shard(nn.Linear(2, 2), values="rank0")
