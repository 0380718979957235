"""What users do to a sharded model, under every strategy: freeze, cast, move, assign. Absorbed, or refused."""

import pytest
import torch
from torch import nn

import flatshard
from flatshard import fully_shard, fully_shard_optimizer, microbatch
from tests.dist.models import assert_rows, batches, loss_of, make_net
from tests.dist.test_engine import ROWS, full, shard_net
from tests.dist.test_strategies import mesh_of, world_of

# axes, strategy, outer strategy, layout
KINDS = [
    (1, "no_shard", None, "tensor"),
    (1, "optim", None, "flat"),
    (1, "optim_grads", None, "tensor"),
    (1, "optim_grads_params", None, "flat"),
    (2, "optim_grads_params", "no_shard", "flat"),
    (2, "optim_grads_params", "optim", "tensor"),
]


def sharded(world, kind, net=None, **kwargs):
    axes, strategy, outer, layout = kind
    mesh = mesh_of(axes, world)
    net = make_net() if net is None else net
    return shard_net(net, mesh=mesh, strategy=strategy, outer_strategy=outer, layout=layout, **kwargs)


def compare(model, reference, what="", **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        assert (ours.grad is None) == (theirs.grad is None), f"{what}: gradient of {name} is {ours.grad}"
        assert_rows(ours.detach(), theirs.data, **tolerance, msg=lambda m, n=name: f"{what} {n}: {m}")
        if ours.grad is not None:
            assert_rows(ours.grad, theirs.grad, **tolerance, msg=lambda m, n=name: f"{what} gradient of {n}: {m}")


def backward(models, rank, world, tokens, parts=1):
    for model, part in zip(models, (tokens.chunk(world)[rank], tokens)):
        (loss_of(model, part) / parts).backward()


def step(models, optimizers):
    for model, optimizer in zip(models, optimizers):
        optimizer.step()
        model.zero_grad()


def sgd(models):
    return [fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) for model in models]


def _toggled(rank, world, kind):
    models = [sharded(world, kind), make_net()]

    def toggle(trainable, *names):
        for model in models:
            for name in names:
                model.get_parameter(name).requires_grad_(trainable)

    toggle(False, "blocks.0.up.weight", "head.weight")  # before the first forward
    optimizers = sgd(models)
    data = batches(7, ROWS)
    backward(models, rank, world, next(data))
    compare(*models, "frozen before the first step")
    step(models, optimizers)
    toggle(True, "blocks.0.up.weight", "head.weight")
    toggle(False, "blocks.1.down.weight", "blocks.2.scale", "embed.weight")
    backward(models, rank, world, next(data))
    compare(*models, "others frozen")
    step(models, optimizers)
    for model in models:  # everything, and back
        model.requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(models[0], tokens := next(data)), loss_of(models[1], tokens))
    for model in models:
        model.requires_grad_(True)
    # between micro-batches: the gradient of the first stays, as on one process
    tokens = next(data)
    for number in range(2):
        with microbatch(models[0], is_first=number == 0, is_last=number == 1):
            backward(models, rank, world, tokens, parts=2)
        toggle(number == 1, "blocks.0.up.weight", "norm.weight")
        toggle(number == 0, "blocks.1.norm.bias")
    compare(*models, "toggled between micro-batches")
    step(models, optimizers)
    # between a forward and its backward, while the root shows full parameters: counts from the next forward on
    losses = [loss_of(model, part) for model, part in zip(models, (tokens.chunk(world)[rank], tokens))]
    toggle(False, "head.weight")
    toggle(False, "blocks.0.up.bias")
    for model, loss in zip(models, losses):
        del loss
        model.zero_grad()
    del losses
    backward(models, rank, world, next(data))
    compare(*models, "frozen while gathered")
    assert models[0].head.weight.grad is None
    step(models, optimizers)
    flatshard.check_buffers(models[0])


def some(chosen):
    """The others are left to the full product."""
    return [kind if kind in chosen else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]


@pytest.mark.parametrize("kind", some(KINDS[1::2]), ids=str)
def test_requires_grad_can_be_toggled_at_any_time(ranks, kind):
    ranks(world_of(kind), _toggled, kind)


def _converted(rank, world, kind, hows):
    for how in hows:
        _converted_in_one_way(rank, world, kind, how)


