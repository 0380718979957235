"""When a unit's parameters are full, and what that costs: unshard, reshard and the setters around them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor, Shard

from flatshard import UnshardHandle, fully_shard
from flatshard.engine.units.unit import unit_of
from tests.fsdp2.cases import DEPTH, Chain, Launched, chain, check_grads, mine, reference_grads, rows, sharded_chain

UNITS = DEPTH + 1


def _warm(rank, world, model):
    for _ in range(2):
        model(mine(rank, world)).sum().backward()
        model.zero_grad()


def _is_full(module):
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _unshard(rank, world):
    model = sharded_chain(reshard_after_forward=False)
    _warm(rank, world, model)
    handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
    assert all(isinstance(handle, (UnshardHandle, TorchUnshardHandle)) for handle in handles)
    assert not _is_full(model.blocks[0])
    handles[1].wait()
    assert _is_full(model.blocks[0])
    with Launched(model) as launched:
        model(mine(rank, world)).sum().backward()  # waits for the others, and gathers nothing again
    assert (launched.gathers, launched.reduces) == (0, UNITS)
    check_grads(model, reference_grads(world))
    handles[1].wait()  # of a gather that has been given back: nothing to show
    assert not _is_full(model.blocks[0])
    assert model.blocks[0].unshard() is None
    assert _is_full(model.blocks[0])
    assert not _is_full(model.blocks[1])
    model.blocks[0].reshard()
    assert not _is_full(model.blocks[0])


def test_the_next_forward_uses_what_was_unsharded(ranks):
    ranks(2, _unshard)


def _after_backward(rank, world, reshard_after_forward):
    model = sharded_chain(reshard_after_forward=reshard_after_forward)
    _warm(rank, world, model)
    counts = []
    for number in range(3):
        last = number == 2
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        with Launched(model) as launched:
            model(mine(rank, world, number)).sum().backward()
        assert _is_full(model) is not last
        counts.append((launched.gathers, launched.reduces))
    per_pass = UNITS if reshard_after_forward else 0
    # The first forward gathers; later ones find what the backward before them has kept.
    assert counts == [(UNITS + per_pass, 0), (per_pass, 0), (per_pass, UNITS)]
    check_grads(model, reference_grads(world, (0, 1, 2)))
    model.set_reshard_after_backward(False, recurse=False)
    model(mine(rank, world)).sum().backward()
    assert not isinstance(model.head.weight, DTensor)
    assert not _is_full(model.blocks[0])
    model.reshard()
    model.set_reshard_after_backward(True)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_set_reshard_after_backward_keeps_weights_for_the_next_micro_batch(ranks, reshard_after_forward):
    ranks(2, _after_backward, reshard_after_forward)


def _keeps_storage(rank, world, choices):
    model = sharded_chain(**choices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _warm(rank, world, model)
    pool = unit_of(model).root.gather_pool
    before = pool.live_bytes
    model.set_keep_unsharded_storage(True)
    assert all(group.source.keeps_storage for unit in _units(copy.deepcopy(model)) for group in unit.groups)
    known = None
    for number in range(3):
        model(mine(rank, world, number)).sum().backward()
        assert not any(_is_full(module) for module in (model, *model.blocks))
        places = [p.full.data_ptr() for unit in _units(model) for group in unit.groups for p in group.params]
        assert 0 not in places
        assert known in (None, places)
        known = places
        optimizer.step()
        optimizer.zero_grad()
    reference = chain()
    stepped = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        (reference(rows(world, number)).sum() / world).backward()
        stepped.step()
        stepped.zero_grad()
    model(mine(rank, world)).sum().backward()
    (reference(rows(world)).sum() / world).backward()
    check_grads(model, {name: p.grad for name, p in reference.named_parameters()})
    model.double()  # another buffer: the old one is freed
    model.set_keep_unsharded_storage(False)
    model(mine(rank, world).double()).sum().backward()
    assert pool.live_bytes == before


def _units(model):
    return [unit_of(module) for module in (model, *model.blocks)]


def _last_dim(parameter):
    return Shard(parameter.dim() - 1)


@pytest.mark.parametrize("choices", [{}, {"layout": "auto"}, {"shard_placement_fn": _last_dim}])
def test_set_keep_unsharded_storage(ranks, choices):
    ranks(2, _keeps_storage, choices)


def _recovers(rank, world):
    model = sharded_chain()
    model.set_reshard_after_backward(False)
    model(mine(rank, world)).sum().backward()
    model.reset_iter_state()
    assert all(parameter.grad is None for parameter in model.parameters())  # of a step that is discarded
    assert not any(_is_full(module) for module in (model, *model.blocks))
    with pytest.raises(RuntimeError, match="not the root"):
        model.blocks[0].reset_iter_state()


def test_reset_iter_state_gives_back_what_was_kept(ranks):
    ranks(2, _recovers)


def _after_forward(rank, world):
    model = sharded_chain(reshard_after_forward=2)
    _warm(rank, world, model)
    for value in (0, 2, "no", None):
        with pytest.raises(ValueError, match="should be a bool"):
            model.set_reshard_after_forward(value)
    for value, recurse, gathers in ((False, True, UNITS), (True, False, UNITS + 1), (True, True, 2 * UNITS)):
        model.set_reshard_after_forward(value, recurse=recurse)
        with Launched(model) as launched:
            output = model(mine(rank, world))
            assert _is_full(model.blocks[0]) is not (value and recurse)
            output.sum().backward()
        assert launched.gathers == gathers, (value, recurse)
        assert unit_of(model).groups[0].post_forward_mesh is None  # True is the whole mesh, not the number given before


def test_set_reshard_after_forward(ranks):
    ranks(4, _after_forward)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def _not_in_backward(rank, world):
    torch.manual_seed(5)
    reference = Tokens()
    torch.manual_seed(5)
    model = Tokens()
    fully_shard(model.embed, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    tokens = torch.arange(8).view(4, 2)
    for value, gathers in ((True, 2), (False, 1)):
        model.embed.set_unshard_in_backward(value)
        for _ in range(2):
            output = model(tokens.chunk(world)[rank])
            with Launched(model) as launched:
                output.sum().backward()
        assert launched.gathers == gathers
        model.zero_grad()
    model(tokens.chunk(world)[rank]).sum().backward()
    (reference(tokens).sum() / world).backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), reference.embed.weight.grad)


def test_set_unshard_in_backward_gathers_nothing_for_an_embedding(ranks):
    ranks(2, _not_in_backward)


def _prefetch(rank, world):
    model = sharded_chain(reshard_after_forward=True)
    _warm(rank, world, model)
    seen = {}

    def look(phase, module, number):
        seen[phase, number] = [unit_of(block).is_gathered for block in model.blocks]

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, n=number: look("forward", module, n))
        block[2].register_full_backward_pre_hook(lambda module, grad, n=number: look("backward", module, n))
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])  # more than the schedule would gather at a time
    third.set_modules_to_backward_prefetch([second, first])
    model(mine(rank, world)).sum().backward()
    assert seen["forward", 0] == [True, True, True]
    assert seen["forward", 2] == [False, False, True]
    assert seen["backward", 2] == [True, True, True]
    check_grads(model, reference_grads(world))
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ValueError, match="Tanh"):
            getattr(first, method)([nn.Tanh()])


def test_explicit_prefetch(ranks):
    ranks(2, _prefetch)


def _parts(rank, world):
    """Two modules of one unit, the second called by itself, chunk by chunk, between a forward and its backward."""
    torch.manual_seed(1)
    reference = Chain()
    torch.manual_seed(1)
    model = Chain()
    for block in model.blocks[:2]:
        fully_shard(block)
    fully_shard([model.blocks[2], model.head])
    fully_shard(model)
    inputs = [mine(r, world) for r in range(world)]

    def body(net, x):
        for block in net.blocks:
            x = x + block(x)
        return x

    def by_chunks(net, x, run):
        hidden = run(net, x)
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
        for chunk in chunks:
            net.head(chunk).square().sum().backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))

    for x in inputs:
        by_chunks(reference, x, body)
    model.forward = lambda x: body(model, x)
    by_chunks(model, inputs[rank], lambda net, x: net(x))
    for (name, parameter), plain in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad / world, msg=lambda m, n=name: f"{n}: {m}")


def test_a_module_of_a_list_can_be_called_by_itself(ranks):
    ranks(2, _parts)


def _alone(rank, world):
    model = sharded_chain()
    model(mine(rank, world)).sum().backward()
    root = unit_of(model).root
    assert root.gather_lane.launched > 0
    group = root.gather_lane.group(unit_of(model).mesh, 0)
    assert root.reduce_lane.group(unit_of(model).mesh, 0) is group  # no communicator for one rank
    check_grads(model, reference_grads(world))


def test_one_rank_trains_like_many(ranks):
    ranks(1, _alone)
