"""How models are trained in research: two of them, several forwards, losses over all ranks or over parameters."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatshard import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from tests.order.cases import DIM, Block, Chain, backward_of_all, compare, grads_of, make, rows, shard, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(60)]
LOOSE = {"rtol": 1e-3, "atol": 1e-4}


def _policy_and_reference(rank, world):
    """A trained model and a frozen one; two forwards before one backward."""
    ours, theirs = [shard(make()), shard(make())], [make(), make()]
    ours[1].requires_grad_(False)

    def loss(policy, frozen, who):
        with torch.no_grad():
            baseline = frozen(rows(who, 1))
        return (policy(rows(who)) - baseline).square().mean() + policy(rows(who, 2)).mean()

    for _ in range(2):
        loss(*ours, rank).backward()
        backward_of_all([loss(*theirs, who) for who in range(world)])
    compare(grads_of(ours[0]), grads_of(theirs[0]))


def _alternation(rank, world):
    """Two models, of which each trains on what the other makes."""

    def models():
        made = make(), make(Chain, 2)
        made[0].output = nn.Linear(DIM, DIM)
        return made

    torch.manual_seed(1)
    theirs = models()
    ours = copy.deepcopy(theirs)
    for model in ours:
        shard(model)
    optimizers = [[torch.optim.Adam(m.parameters(), lr=0.01) for m in pair] for pair in zip(ours, theirs)]

    def judged(generator, judge, who, number):
        fake = judge(generator(rows(who, 10 + number)).detach())
        return F.softplus(-judge(rows(who, number))).mean() + F.softplus(fake).mean()

    def fooled(generator, judge, who, number):
        return F.softplus(-judge(generator(rows(who, 10 + number)))).mean()

    for number in range(2):
        for loss, which in ((judged, 1), (fooled, 0)):
            loss(*ours, rank, number).backward()
            backward_of_all([loss(*theirs, who, number) for who in range(world)])
            for optimizer in optimizers[which]:
                optimizer.step()
            for optimizer in (each for pair in optimizers for each in pair):
                optimizer.zero_grad()
    for found, wanted in zip(ours, theirs):
        compare(weights_of(found), weights_of(wanted), **LOOSE)


def _contrast(rank, world):
    """Every rank's outputs against those of all ranks."""
    model, reference = shard(make()), make()
    output = model(rows(rank))
    targets = [torch.arange(3) + 3 * who for who in range(world)]
    F.cross_entropy(output @ torch.cat(all_gather(output)).t(), targets[rank]).backward()
    outputs = [reference(rows(who)) for who in range(world)]
    everything = torch.cat(outputs).t()
    backward_of_all([F.cross_entropy(outputs[who] @ everything, targets[who]) for who in range(world)])
    compare(grads_of(model), grads_of(reference))


def _size(model):
    squares = [parameter.square().sum() for parameter in model.parameters()]
    return 0.1 * sum(each.full_tensor() if isinstance(each, DTensor) else each for each in squares)


def _penalty_on_parameters(rank, world):
    """A loss on parameters, outside of any forward: with the rest, and by itself."""
    model, reference = shard(make()), make()
    (model(rows(rank)).square().mean() + _size(model)).backward()
    _size(model).backward()
    backward_of_all([reference(rows(who)).square().mean() + 2 * _size(reference) for who in range(world)])
    compare(grads_of(model), grads_of(reference))


