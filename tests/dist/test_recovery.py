"""A step that an exception breaks off, under every strategy: the next one equals a run without it, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from flatshard import fully_shard, fully_shard_optimizer, gathered, microbatch
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import Phase, unit_of
from flatshard.rehearsal import rehearse
from tests.dist.models import batches, loss_of, make_net
from tests.dist.test_errors import Bomb
from tests.dist.test_moved import KINDS, sharded
from tests.dist.test_strategies import world_of


class Oops(Exception):
    pass


def oops(*_):
    raise Oops("of the user")


def at_rest(model):
    """Nothing is gathered beyond what rests whole, nothing is on its way, nothing unreduced is left."""
    root = unit_of(model).root
    assert (root.gather_pool.live_bytes, root.gather_pool.live_buffers) == (0, 0)
    assert not root.reduces.in_flight
    assert root.program.running is None
    for _, unit in units_below(model):
        assert unit.phase is Phase.RESTING
        for group in unit.groups:
            assert not group.is_full
            assert not group.gradients.waiting
            assert not group.gradients.has_partial
            assert group.source.is_resident or group.ticket is None


def bomb(module, args, output):
    return Bomb.apply(output)


def tensor_hook(module, args, output):
    output.register_hook(oops)


# where: a way to break the step, and the module it is put on
WAYS = {
    "forward of a unit": ("blocks.1", lambda m: m.register_forward_hook(oops)),
    "before a unit": ("blocks.1", lambda m: m.register_forward_pre_hook(oops)),
    "forward inside a unit": ("blocks.2.down", lambda m: m.register_forward_hook(oops)),
    "forward of the root": ("norm", lambda m: m.register_forward_hook(oops)),
    "after the root": ("", lambda m: m.register_forward_hook(oops)),
    "backward inside a unit": ("blocks.1.up", lambda m: m.register_forward_hook(bomb)),
    "backward of the root": ("norm", lambda m: m.register_forward_hook(bomb)),
    "hook of a tensor": ("blocks.0", lambda m: m.register_forward_hook(tensor_hook)),
    "backward hook of a module": ("blocks.1.norm", lambda m: m.register_full_backward_hook(oops)),
}


def train(model, rank, world, interrupted=None, reset=False):
    """Three steps of two micro-batches. The second micro-batch of the second step raises; then the step is redone."""
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, tokens in enumerate(batches(3, 4 * world)):
        for redone in (False, True) if interrupted and step == 1 else (True,):
            for number, part in enumerate(tokens.chunk(world)[rank].chunk(2)):
                with microbatch(model, is_first=number == 0, is_last=number == 1):
                    if redone or number == 0:
                        loss_of(model, part).backward()
                        continue
                    at, put = WAYS[interrupted]
                    handle = put(model.get_submodule(at))
                    with pytest.raises((Oops, ValueError), match=r"of the user|in backward") as caught:
                        loss_of(model, part).backward()
                    assert caught.value.__cause__ is None
                    del caught  # its traceback holds a graph, and that graph might still have its backward
                    handle.remove()
            if not redone:
                assert all(unit.is_first and unit.is_last for _, unit in units_below(model))
                if reset:
                    model.reset()
                model.zero_grad()
                if reset:
                    at_rest(model)
        optimizer.step()
        optimizer.zero_grad()
        at_rest(model)
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def _interrupted(rank, world, kind, recompute, ways):
    clean = train(sharded(world, kind, make_net(recompute=recompute)), rank, world)
    for number, way in enumerate(ways):
        if recompute and "hook" in way:
            continue  # checkpointing runs without the outputs that these hooks are put on
        model = sharded(world, kind, make_net(recompute=recompute))
        for found, wanted in zip(train(model, rank, world, way, reset=number % 2 == 0), clean):
            assert torch.equal(found, wanted), way


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_step_after_an_exception_equals_a_clean_one(ranks, kind):
    """Every way under one of the kinds, or two; the full product has all under all."""
    number = KINDS.index(kind)
    recompute = {3: "reentrant", 4: "non-reentrant"}.get(number)
    ways = list(WAYS)[number % 3 :: 3]
    ranks(world_of(kind), _interrupted, kind, recompute, ways[1:] if number < 3 else ways[::2])


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_step_after_any_exception_equals_a_clean_one_full(ranks, kind, recompute):
    ranks(world_of(kind), _interrupted, kind, recompute, list(WAYS))


def _another_backward(rank, world, kind):
    """Two forwards; the backward of one raises, that of the other follows without a forward between them."""
    clean, model = sharded(world, kind), sharded(world, kind)
    first, second = (tokens.chunk(world)[rank] for tokens in batches(2, 4 * world))
    loss_of(clean, second).backward()
    for _ in range(2):
        losses = [loss_of(model, first), loss_of(model, second)]
        handle = losses[0].grad_fn.register_prehook(oops)
        with pytest.raises(Oops):
            losses[0].backward()
        handle.remove()
        norm = model.norm.register_forward_hook(bomb)
        losses[0] = loss_of(model, first)
        norm.remove()
        with pytest.raises(ValueError, match="in backward"):
            losses[0].backward()
        model.zero_grad()
        losses[1].backward()
        for ours, theirs in zip(model.parameters(), clean.parameters()):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
        at_rest(model)
        model.zero_grad()


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_a_backward_after_one_that_raised_is_reduced_and_ended(ranks, kind):
    ranks(world_of(kind), _another_backward, kind)


def _outside(rank, world, kind):
    """The exception is the caller's own, between micro-batches: zero_grad on the model forgets the first one's."""
    clean, model = sharded(world, kind), sharded(world, kind)
    parts = [tokens.chunk(world)[rank] for tokens in batches(3, 4 * world)]
    with microbatch(model, is_last=False):
        loss_of(model, parts[0]).backward()
    model.zero_grad()
    for each in (clean, model):
        for number, part in enumerate(parts[1:]):
            with microbatch(each, is_first=number == 0, is_last=number == 1):
                loss_of(each, part).backward()
    for ours, theirs in zip(model.parameters(), clean.parameters()):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    at_rest(model)


def test_zero_grad_forgets_micro_batches_that_wait(ranks):
    for kind in KINDS[1:]:
        ranks(world_of(kind), _outside, kind)


def _between(rank, world, kind):
    """A forward raises between another and its backward; a rank may be alone with it, in a body of `gathered`."""
    clean, model = sharded(world, kind), sharded(world, kind)
    for number, tokens in enumerate(batches(3, 4 * world)):
        part = tokens.chunk(world)[rank]
        loss_of(clean, part).backward()
        loss = loss_of(model, part)
        handle = model.norm.register_forward_pre_hook(oops)
        with gathered(model) if number else nullcontext():
            if number != 1 or rank == 0:
                with pytest.raises(Oops):
                    loss_of(model, part)
        handle.remove()
        loss.backward()
        for ours, theirs in zip(model.parameters(), clean.parameters()):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
        at_rest(model)
        for each in (clean, model):
            each.zero_grad()


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_a_backward_after_another_forward_that_raised_is_a_clean_one(ranks, kind):
    ranks(world_of(kind), _between, kind)


class Scaled(nn.Linear):
    """Raises in its backward if told to; its scale may be left out."""

    fails = False

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, scales=True):
        if self.fails:
            x.register_hook(oops)
        return super().forward(x) * (self.scale if scales else 1.0)


def _to_none(model, optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = None


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": _to_none,
}


def _cleared(rank, world, clear, is_broken):
    """Gradients are cleared while the reduce of some is on its way, of which this rank may not have used all."""
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), Scaled())
    for module in (model[1], model[2], model):
        fully_shard(module)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x, found = torch.full((2, 4), rank + 1.0), []
    for waits in (False, True):
        if waits:
            model[1].fails = is_broken
            with pytest.raises(Oops) if is_broken else nullcontext(), microbatch(model, is_last=is_broken):
                model[2](model[1](model[0](x)), scales=rank == 0).sum().backward()
            model[1].fails = False
            CLEARS[clear](model, optimizer)
        model(x).sum().backward()
        found.append([parameter.grad.full_tensor() for parameter in parameters])
        model.zero_grad()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("is_broken", [True, False])
def test_gradients_that_are_cleared_on_their_way_do_not_come_back(ranks, clear, is_broken):
    ranks(2, _cleared, clear, is_broken)


def test_a_model_is_converted_after_a_backward_that_raised():
    """Although its loss, and so its graph, still exists."""
    with rehearse(2):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        hidden = []
        model[0].register_forward_hook(lambda module, args, output: hidden.append(output))
        loss = model(torch.randn(2, 4)).sum()
        hidden.pop().register_hook(oops)
        with pytest.raises(Oops):
            loss.backward()
        model.double()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
