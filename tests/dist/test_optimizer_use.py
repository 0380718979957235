"""fully_shard_optimizer beside all else that touches optimizers: schedulers, scalers, closures, old ones."""

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from flatshard import fully_shard, fully_shard_optimizer
from flatshard.optim.step import replace_parameters
from tests.dist.models import batches, loss_of, make_net
from tests.dist.test_optimizer import Gated, assert_same, by_attribute, one_step, ready, same_state_dict, shard, weights

ROWS = 12


def pair(make, **kwargs):
    """The same model twice with the same optimizer, the second one wrapped."""
    models = [shard(Gated(), **kwargs), shard(Gated(), **kwargs)]
    optimizers = [make(by_attribute(model)) for model in models]
    fully_shard_optimizer(optimizers[1])
    return models, optimizers


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def _schedulers(rank, world):
    models = [shard(Gated()) for _ in range(3)]
    optimizers = [adamw(by_attribute(model)) for model in models]
    make = torch.optim.lr_scheduler.StepLR
    early = make(optimizers[1], 1, 0.5)  # made before the optimizer is wrapped: it has patched `step`
    fully_shard_optimizer(optimizers[1])
    fully_shard_optimizer(optimizers[2])
    schedulers = [make(optimizers[0], 1, 0.5), early, make(optimizers[2], 1, 0.5)]
    called = []
    optimizers[2].register_step_pre_hook(lambda o, *_: called.append(o.param_groups[0]["params"][0]))
    optimizers[2].register_step_post_hook(lambda o, *_: called.append(o.param_groups[0]["params"][0]))
    for tokens in batches(3, ROWS):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers):
            one_step(model, optimizer, tokens.chunk(world)[rank])
            scheduler.step()
    assert all(isinstance(p, DTensor) for p in called)  # hooks see the optimizer as it is from outside
    assert len(called) == 6
    assert_same(weights(models[1]), weights(models[0]))
    assert_same(weights(models[2]), weights(models[0]))
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


@pytest.mark.filterwarnings("error:.*lr_scheduler.*")
def test_schedulers_and_hooks(ranks):
    ranks(2, _schedulers)


