"""Why full weights stay: what a unit's leases are in each situation, what `summary` says of them, and when they end."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import fully_shard, summary
from flatshard.engine.units.unit import unit_of

DIM = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if self.fails:
            raise ArithmeticError
        return self.second(x)


def _sharded(**choices) -> Net:
    torch.manual_seed(0)
    model = Net()
    for part in (model.first, model.second):
        fully_shard(part, **choices)
    return fully_shard(model)


def _held(model: Net) -> set[str]:
    return {lease.value for lease in unit_of(model.first).leases}


def _leases(rank, world):
    model, x = _sharded(reshard_after_forward=False), torch.ones(2, DIM)
    assert not summary(model).leases
    loss = model(x).sum()
    assert _held(model) == {"a pass", "the next pass"}
    assert "first for a pass and the next pass" in str(summary(model))
    loss.backward()
    assert not _held(model)
    with flatshard.gathered(model):
        assert _held(model) == {"gathered()"}
        with flatshard.gathered(model.first), torch.no_grad():
            model(x)
        assert not isinstance(model.first.weight, DTensor)
    assert not _held(model)
    assert isinstance(model.first.weight, DTensor)


def test_each_has_a_reason_and_an_end(ranks):
    ranks(2, _leases)


def _checked_in_hooks(rank, world, recompute):
    """Whatever is gathered while a pass runs has a lease; units ahead of it have that of prefetch."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM)) for _ in range(6))), set[str]()
    for part in model:
        if recompute:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
        fully_shard(part)
    fully_shard(model)
    units = [unit_of(part) for part in model]

    def check(*_: Any) -> None:
        for unit in units:
            assert unit.is_gathered == bool(unit.leases), (unit.name, unit.leases)
            seen.update(lease.value for lease in unit.leases)

    for part in model:
        part[0].register_forward_hook(check)
        part[0].register_full_backward_hook(check)
    for _ in range(3):
        model(torch.ones(2, DIM, requires_grad=True)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, DIM))
        assert not any(unit.leases or unit.is_gathered for unit in units)
    assert seen == {"a pass", "prefetch"}


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_gathered_has_a_lease(ranks, recompute):
    ranks(2, _checked_in_hooks, recompute)


