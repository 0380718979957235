"""Parameters that the user replaces after sharding: absorbed into the buffers, or refused."""

import copy

import pytest
import torch

import flatshard
from flatshard import fully_shard
from flatshard.engine.units.unit import unit_of
from tests.dist.models import make_net, train
from tests.dist.test_engine import ROWS, STEPS, full, shard_net


def _check_storage(model):
    flatshard.check_buffers(model)
    for module in model.modules():
        unit = unit_of(module)
        for group in unit.groups if unit else ():
            assert all(member.sites[0].look() is member.sharded for member in group.params)


def _meta_then_to_empty(rank, world):
    plain = make_net()
    with torch.device("meta"):
        model = make_net()
    shard_net(model)
    before = list(model.parameters())
    with pytest.raises(ValueError, match="cannot initialise blocks"):  # a block has no reset_parameters
        model(torch.zeros(1, 4, dtype=torch.long))
    model.to_empty(device="cpu")
    assert all(new is old for new, old in zip(model.parameters(), before))  # identity is final
    _check_storage(model)
    for sharded, value in zip(model.parameters(), plain.parameters()):
        sharded.data.copy_(
            torch.distributed.tensor.distribute_tensor(value.data, sharded.device_mesh, sharded.placements)
        )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True) for m in (model, plain)]
    train(model, optimizers[0], STEPS, ROWS, rank, world)
    train(plain, optimizers[1], STEPS, ROWS, 0, 1)
    for sharded, value in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(full(sharded), value.data, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_a_meta_model_trains_after_to_empty_and_initialisation(ranks, world):
    assert ranks(world, _meta_then_to_empty) == [None] * world


def _cast(rank, world):
    model = shard_net(make_net())
    values = [full(p) for p in model.parameters()]
    model.double()
    _check_storage(model)
    assert all(torch.equal(full(p), value.double()) for p, value in zip(model.parameters(), values))
    losses = torch.tensor(train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), 2, ROWS, rank, world))
    torch.distributed.all_reduce(losses)
    plain = make_net().double()
    wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, fused=True), 2, ROWS, 0, 1)
    torch.testing.assert_close(losses / world, torch.tensor(wanted), rtol=1e-6, atol=0)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), 1, ROWS, rank, world)
    model.load_state_dict(state, assign=True)
    _check_storage(model)
    assert all(torch.equal(full(p), full(value)) for p, value in zip(model.parameters(), state.values()))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), 1, ROWS, rank, world)


def test_casting_and_assigned_state_are_absorbed(ranks):
    assert len(ranks(2, _cast)) == 2


def _plain(rank, world):
    for assign in (False, True):
        model = fully_shard(torch.nn.Linear(4, 4))
        whole = {"weight": torch.arange(16.0).view(4, 4), "bias": torch.arange(4.0)}
        model.load_state_dict(whole, assign=assign)
        assert all(torch.equal(full(value), whole[name]) for name, value in model.state_dict().items())
        model.weight = torch.nn.Parameter(torch.zeros(4, 4))
        with pytest.raises(ValueError, match="weight"):
            model(torch.ones(1, 4))


def test_a_whole_tensor_is_cut_by_load_state_dict_and_refused_in_the_place_of_a_shard(ranks):
    assert ranks(2, _plain) == [None] * 2


def _copied(rank, world, layout):
    model = shard_net(make_net(), layout=layout)
    state = copy.deepcopy(model.state_dict())
    wanted = {name: full(value).clone() for name, value in model.state_dict().items()}
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), 1, ROWS, rank, world)
    assert all(torch.equal(full(value), wanted[name]) for name, value in state.items())
    model.load_state_dict(state)
    assert all(torch.equal(full(value), wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_a_state_dict_can_be_copied(ranks, layout):
    assert ranks(2, _copied, layout) == [None] * 2


def _other_blocks(rank, world, change):
    """After a first step, a block is left out, or another takes its place, which is a unit or is not."""
    plain, model = make_net(), make_net()
    shard_net(model)
    for number in range(2):
        if number:
            for net in (plain, model):
                del net.blocks[1]
                if change != "deleted":
                    net.blocks.insert(1, make_net(seed=5).blocks[0])
                if change == "unit" and net is model:
                    fully_shard(net.blocks[1])
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
        train(model, optimizers[0], STEPS, ROWS, rank, world)
        train(plain, optimizers[1], STEPS, ROWS, 0, 1)
    if change == "plain":
        return  # nothing averages the gradients of what is no unit
    for sharded, value in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(sharded), value.data, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("change", ["deleted", "plain", "unit"])
def test_blocks_that_leave_the_model_after_a_step(ranks, change):
    ranks(2, _other_blocks, change)
