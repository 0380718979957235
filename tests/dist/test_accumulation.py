"""Several backwards per optimizer step: with and without reduction, scoped by `microbatch`, at every gradient scale."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

from flatshard import fully_shard, fully_shard_optimizer, microbatch
from flatshard.engine.tree.build import units_below
from flatshard.engine.units.unit import unit_of
from flatshard.rehearsal import rehearse
from tests.dist.models import assert_rows, batches, make_net
from tests.dist.test_counts import DIM, Chain
from tests.dist.test_engine import ROWS, full, shard_net
from tests.dist.test_strategies import STRATEGIES, mesh_of, world_of

MICRO = 3
ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3)]  # block 1 is used by the first two micro-batches alone
LATE = [(0, 2, 3), (0, 1, 2, 3), (0, 2, 3)]  # by the second alone


def chain(case=None, world=1, **kwargs):
    torch.manual_seed(0)
    model = Chain()
    if case is not None:
        axes, strategy, outer = case
        kwargs = {"mesh": mesh_of(axes, world), "strategy": strategy, "outer_strategy": outer, **kwargs}
        for block in model.blocks:
            fully_shard(block, **kwargs)
        fully_shard(model, **kwargs)
    return model


class Say:
    """Ways to say which micro-batch it is."""

    @staticmethod
    def nothing(model, number):
        return microbatch(model)

    @staticmethod
    def root(model, number):
        return microbatch(model, is_first=number == 0, is_last=number == MICRO - 1)

    @staticmethod
    def sync(model, number):
        model.set_requires_gradient_sync(number == MICRO - 1)
        return microbatch(model)

    @staticmethod
    def sync_and_scope(model, number):
        """The first is kept whole, the second goes to rest, the third all the way."""
        model.set_requires_gradient_sync(number > 0)
        return Say.root(model, number)

    @staticmethod
    def rest_then_keep(model, number):
        model.set_requires_gradient_sync(number != 1)
        return Say.root(model, number)

    @staticmethod
    def some_units(model, number):
        model.blocks[1].set_requires_gradient_sync(number == MICRO - 1)
        return microbatch(model.blocks, is_first=number == 0, is_last=number == MICRO - 1)

    @staticmethod
    def all_reduce(model, number):
        model.set_requires_all_reduce(number == MICRO - 1)
        return microbatch(model, is_first=number == 0)


SAYINGS = ["nothing", "root", "sync", "sync_and_scope", "rest_then_keep", "some_units", "all_reduce"]


WAYS = [*((saying, ORDERS) for saying in SAYINGS), ("root", LATE), ("sync", LATE)]


def _accumulated(rank, world, case, layout, ways):
    for saying, orders in ways:
        _one_accumulation(rank, world, case, layout, saying, orders)


def _one_accumulation(rank, world, case, layout, saying, orders):
    model, reference = chain(case, world, layout=layout), chain()
    optimizers = [
        fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (model, reference)
    ]
    rng = torch.Generator().manual_seed(1)
    for step in range(2):
        for number in range(MICRO):
            rows = torch.randn(8, DIM, generator=rng)
            model.order = reference.order = orders[number]
            with getattr(Say, saying)(model, number):
                model(rows.chunk(world)[rank]).square().mean().backward()
            reference(rows).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.named_parameters()):
            what = f"{saying}, step {step}, {name}"
            assert_rows(ours.grad, theirs[1].grad, rtol=1e-4, atol=1e-6, msg=lambda m, w=what: f"{w}: {m}")
        assert not any(g.gradients.has_partial for _, u in units_below(model) for g in u.groups)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", STRATEGIES, ids=str)
def test_accumulated_gradients_equal_one_process_however_it_is_said(ranks, case):
    """Every way under three strategies; the full product has all under all."""
    number = STRATEGIES.index(case)
    ranks(world_of(case), _accumulated, case, ("tensor", "flat")[number % 2], WAYS[number % 3 :: 3])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize("case", STRATEGIES, ids=str)
def test_accumulated_gradients_equal_one_process_in_every_way_full(ranks, case, layout):
    ranks(world_of(case), _accumulated, case, layout, WAYS)


def _unused_by_all(rank, world, case):
    """A parameter that no micro-batch used has no gradient."""
    model = chain(case, world)
    model.order = (0, 2, 3)
    for number in range(MICRO):
        with Say.root(model, number):
            model(torch.ones(2, DIM)).sum().backward()
    assert all(parameter.grad is None for parameter in model.blocks[1].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[0].parameters())


def test_what_no_micro_batch_used_has_no_gradient(ranks):
    for case in STRATEGIES[1::3]:
        ranks(world_of(case), _unused_by_all, case)


def _no_last_backward(rank, world, case):
    """The last micro-batch goes through nothing that is trained, or through one of two roots: the rest is reduced."""
    model, reference = chain(case, world), chain()
    rows = [torch.randn(8, DIM, generator=torch.Generator().manual_seed(number)) for number in range(MICRO)]
    for number in range(MICRO):
        with Say.root(model, number):
            if number < MICRO - 1:
                model(rows[number].chunk(world)[rank]).square().mean().backward()
            else:
                with torch.no_grad():
                    model(rows[number].chunk(world)[rank])
    for number in range(MICRO - 1):
        reference(rows[number]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    counts = [op.kind for op in unit_of(model).root.reduce_lane.history]
    model.zero_grad()
    with microbatch(model):
        model(rows[0].chunk(world)[rank]).square().mean().backward()
    assert len(unit_of(model).root.reduce_lane.history) > len(counts)  # as ever, afterwards
    axes, strategy, outer = case
    kwargs = {"mesh": mesh_of(axes, world), "strategy": strategy, "outer_strategy": outer}
    torch.manual_seed(1)
    pair = Unwrapped()
    fully_shard(pair.one, **kwargs)
    fully_shard(pair.two, **kwargs)
    with microbatch(pair, is_last=False):
        pair(rows[0].chunk(world)[rank]).mean().backward()
    with microbatch(pair):
        pair.one(rows[1].chunk(world)[rank]).mean().backward()
    torch.manual_seed(1)
    plain = Unwrapped()
    plain(rows[0]).mean().backward()
    plain.one(rows[1]).mean().backward()
    for ours, theirs in zip(pair.parameters(), plain.parameters()):
        assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_last_micro_batch_without_backward_reduces_what_waits(ranks):
    for case in STRATEGIES:
        ranks(world_of(case), _no_last_backward, case)


def _in_flight(rank, world):
    """A reduce that rests may be on its way when the next one takes up what it has written."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    reference = copy.deepcopy(model)
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh_of(2, world))
    fully_shard(model, mesh=mesh_of(2, world))
    model[1].set_reduce_scatter_unused_params(True)  # then the root is reduced last, and first
    rows = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
    for number, batch in enumerate(rows):
        model.set_requires_all_reduce(number == 1)
        model.set_is_last_backward(number == 1)
        model(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_what_rests_is_waited_for(ranks):
    ranks(4, _in_flight)


class Unwrapped(nn.Module):
    """Not a unit; each of its children is, and a root of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def _scopes(rank, world):
    kwargs = {"mesh": mesh_of(2, world), "strategy": "optim"}
    torch.manual_seed(0)
    model, reference = Unwrapped(), Unwrapped()
    reference.load_state_dict(model.state_dict())
    for part in (*model.parameters(), *reference.parameters()):
        dist.broadcast(part.data, 0)
    fully_shard(model.two[0], **kwargs)
    for module in (model.one, model.two):
        fully_shard(module, **kwargs)
    optimizers = [fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, reference)]
    units = [unit for _, unit in units_below(model)]

    def flags():
        return [(unit.is_first, unit.is_last) for unit in units]

    counts = []
    for step in range(3):
        for number in range(MICRO):
            rows = torch.randn(8, DIM, generator=torch.Generator().manual_seed(10 * step + number))
            with microbatch(model, is_first=number == 0, is_last=number == MICRO - 1):
                model(rows.chunk(world)[rank]).mean().backward()
            reference(rows).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        roots = {id(unit.root): unit.root for unit in units}.values()
        counts.append([sum(op.name.startswith("refresh") for op in root.gather_lane.history) for root in roots])
    # persistent compute weights: refreshed once per step, and per unit
    assert counts == [[1, 2], [2, 4], [3, 6]]
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert_rows(ours, theirs.data, rtol=1e-4, atol=1e-6)
    # Nested: the inner one counts for what is below it, and what held before holds again.
    with microbatch(model, is_first=False, is_last=False):
        assert set(flags()) == {(False, False)}
        with microbatch(model.two, is_first=True, is_last=False), microbatch(model.two[0], is_last=True):
            assert flags() == [(False, False), (True, False), (True, True)]
        with pytest.raises(KeyError), microbatch(model.two, is_last=True):
            raise KeyError
        assert set(flags()) == {(False, False)}
    assert set(flags()) == {(True, True)}
    with pytest.raises(ValueError, match="no parameter of Linear is sharded"), microbatch(reference.one):
        pass
    with pytest.raises(TypeError, match="takes a module"), microbatch("model"):
        pass


def _first_used_later(rank, world, case):
    """One of two roots is not used by the first micro-batch: its weights are new all the same."""
    axes, strategy, outer = case
    kwargs = {"mesh": mesh_of(axes, world), "strategy": strategy, "outer_strategy": outer}
    torch.manual_seed(1)
    pair = Unwrapped()
    fully_shard(pair.one, **kwargs)
    fully_shard(pair.two, **kwargs)
    torch.manual_seed(1)
    models = [pair, Unwrapped()]
    optimizers = [fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.5)) for m in models]
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))
    for model, optimizer, rows in zip(models, optimizers, (x.chunk(world)[rank], x)):
        model(rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with microbatch(pair, is_last=False):
        pair.one(x)
    with microbatch(pair, is_first=False):
        torch.testing.assert_close(pair(x), models[1](x))


def test_weights_that_only_a_later_micro_batch_uses_are_refreshed(ranks):
    for case in STRATEGIES:
        ranks(world_of(case), _first_used_later, case)


def test_microbatch_nests_over_wrapped_and_unwrapped_parents(ranks):
    assert ranks(4, _scopes) == [None] * 4


def _scales(rank, world, cases, scale, ways):
    for case in cases:
        _scale(rank, world, case, scale, ways)


def _scale(rank, world, case, scale, ways):
    """Whole numbers add up without rounding, and the factors are powers of two: equal to the bit."""
    factor = {"mean": 1 / world, "sum": 1.0}.get(scale, scale)
    for saying, layout in ways:
        axes, strategy, outer = case
        mesh = mesh_of(axes, world) if world > 1 else None
        model, reference = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 4))
        for each in (model, reference):
            each[0].weight.data.copy_(torch.arange(-6.0, 6.0).reshape(4, 3))
            each[0].bias.data.zero_()
        outer = outer if world > 1 else None
        fully_shard(model, mesh=mesh, strategy=strategy, outer_strategy=outer, gradient_scale=scale, layout=layout)
        model.blocks = [model]
        for number in range(MICRO):
            data = (torch.arange(12.0 * world).reshape(4 * world, 3) + number) % 5
            with getattr(Say, saying)(model, number):
                model(data.chunk(world)[rank]).sum().backward()
            (reference(data).sum() * factor).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert_rows(ours.grad, theirs.grad, rtol=0, atol=0, msg=f"{saying}, {layout}")


SCALED = list(zip(SAYINGS[:4], ("flat", "tensor", "flat", "tensor")))


@pytest.mark.parametrize(
    ("scale", "ways"),
    [
        ("mean", SCALED[:2]),
        (0.125, SCALED[2:]),
        *(pytest.param(scale, SCALED, marks=pytest.mark.full) for scale in ("mean", 0.125, "sum", 2)),
    ],
)
def test_scales_are_exact_on_one_rank_and_on_every_mesh(ranks, scale, ways):
    ranks(1, _scales, STRATEGIES[:4], scale, ways)
    ranks(2, _scales, STRATEGIES[:4], scale, ways)
    ranks(4, _scales, STRATEGIES[4:], scale, ways)


def _per_token(rank, world, case):
    """A loss per token, with other numbers of tokens on every rank and in every micro-batch."""
    axes, strategy, outer = case
    net = make_net()
    model = shard_net(
        net, mesh=mesh_of(axes, world), strategy=strategy, outer_strategy=outer, gradient_scale="sum", layout="auto"
    )
    reference = make_net()
    for tokens in batches(2, ROWS):
        targets = tokens[:, 1:].clone()
        for row in range(len(targets)):
            targets[row, row * 7 % 6 :] = -1  # from no token at all to five
        mine, wanted = tokens[:, :-1].chunk(world)[rank], targets.chunk(world)[rank]
        count = (wanted >= 0).sum()
        counts = [torch.zeros_like(count) for _ in range(world)]
        dist.all_gather(counts, count)
        assert len({int(each) for each in counts}) > 1
        total = sum(counts)
        for number, (part, goal) in enumerate(zip(mine.tensor_split(MICRO), wanted.tensor_split(MICRO))):
            with microbatch(model, is_first=number == 0, is_last=number == MICRO - 1):
                logits = model(part).flatten(0, 1)
                (F.cross_entropy(logits, goal.flatten(), ignore_index=-1, reduction="sum") / total).backward()
        logits = reference(tokens[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits, targets.flatten(), ignore_index=-1).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("case", STRATEGIES[1::2], ids=str)
def test_a_loss_per_token_equals_one_process_with_uneven_token_counts(ranks, case):
    ranks(4, _per_token, case)


def _divide_factor(rank, world):
    model = fully_shard(nn.Linear(2, 2, bias=False))
    model.set_gradient_divide_factor(8.0)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(full(model.weight.grad), torch.full((2, 2), world / 8))
    for wrong in (0.0, float("nan"), "four"):
        with pytest.raises((ValueError, TypeError), match="factor"):
            model.set_gradient_divide_factor(wrong)
    assert unit_of(model).groups[0].gradients.scale == 0.125


def test_the_divide_factor_takes_the_place_of_the_mean(ranks):
    assert ranks(2, _divide_factor) == [None] * 2


def _read_between(rank, world, reads):
    """Whoever reads `.grad` after a micro-batch that is not the last sees what has been accumulated."""
    model, reference = chain(STRATEGIES[0], world, strategy=3), chain()
    for number in range(3):
        rows = torch.randn(8, DIM, generator=torch.Generator().manual_seed(number))
        with microbatch(model, is_first=number == 0, is_last=False):
            model(rows.chunk(world)[rank]).square().mean().backward()
        reference(rows).square().mean().backward()
        if number not in reads:
            continue
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]) for net in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])


@pytest.mark.parametrize("reads", [(0, 1, 2), (1,), (2,)])
def test_gradients_are_read_between_micro_batches(ranks, reads):
    ranks(2, _read_between, reads)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_zero_grad_of_an_optimizer_drops_an_accumulation_that_was_given_up(all_of_it):
    """If all parameters of a group are the optimizer's: others may still want the rest of it."""
    found = []
    with rehearse(2):
        for gives_up in (False, True):
            model, x = chain(), torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
            fully_shard(model, strategy=1)
            parameters = list(model.parameters())[: None if all_of_it else 2]
            optimizer = fully_shard_optimizer(torch.optim.SGD(parameters, lr=0.1))
            if gives_up:
                with microbatch(model, is_first=True, is_last=False):
                    model(x).sum().backward()
                optimizer.zero_grad()
            with microbatch(model, is_first=True, is_last=True):
                model(x).sum().backward()
            found.append(parameters[0].grad.to_local())
    assert torch.equal(*found) is all_of_it


def _saved_between(rank, world):
    """torch makes the state of a new optimizer by a step with zeros, and clears these."""
    found = []
    for saves in (False, True):
        model = fully_shard(chain())
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            for number in range(2):
                model.set_requires_gradient_sync(number == 1)
                model(x + number).square().mean().backward()
                if saves:
                    get_optimizer_state_dict(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.to_local().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_state_dicts_between_micro_batches_leave_their_gradients(ranks):
    ranks(2, _saved_between)


def test_zero_grad_of_an_optimizer_leaves_what_another_model_accumulates_while_it_is_frozen():
    """A discriminator is frozen while a generator is trained between its micro-batches."""
    found = []
    with rehearse(2):
        for clears in (False, True):
            model, other = (fully_shard(chain(), strategy=1) for _ in range(2))
            x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
            optimizer = fully_shard_optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
            with microbatch(model, is_last=False):
                model(x).square().mean().backward()
            model.requires_grad_(False)
            if clears:
                optimizer.zero_grad()
            model.requires_grad_(True)
            with microbatch(model, is_first=False):
                model(x).square().mean().backward()
            found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
    for expected, got in zip(*found):
        torch.testing.assert_close(got, expected)