def _closure_and_scaler(rank, world):
    models, optimizers = pair(adamw)
    stream = list(batches(2, ROWS))
    for model, optimizer in zip(models, optimizers):
        for tokens in stream:
            calls = []

            def closure(model=model, optimizer=optimizer, tokens=tokens, calls=calls):
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = loss_of(model, tokens.chunk(world)[rank])
                loss.backward()
                return loss

            with torch.no_grad():
                loss = optimizer.step(closure)
            assert calls == [True]
            assert isinstance(loss, torch.Tensor)
    assert_same(weights(models[0]), weights(models[1]))
    for fused, layout in ((None, "tensor"), (True, "tensor"), (None, "flat"), (True, "flat")):
        models, optimizers = pair(
            lambda params, fused=fused: torch.optim.AdamW(params, lr=1e-2, fused=fused), layout=layout
        )
        for model, optimizer in zip(models, optimizers):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for number, tokens in enumerate(stream):
                scaler.scale(loss_of(model, tokens.chunk(world)[rank])).backward()
                before = weights(model)
                if number == 1 and rank == 1:
                    model.net.blocks[0].up.weight.grad.to_local()[0, 0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                moved = not torch.equal(weights(model)["net.head.weight"], before["net.head.weight"])
                assert moved == (number == 0)  # an infinity on one rank holds the step on all of them
            assert scaler.get_scale() == 128.0
        assert_same(weights(models[0]), weights(models[1]))


def test_closures_and_gradient_scalers(ranks):
    ranks(2, _closure_and_scaler)


def _groups_come_and_go(rank, world):
    """add_param_group, several optimizers on one group, unfreezing."""
    results = []
    for wrap in (False, True):
        model = shard(Gated())
        everything = [p for p in model.parameters() if p.requires_grad]
        late = [p for p in everything if p.no_decay][:3]
        first = torch.optim.SGD([p for p in everything if not p.no_decay], lr=0.1, momentum=0.9)
        second = adamw([p for p in everything if p.no_decay][3:])
        if wrap:
            fully_shard_optimizer(first), fully_shard_optimizer(second)
        for number, tokens in enumerate(batches(5, ROWS)):
            if number == 2:
                second.add_param_group({"params": late, "lr": 1e-3})
            if number == 3:
                model.frozen.requires_grad_(True)
                first.add_param_group({"params": list(model.frozen.parameters())})
            loss_of(model, tokens.chunk(world)[rank]).backward()
            for optimizer in (first, second):
                optimizer.step()
            first.zero_grad(), second.zero_grad(set_to_none=False)
        results.append((weights(model), first.state_dict(), second.state_dict(), repr(second).count("Group")))
    assert_same(results[0][0], results[1][0])
    same_state_dict(results[1][1], results[0][1])
    same_state_dict(results[1][2], results[0][2])
    assert results[0][3] == results[1][3]


def test_groups_are_added_and_optimizers_share_a_model(ranks):
    ranks(2, _groups_come_and_go)


def _moved(rank, world):
    """`.to` moves main weights into other buffers; the next step finds them."""
    model, optimizer = ready(rank, world, steps=2)
    model.double()
    optimizer.load_state_dict(optimizer.state_dict())  # casts the state, as torch does
    before = weights(model)
    one_step(model, optimizer, next(batches(1, ROWS)).chunk(world)[rank])
    assert next(model.parameters()).dtype == torch.float64
    moved = [n for n, p in weights(model).items() if not torch.equal(p, before[n])]
    assert len(moved) == sum(p.requires_grad for p in model.parameters())
    assert all(e["exp_avg"].dtype == torch.float64 for e in optimizer.state.values())


def test_parameters_that_were_moved_are_found(ranks):
    ranks(2, _moved)


def _without_grad(rank, world):
    """PITFALL 10: making state by a step on nothing moves no weight; torch's own way of it leaves equal state."""
    models, optimizers = pair(adamw)
    before = weights(models[1])
    optimizers[1].step()
    assert not optimizers[1].state
    states = [get_optimizer_state_dict(m, o) for m, o in zip(models, optimizers)]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    assert_same(weights(models[1]), before, rtol=0, atol=0)
    for tokens in batches(2, ROWS):
        for model, optimizer in zip(models, optimizers):
            one_step(model, optimizer, tokens.chunk(world)[rank])
    assert_same(weights(models[0]), weights(models[1]))
    same_state_dict(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_no_fake_step_moves_weights(ranks):
    ranks(2, _without_grad)


def _tied(rank, world):
    """PITFALL 15: a weight registered twice is updated once."""
    results = []
    for make in (lambda net: net, fully_shard):
        net = make_net(depth=1)
        net.head.weight = net.embed.weight
        net = make(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if make is fully_shard:
            fully_shard_optimizer(optimizer)
            assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))
        for tokens in batches(3, ROWS):
            loss_of(net, tokens if make is not fully_shard else tokens.chunk(world)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(net))
    assert_same(results[1], results[0], rtol=1e-3, atol=1e-5)


def test_tied_weights_are_updated_once(ranks):
    ranks(2, _tied)


def _memory(rank, world):
    """Gradients are freed by zero_grad, the model by del: the optimizer's side holds neither."""
    model, optimizer = ready(rank, world, steps=2)
    loss_of(model, next(batches(1, ROWS)).chunk(world)[rank]).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    buffers = [weakref.ref(grad._flatshard_main_grad.local) for grad in grads]
    del grads
    gc.disable()
    optimizer.step()
    assert buffers
    assert all(buffer() is not None for buffer in buffers)
    optimizer.zero_grad()
    assert not any(buffer() is not None for buffer in buffers)
    known = weakref.ref(optimizer)
    del optimizer
    assert known() is None
    gc.enable()


def _given(rank, world):
    """A gradient that the user gives a parameter after `zero_grad` has freed all others joins the next backward."""
    model, optimizer = ready(rank, world, steps=2)
    batch = next(batches(1, ROWS)).chunk(world)[rank]
    loss_of(model, batch).backward()
    wanted = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
    optimizer.zero_grad()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    loss_of(model, batch).backward()
    for number, (parameter, grad) in enumerate(zip(model.parameters(), wanted)):
        if grad is not None:
            torch.testing.assert_close(parameter.grad.to_local(), grad + (number == 0))


def test_a_gradient_given_after_zero_grad_is_added_to(ranks):
    ranks(2, _given)


def test_gradients_and_optimizers_are_freed_at_once(ranks):
    ranks(2, _memory)


def _copied(rank, world, make):
    model = shard(Gated())
    optimizer = fully_shard_optimizer(make(by_attribute(model)))
    first, *others = (tokens.chunk(world)[rank] for tokens in batches(3, ROWS))
    one_step(model, optimizer, first)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    assert fully_shard_optimizer(optimizer_copy) is optimizer_copy
    assert type(optimizer_copy) is type(optimizer)
    for tokens in others:
        one_step(model, optimizer, tokens)
        one_step(model_copy, optimizer_copy, tokens)
    assert_same(weights(model_copy), weights(model))


@pytest.mark.parametrize("make", [adamw, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_copies_of_model_and_optimizer_go_on(ranks, make):
    ranks(2, _copied, make)


class Averaging(torch.optim.SGD):
    """Has an attribute and a method of names that a class put before it might use."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.kind = "averaging"

    def original(self):
        return self.kind


def test_names_of_a_users_class_stay_its_own():
    before = {name for name in dir(Averaging) if not name.startswith("_")}
    optimizer = fully_shard_optimizer(Averaging([nn.Parameter(torch.ones(2))], lr=0.1))
    assert optimizer.original() == "averaging"
    assert {name for name in dir(type(optimizer)) if not name.startswith("_")} == before | {"state"}


def _before_sharding(rank, world):
    one, net = make_net(depth=1), make_net(depth=1)
    old = adamw(net.parameters())
    reference = adamw(one.parameters())
    stream = list(batches(4, ROWS))
    for tokens in stream[:2]:
        for model, optimizer in ((net, old), (one, reference)):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    fully_shard(net)
    for attempt in (old.step, lambda: fully_shard_optimizer(old)):
        with pytest.raises(RuntimeError, match=r"before fully_shard.*Build the optimizer after"):
            attempt()
    replace_parameters(old)
    for wrap in (False, True):
        if wrap:
            fully_shard_optimizer(old)
        tokens = stream[2 + wrap]
        loss_of(net, tokens.chunk(world)[rank]).backward()
        loss_of(one, tokens).backward()
        for optimizer in (old, reference):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights(net), weights(one), rtol=2e-3, atol=2e-4)
    assert {e["step"].item() for e in old.state.values()} == {4.0}
    assert len(old.state) == len(list(net.parameters()))


def test_an_optimizer_from_before_sharding_raises_and_can_be_repointed(ranks):
    ranks(2, _before_sharding)


def test_other_options_in_a_second_call_are_refused():
    layer = nn.Linear(3, 3)
    optimizer = fully_shard_optimizer(adamw(layer.parameters()), offload_state=False)
    for same in ({}, {"precision_aware": True}, {"offload_state": False}):
        assert fully_shard_optimizer(optimizer, **same) is optimizer
    others = {"in_backward": True, "offload_state": True, "whole": True}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"called on this AdamW before, with another `?{name}.*; build a new"):
            fully_shard_optimizer(optimizer, **{name: value})
    early = fully_shard_optimizer(adamw(layer.parameters()), in_backward=True)
    assert fully_shard_optimizer(early) is early
    whole = fully_shard_optimizer(adamw(layer.parameters()), whole=True, owners="all")
    assert fully_shard_optimizer(whole, whole=True, owners="all") is whole
    for other in ({}, {"whole": True}):
        with pytest.raises(ValueError, match="with another `whole`, or options of it"):
            fully_shard_optimizer(whole, **other)


def test_what_needs_more_than_elements_is_refused():
    module = nn.Linear(3, 3)
    for make, words in (
        (torch.optim.LBFGS, "several times"),
        (torch.optim.SparseAdam, "dense"),
        (torch.optim.Adafactor, "rows and columns"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
    ):
        with pytest.raises(ValueError, match=words):
            fully_shard_optimizer(make([p for p in module.parameters() if p.dim() == 2]))
    patched = adamw(module.parameters())
    patched.step = lambda: None
    with pytest.raises(ValueError, match="replaced on the instance"):
        fully_shard_optimizer(patched)
    with pytest.raises(TypeError, match="Linear"):
        fully_shard_optimizer(module)
    plain = fully_shard_optimizer(adamw(module.parameters()))  # nothing is sharded: the step as it was
    module(torch.ones(2, 3)).sum().backward()
    plain.step()
    assert plain.state[module.weight]["step"].item() == 1


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base, nn.Linear(8, 8)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def _put_in_later(rank, world, how):
    """What an optimizer warns of whose model was given an adapter after it was sharded."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if how == "ignored":
        model[1] = Adapted(model[1])
        fully_shard(model, ignored_params=set(model[1].adapter.parameters()))
    else:
        fully_shard(model)
        model[1] = Adapted(model[1])
    if how == "sharded":
        fully_shard(model[1].adapter)
    optimizer = torch.optim.AdamW(model.parameters())
    told = []
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told.append([str(each.message) for each in caught])
    return told


@pytest.mark.parametrize("how", ["plain", "sharded", "ignored"])
def test_parameters_that_no_unit_owns_are_named_once(ranks, how):
    for first, second in ranks(2, _put_in_later, how):
        assert second == []
        assert len(first) == (how == "plain")
        assert how != "plain" or "parameter '1.adapter.weight' of unit 'FSDPSequential' and 1 more" in first[0]