def _graph(rank, world):
    """A body of `gathered` goes on to show full parameters, whatever a backward in it has left."""
    model, x = _sharded(), torch.ones(2, DIM, requires_grad=True)
    with flatshard.gathered(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        assert not isinstance(model.first.weight, DTensor)
        grad.square().sum().backward()
        assert not isinstance(model.first.weight, DTensor)
    assert isinstance(model.first.weight, DTensor)
    torch.manual_seed(0)
    whole = Net()
    (grad,) = torch.autograd.grad(whole(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters()):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_a_graph_of_second_order_in_a_body_of_gathered(ranks):
    ranks(2, _graph)


def _broken(rank, world, where):
    model, x = _sharded(), torch.ones(2, DIM)
    model(x)
    if where == "forward":
        model.fails = True
        with pytest.raises(ArithmeticError):
            model(x)
        model.fails = False
    else:
        hidden = model.first(x)
        hidden.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.second(hidden).sum().backward()
        del hidden
    with flatshard.gathered(model, write=True), torch.no_grad():
        model.first.weight.fill_(2.0)
    assert model.first.weight.full_tensor().eq(2.0).all()
    model.hold_weights()
    model.refresh_weights()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_weights_can_be_written_and_held_after_a_pass_that_raised(ranks, where):
    ranks(2, _broken, where)


def _step_by_hand(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.5)
    parameter.grad = None


def _written_in_backward(rank, world):
    """Weights that stay after a backward are those of before it, if hooks have written main meanwhile."""
    model, x = _sharded(), torch.ones(2, DIM)
    torch.manual_seed(0)
    whole = Net()
    model.set_reshard_after_backward(False)
    model.set_reduce_scatter_max_input_buffers(1)  # so that hooks are called while the backward goes on
    for parameter in (*model.parameters(), *whole.parameters()):
        parameter.register_post_accumulate_grad_hook(_step_by_hand)
    for _ in range(3):
        losses = [each(x).square().sum() for each in (model, whole)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()


def test_weights_that_hooks_write_during_a_backward_are_gathered_anew(ranks):
    ranks(2, _written_in_backward)


class Momentum(Net):
    """The second layer is a moving average of the first one, and follows it within the forward."""

    how = "in place"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.first(x)
        with torch.no_grad():
            averages, parameters = list(self.second.parameters()), list(self.first.parameters())
            if self.how == "list":
                torch._foreach_lerp_(averages, parameters, 0.5)
            for average, parameter in zip(averages, parameters):
                if self.how == "in place":
                    average.lerp_(parameter.detach(), 0.5)
                elif self.how == "data":
                    average.data.lerp_(parameter.data, 0.5)
            key = self.second(x)
        return query * key


def _written_in_forward(rank, world, how):
    torch.manual_seed(0)
    choices = [{"strategy": 1}, {"strategy": 3}, {"strategy": 3, "layout": "flat"}]
    whole = [Momentum() for _ in choices]
    models = [copy.deepcopy(each) for each in whole]
    for model, one, chosen in zip(models, whole, choices):
        model.how = one.how = how
        for part in (model.first, model.second, model):
            fully_shard(part, **chosen)
    for _ in range(2):
        for model, one in zip(models, whole):
            torch.testing.assert_close(model(torch.ones(2, DIM)), one(torch.ones(2, DIM)))


@pytest.mark.parametrize("how", ["in place", "list", "data"])
def test_weights_that_a_forward_writes_before_it_uses_them_are_gathered_anew(ranks, how):
    ranks(2, _written_in_forward, how)


def _written_by_one_rank(rank, world):
    """Within a forward, one rank alone steps another model, and writes its part of a unit that is prefetched."""
    model, other = _sharded(), nn.Linear(2, 2)
    optimizer, x = torch.optim.SGD(other.parameters(), lr=0.1), torch.ones(2, DIM)
    expected = model(x)
    lane = unit_of(model).root.gather_lane
    before = lane.launched

    def write(*_: Any) -> None:
        if rank == 0:
            optimizer.step()
            model.second.weight.to_local().mul_(1.0)

    model.first.register_forward_hook(write)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert lane.launched - before == 2


def test_all_ranks_gather_the_same_weights_if_one_of_them_writes_its_part_within_a_forward(ranks):
    ranks(2, _written_by_one_rank)


def _ends_of_bodies(rank, world):
    """Modules show what they would without the body: a pass that ended in it, or broke, is over."""
    model, x = _sharded(reshard_after_forward=False), torch.ones(2, DIM)
    loss = model(x).sum()
    with flatshard.gathered(model):
        loss.backward()
    assert not _held(model)
    assert isinstance(model.first.weight, DTensor)
    model.first.unshard()
    with flatshard.gathered(model):
        pass
    assert not isinstance(model.first.weight, DTensor)  # by hand, until `reshard`
    model.first.reshard()
    one, two = flatshard.gathered(model), flatshard.gathered(model)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert not isinstance(model.first.weight, DTensor)
    two.__exit__(None, None, None)
    assert isinstance(model.first.weight, DTensor)
    model.fails = True
    with pytest.raises(ArithmeticError), flatshard.gathered(model):
        model(x)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.fails = False
    hidden = model.first(x)
    hidden.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.second(hidden).sum().backward()
    del hidden
    with flatshard.gathered(model):
        assert not isinstance(model.first.weight, DTensor)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_weights_do_not_outlive_a_body_of_gathered_and_the_passes_in_it(ranks):
    ranks(2, _ends_of_bodies)


def _graph_of_backward(rank, world):
    """`backward(create_graph=True)` leaves reduced gradients, which no graph leads to, and weights that stay hidden."""
    model, x = _sharded(), torch.ones(2, DIM)
    torch.manual_seed(0)
    whole = Net()
    for create_graph in (True, False):
        for each in (model, whole):
            each(x).square().sum().backward(create_graph=create_graph)
        for mine, theirs in zip(model.parameters(), whole.parameters()):
            assert isinstance(mine, DTensor)
            assert not mine.grad.requires_grad
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.detach())
            mine.grad = theirs.grad = None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_makes_a_graph_reduces_its_gradients(ranks):
    ranks(2, _graph_of_backward)


def _saved_by_one(rank, world):
    """A sharded state dict communicates nothing, so one rank may take it alone; and a body of `gathered` goes on."""
    model, x = _sharded(reshard_after_forward=False), torch.ones(2, DIM)
    torch.manual_seed(0)
    whole = Net()
    for each in (model, whole):
        each(x).sum().backward()
    model.zero_grad()
    loss = model(x).sum()
    if rank == 0:
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loss.backward()
    for mine, theirs in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    with flatshard.gathered(model):
        if rank == 0:
            assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        assert not isinstance(model.first.weight, DTensor)
        torch.testing.assert_close(model(x), whole(x))
        with flatshard.gathered(model.first, write=True), torch.no_grad():
            model.first.weight.fill_(2.0)
        assert not isinstance(model.first.weight, DTensor)
        assert model.first.weight.eq(2.0).all()
    assert not _held(model)
    assert isinstance(model.first.weight, DTensor)


def test_one_rank_alone_takes_a_state_dict_between_passes_and_in_a_body(ranks):
    ranks(2, _saved_by_one)


def _frozen_while_shown(rank, world):
    """What users say of full parameters that are shown counts, also where `gathered` watches them from then on."""
    model = _sharded(reshard_after_forward=False)
    model(torch.ones(2, DIM))  # its graph is dropped, and the weights stay
    assert not isinstance(model.second.weight, DTensor)
    model.second.weight.requires_grad_(False)
    with flatshard.gathered(model):
        assert not model.second.weight.requires_grad
    model(torch.ones(2, DIM)).sum().backward()
    assert (model.second.weight.requires_grad, model.second.weight.grad) == (False, None)
    assert model.second.bias.grad is not None


def test_parameters_frozen_while_they_are_shown_stay_frozen(ranks):
    ranks(2, _frozen_while_shown)