def _converted_in_one_way(rank, world, kind, how):
    models = [sharded(world, kind), make_net()]
    for number, parameter in enumerate(models[0].parameters()):
        parameter.number = number
    held = list(models[0].parameters())
    data = batches(4, ROWS)
    backward(models, rank, world, next(data))
    step(models, sgd(models))
    backward(models, rank, world, next(data))  # gradients are there when the parameters are replaced
    for model in models:
        if how == "double":
            model.double()
        elif how == "part":
            model.blocks[1].double().float()
            model.head.double().float()  # no unit of its own: the root finds out
            model.head.to(torch.float32)
        elif how == "nothing":
            model.float().to("cpu")
        elif how == "assign":
            state = {name: value.detach().clone() for name, value in model.state_dict().items()}
            for value in state.values():
                value.mul_(0.5)
            model.load_state_dict(state, assign=True)
            model.zero_grad()  # on one process, gradients stay with the parameters that were replaced
    if how != "assign":
        compare(*models, "after the call")
    backward(models, rank, world, next(data))
    flatshard.check_buffers(models[0])
    assert all(new is old for new, old in zip(models[0].parameters(), held))
    assert [parameter.number for parameter in models[0].parameters()] == list(range(len(held)))
    compare(*models, "gradients after it")
    step(models, sgd(models))
    with microbatch(models[0], is_first=False):
        if how == "double":
            models[0].float()
            models[1].float()
        backward(models, rank, world, next(data))
    if how == "double":
        compare(*models, "and back")


HOWS = ("double", "nothing", "part", "assign")


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_conversions_keep_identity_values_gradients_and_attributes(ranks, kind):
    ranks(world_of(kind), _converted, kind, HOWS[KINDS.index(kind) % 2 :: 2])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_conversions_keep_identity_values_gradients_and_attributes_full(ranks, kind):
    ranks(world_of(kind), _converted, kind, HOWS)


class Pair(nn.Module):
    """Two layers in one group, and one that the user may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def _unchanged(model, call, kind, match):
    """``call`` is refused, and the model trains as before."""
    before = {name: full(value).clone() for name, value in model.named_parameters()}
    held = list(model.parameters())
    with pytest.raises(kind, match=match):
        call()
    flatshard.check_buffers(model)
    assert all(new is old for new, old in zip(model.parameters(), held))
    assert all(torch.equal(full(value), before[name]) for name, value in model.named_parameters())
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def _refused(rank, world, layout, strategy):
    mesh = mesh_of(1, world)
    model = fully_shard(Pair(), mesh=mesh, layout=layout, strategy=strategy)
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    _unchanged(model, lambda: model.to("meta"), ValueError, "moved to meta, but its mesh is on cpu")
    _unchanged(model, lambda: model.to_empty(device="meta"), ValueError, "moved to meta")
    other = fully_shard(Pair(), mesh=mesh, layout="flat" if layout == "tensor" else "tensor").state_dict()
    if world > 1 and strategy != "no_shard":
        _unchanged(model, lambda: model.load_state_dict(other, assign=True), ValueError, "sharded in the same way")
    whole = fully_shard(Pair(), mesh=mesh, strategy="no_shard").state_dict()
    if world > 1 and strategy != "no_shard":
        _unchanged(model, lambda: model.load_state_dict(whole, assign=True), ValueError, "sharded in the same way")

    def replace():
        model.two.weight = nn.Parameter(torch.zeros(3, 5))
        model(torch.ones(2, 3))

    _unchanged(model, replace, ValueError, r"'two\.weight' was replaced by a Parameter of shape \(3, 5\)")

    def remove():
        model.one.bias = None
        model(torch.ones(2, 3))

    _unchanged(model, remove, ValueError, r"'one\.bias' was removed")
    output = model(torch.ones(2, 3)).sum()
    with pytest.raises(RuntimeError, match=r"between a forward and its backward.*reset\(\)"):
        model.double()
    model.float()  # changes nothing
    output.backward()
    model.zero_grad()
    model(torch.ones(2, 3))
    model.reset()
    model.double().float()
    if strategy in ("no_shard", "optim"):
        with microbatch(model, is_last=False):
            model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"earlier micro-batches.*zero_grad\(\)"):
            model.double()
        model.zero_grad()
        model.double().float()
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_what_cannot_be_taken_over_is_refused_and_changes_nothing(ranks, layout, strategy):
    assert ranks(2, _refused, layout, strategy) == [None] * 2


def _from_meta(rank, world, kind):
    plain = make_net()
    with torch.device("meta"):
        model = make_net()
    sharded(world, kind, model)
    held = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(new is old for new, old in zip(model.parameters(), held))
    flatshard.check_buffers(model)
    source = sharded(world, kind)
    model.load_state_dict(source.state_dict())
    models = [model, plain]
    optimizers = sgd(models)
    for tokens in batches(2, ROWS):
        backward(models, rank, world, tokens)
        step(models, optimizers)
    compare(*models)
    # a state dict that arrives between micro-batches is used by the next one, whatever it is the how-manieth
    model.load_state_dict(source.state_dict())
    with microbatch(model, is_first=False), torch.no_grad():
        torch.testing.assert_close(loss_of(model, tokens), loss_of(make_net(), tokens))


@pytest.mark.parametrize("kind", some(KINDS[::2]), ids=str)
def test_to_empty_and_a_state_dict_give_a_meta_model_its_values(ranks, kind):
    ranks(world_of(kind), _from_meta, kind)