def _penalty_before_the_forward(rank, world):
    """Its gradients come at the end of the backward, while reduces of the same parameters are in flight."""
    reference = make()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        for number in range(2):
            losses = [reference(rows(who, number)).square().mean() for who in range(world)]
            backward_of_all([_size(reference) + loss for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
    for in_backward in (False, True):
        model = shard(make(), reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fully_shard_optimizer(optimizer, in_backward=True) if in_backward else optimizer
        for _ in range(2):
            for number in range(2):
                with microbatch(model, is_first=number == 0, is_last=number == 1):
                    (_size(model) + model(rows(rank, number)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        compare(weights_of(model), weights_of(reference))


def _penalty_after_a_micro_batch(rank, world):
    """By itself, while reduces of the same parameters are in flight: only the last micro-batch waits for them."""
    model, reference = shard(make()), make()
    for number in range(2):
        with microbatch(model, is_first=number == 0, is_last=number == 1):
            model(rows(rank, number)).square().mean().backward()
            _size(model).backward()
        losses = [reference(rows(who, number)).square().mean() for who in range(world)]
        backward_of_all([loss + _size(reference) for loss in losses])
    compare(grads_of(model), grads_of(reference))


def _penalty_on_gradients(rank, world):
    """A backward through a backward."""
    model, reference = shard(make()), make()

    def loss(of, who):
        x = rows(who).requires_grad_()
        output = of(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (gradient.norm() - 1).square() + output.mean()

    for _ in range(2):
        loss(model, rank).backward()
        backward_of_all([loss(reference, who) for who in range(world)])
    compare(grads_of(model), grads_of(reference))


class _Descent(Block):
    """Goes down the gradient of an energy of its input, as implicit layers and models of forces do."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return x - 0.1 * gradient


class _Descents(Chain):
    def __init__(self, recomputes):
        super().__init__()
        self.blocks, self.recomputes = nn.ModuleList(_Descent() for _ in range(3)), recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.output(self.norm(x))


def _gradients_within_a_forward(rank, world):
    """The backward of a part of the unit, up to its input, while the forward of the unit is running.

    With checkpointing, this backward recomputes the forward that is running.
    """
    for recomputes, kwargs in itertools.product((False, True), ({}, {"reshard_after_forward": False})):
        model, reference = shard(make(_Descents, recomputes), **kwargs), make(_Descents, recomputes)
        for number in range(2):
            with torch.no_grad():
                model(rows(rank, number))
            model(rows(rank, number)).square().mean().backward()
            backward_of_all([reference(rows(who, number)).square().mean() for who in range(world)])
        compare(grads_of(model), grads_of(reference))


def _scaled(rank, world):
    """Float16 under a GradScaler; one step of three overflows and is left out."""
    model, reference = shard(make(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)), make()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(3):
        blow_up = 1e6 if number == 1 and rank == 0 else 1.0
        scaler.scale(model(rows(rank, number)).float().square().mean() * blow_up).backward()
        scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizers[0])
        scaler.update()
        if number != 1:
            backward_of_all([reference(rows(who, number)).square().mean() for who in range(world)])
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    compare(weights_of(model), weights_of(reference), rtol=1e-2, atol=1e-2)


def _whole_matrix_search(rank, world):
    """LBFGS, which asks for dot products over all parameters, works by DTensor's."""
    model, reference = shard(make()), make()
    for each in (model, reference):
        optimizer = torch.optim.LBFGS(each.parameters(), max_iter=3)

        def closure(each=each, optimizer=optimizer):
            optimizer.zero_grad()
            loss = each(rows(0)).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    compare(weights_of(model), weights_of(reference), **LOOSE)


def _factored(rank, world):
    """Adafactor asks rows and columns of whole matrices: it is refused on shards, and right where it is given those."""
    for strategy in (0, 1, 3):
        model, reference = shard(make(), strategy=strategy), make()
        optimizers = [torch.optim.Adafactor(each.parameters(), lr=0.05) for each in (model, reference)]
        model(rows(rank)).square().mean().backward()
        backward_of_all([reference(rows(r)).square().mean() for r in range(world)])
        if strategy:
            with pytest.raises(ValueError, match=r"Adafactor.*rows and columns.*whole=True"):
                optimizers[0].step()
            fully_shard_optimizer(optimizers[0], whole=True)
        for optimizer in optimizers:
            optimizer.step()
        compare(weights_of(model), weights_of(reference), **LOOSE)


class Tied(nn.Module):
    """A head tied to the embedding, each in a unit of its own; the loss calls the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return torch.tanh(self.body(self.embedding(tokens)))


def _head_of_another_unit(rank, world):
    model, reference = make(Tied), make(Tied)
    for module in (model.embedding, model.body, model.head, model):
        fully_shard(module)
    batches = [torch.arange(6).view(2, 3) + who for who in range(world)]
    for _ in range(2):
        hidden = model(batches[rank])
        model.head.unshard()
        model.head(hidden).square().mean().backward()
        backward_of_all([reference.head(reference(batch)).square().mean() for batch in batches])
    compare(grads_of(model), grads_of(reference))
    dist.barrier()


@pytest.mark.parametrize(
    "pattern",
    [
        _policy_and_reference,
        _alternation,
        _contrast,
        _penalty_on_parameters,
        _penalty_before_the_forward,
        _penalty_after_a_micro_batch,
        _penalty_on_gradients,
        _gradients_within_a_forward,
        _scaled,
        _whole_matrix_search,
        _factored,
        _head_of_another_unit,
    ],
    ids=lambda pattern: pattern.__name__.strip("_"),
)
def test_a_pattern_equals_one_process(interpreters, pattern):
    interpreters(2, pattern)
