"""Parameters that are put into modules after sharding are the group's from then on: an optimizer trains them."""

import copy
import io
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatshard
from flatshard import fully_shard, fully_shard_optimizer
from flatshard.engine.groups.registry import group_of
from flatshard.engine.units.unit import unit_of
from tests.dist.models import batches, make_net
from tests.dist.models import loss_of as loss_of_net
from tests.dist.test_engine import ROWS, full, shard_net
from tests.dist.test_moved import backward, compare, sharded, step
from tests.dist.test_one_by_one import Language, language, loss_of, meta_language, shard, tokens_of, train_alike
from tests.fsdp2.test_extensions import Coded


def cut(like, whole):
    """A parameter of these values, cut as another one is."""
    return nn.Parameter(distribute_tensor(whole.detach().clone(), like.device_mesh, like.placements))


def holder_of(model, name):
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def by_setattr(model, values):
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module, last = holder_of(model, name)
        setattr(module, last, cut(parameter, values[name]))


def by_register(model, values):
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module, last = holder_of(model, name)
        module.register_parameter(last, cut(parameter, values[name]))


WAYS = {way.__name__: way for way in (by_setattr, by_register)}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "local": lambda parameters: fully_shard_optimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
}


def _assigned(rank, world, way, optimizer, meta, strategy):
    reference = language()
    model = shard(meta_language() if meta else language(), strategy=strategy)
    first = torch.optim.SGD(list(model.parameters()), lr=0.1)
    for parameter in model.parameters():
        parameter.mark = "mine"
    WAYS[way](model, {name: value + 0.25 for name, value in reference.state_dict().items()})
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.25)
    held = list(model.parameters())
    ours, theirs = OPTIMIZERS[optimizer](held), OPTIMIZERS["sgd"](reference.parameters())
    train_alike(model, reference, rank, world, optimizers=[ours, theirs])
    assert all(new is old for new, old in zip(model.parameters(), held))
    assert all(parameter.mark == "mine" and group_of(parameter) is not None for parameter in held)
    flatshard.check_buffers(model)
    train_alike(model, reference, rank, world, optimizers=[ours, theirs])
    with pytest.raises(RuntimeError, match=r"holds 'weight' of Embedding.*another parameter was assigned.*Build the"):
        first.step()
    assert copy.deepcopy(ours.state_dict())["state"]


CASES = [
    ("by_setattr", "sgd", True, 3),
    ("by_setattr", "local", False, 3),
    ("by_register", "fused", False, 1),
    ("by_register", "local", True, 0),
]


@pytest.mark.parametrize(("way", "optimizer", "meta", "strategy"), CASES)
def test_assigned_parameters_are_trained_by_the_optimizer_that_holds_them(ranks, way, optimizer, meta, strategy):
    ranks(2, _assigned, way, optimizer, meta, strategy)


def _tied(rank, world):
    """As a loader does it: one of the modules that share a parameter is given values, the other is tied again."""
    reference, model = language(tied=True), shard(meta_language(tied=True))
    values = reference.state_dict()
    for name, parameter in list(model.named_parameters()):
        module, last = holder_of(model, name)
        setattr(module, last, cut(parameter, values[name]))
    model.output.weight = model.embed.weight
    optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in (model, reference)]
    train_alike(model, reference, rank, world, optimizers=optimizers)
    assert model.output.weight is model.embed.weight
    # equal values in two objects: the first is kept, an optimizer that holds the second is told
    one, other = (cut(model.embed.weight, full(model.embed.weight)) for _ in range(2))
    model.embed.weight, model.output.weight = one, other
    told = torch.optim.SGD([other], lr=0.1)
    model(torch.zeros(1, 3, dtype=torch.long))
    assert model.output.weight is model.embed.weight
    assert model.embed.weight is one
    with pytest.raises(RuntimeError, match=r"holds 'weight' of Embedding.*was assigned in its place"):
        told.step()


def test_shared_parameters_are_assigned(ranks):
    ranks(2, _tied)


KIND = (1, "optim_grads_params", None, "flat")


def _loaded(rank, world, kind, optimizer):
    """`load_state_dict(assign=True)` of modules that are no units themselves: nobody tells the unit."""
    models = [sharded(world, kind), make_net()]
    first = torch.optim.SGD(models[0].parameters(), lr=0.1)
    paths = [path for path, module in models[0].named_modules() if not isinstance(module, flatshard.FSDPModule)]
    assert "blocks.1.up" in paths
    for model in models:
        for module in map(model.get_submodule, paths):
            if not list(module.children()):
                state = {name: value.detach() * 0.5 for name, value in module.state_dict().items()}
                module.load_state_dict(state, assign=True)
    held = list(models[0].parameters())
    optimizers = [OPTIMIZERS[name](model.parameters()) for name, model in zip((optimizer, "sgd"), models)]
    before = full(models[0].blocks[1].up.weight).clone()
    for tokens in batches(2, ROWS):
        backward(models, rank, world, tokens)
        compare(*models, "gradients")
        step(models, optimizers)
    compare(*models, "weights")
    assert not torch.equal(full(models[0].blocks[1].up.weight), before)
    assert all(new is old for new, old in zip(models[0].parameters(), held))
    flatshard.check_buffers(models[0])
    with pytest.raises(RuntimeError, match="was assigned in its place"):
        first.step()


@pytest.mark.parametrize(
    ("kind", "optimizer"), [(KIND, "local"), ((1, "optim", None, "tensor"), "sgd"), ((2, 3, "optim", "flat"), "local")]
)
def test_modules_that_are_no_units_load_by_assignment(ranks, kind, optimizer):
    ranks(4 if kind[0] == 2 else 2, _loaded, kind, optimizer)


def _some(rank, world):
    """One parameter of a group is assigned, with a gradient; those beside it keep theirs. And back."""
    models = [sharded(world, KIND), make_net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    data = batches(4, ROWS)
    backward(models, rank, world, next(data))
    old = models[0].head.weight
    seen = []
    models[0].norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    models[0].head.weight = nn.Parameter(old.detach().clone())
    models[0].head.weight.grad = old.grad.clone()
    backward(models, rank, world, next(data))  # adds to what is there
    assert seen  # hooks of the others are still there
    compare(*models, "assigned with a gradient")
    assert group_of(old) is None
    flatshard.check_buffers(models[0])
    with pytest.raises(RuntimeError, match=r"'head\.weight' of Net.*assigned in its place"):
        optimizers[0].step()
    models[0].head.weight = old
    with torch.no_grad():
        old.copy_(distribute(models[1].head.weight, old))
    for model in models:
        model.zero_grad()
    backward(models, rank, world, next(data))
    compare(*models, "put back")
    for optimizer in optimizers:
        optimizer.step()
    compare(*models, "stepped")
    assert models[0].head.weight is old


def distribute(whole, like):
    made = torch.empty_like(like)
    made.copy_(distribute_tensor(whole.detach(), like.device_mesh))
    return made


def test_one_of_a_group_is_assigned_and_put_back(ranks):
    ranks(2, _some)


def _shown(rank, world):
    """What gathers without a forward takes assigned values over too."""
    model = shard_net(make_net())
    for assign in (lambda p: nn.Parameter(p.detach() * 2), lambda p: nn.Parameter(p.detach() * 3)):
        wanted = full(assign(model.head.weight))
        model.head.weight = assign(model.head.weight)
        held = model.head.weight
        model.unshard()
        assert torch.equal(model.head.weight, wanted)
        model.reshard()
        assert model.head.weight is held
        assert torch.equal(full(model.head.weight), wanted)


def test_unshard_shows_assigned_values(ranks):
    ranks(2, _shown)


def _tied_late(rank, world, how, strategy):
    """As transformers: sharded on the meta device, then loaded, then tied; the output layer is the root's."""
    reference = language(tied=True)
    with torch.device("meta"):
        model = Language(tied=False)
        model.output.bias = None
    fully_shard(model.body, strategy=strategy)
    fully_shard([model.norm, model.embed], strategy=strategy)
    fully_shard(model, strategy=strategy)
    first = model.output.weight
    values = reference.state_dict()
    for name, parameter in list(model.named_parameters()):
        module, last = holder_of(model, name)
        setattr(module, last, cut(parameter, values[name]))
    if how == "before":
        model.output.weight = model.embed.weight
    else:
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
        model.output.weight = model.embed.weight
    optimizers = [OPTIMIZERS["local" if strategy == 3 else "sgd"](net.parameters()) for net in (model, reference)]
    train_alike(model, reference, rank, world, optimizers=optimizers)
    assert model.output.weight is model.embed.weight
    flatshard.check_buffers(model)
    train_alike(model, reference, rank, world, optimizers=optimizers)
    assert unit_of(model).groups == []  # nothing is gathered in vain
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
    with pytest.raises(RuntimeError, match=r"holds 'output\.weight' of Language|holds 'weight' of LayerNorm"):
        torch.optim.SGD([first], lr=0.1).step()
    state = model.state_dict()
    assert torch.equal(full(state["output.weight"]), full(state["embed.weight"]))
    model.load_state_dict({name: value * 2 for name, value in state.items()}, assign=True)
    assert model.output.weight is model.embed.weight
    model.double()
    loss_of(model, tokens_of(0)).backward()
    assert model.embed.weight.grad.dtype == torch.float64


@pytest.mark.parametrize(("how", "strategy"), [("before", 3), ("after", 3), ("before", 1)])
def test_parameters_are_tied_after_sharding(ranks, how, strategy):
    ranks(2, _tied_late, how, strategy)


def _tied_blocks(rank, world, layout):
    """Of two units, and of one; a group that has other parameters too goes on with those."""
    models = [shard_net(make_net(), layout=layout), make_net()]
    for model in models:
        model.blocks[0].up.weight = model.blocks[1].up.weight
        model.blocks[2].norm.bias = model.blocks[2].norm.weight
    if layout == "flat":
        with pytest.raises(ValueError, match=r"was replaced by '.*', which is sharded differently"):
            models[0](torch.zeros(1, 4, dtype=torch.long))
        return
    optimizers = [OPTIMIZERS[kind](model.parameters()) for kind, model in zip(("local", "sgd"), models)]
    for tokens in batches(3, ROWS):
        backward(models, rank, world, tokens)
        compare(*models, "gradients")
        step(models, optimizers)
    compare(*models, "weights")
    flatshard.check_buffers(models[0])
    assert models[0].blocks[0].up.weight is models[0].blocks[1].up.weight
    assert models[0].blocks[2].norm.bias is models[0].blocks[2].norm.weight


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_blocks_are_tied_after_sharding(ranks, layout):
    ranks(2, _tied_blocks, layout)


def _foreign(rank, world):
    """A parameter of another model is refused; a state dict of such gives its values."""
    model, other = shard_net(make_net()), shard_net(make_net(seed=1))
    kept = model.blocks[0].up.weight
    model.blocks[0].up.weight = other.blocks[1].up.weight
    with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight' was replaced by 'up\.weight'.*before fully_shard"):
        model(torch.zeros(1, 4, dtype=torch.long))
    assert model.blocks[0].up.weight is kept
    flatshard.check_buffers(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, other)]
    model.load_state_dict(dict(other.named_parameters()), assign=True)
    for net, optimizer in zip((model, other), optimizers):
        net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        flatshard.check_buffers(net)
    for one, two in zip(model.parameters(), other.parameters()):
        assert one is not two
        torch.testing.assert_close(full(one), full(two))
    refused = nn.Parameter(torch.zeros(29, 12))
    model.head.weight = refused
    with pytest.raises(ValueError, match=r"'head\.weight' was replaced by a Parameter"):
        model(torch.zeros(1, 4, dtype=torch.long))
    torch.optim.SGD([refused], lr=0.1).step()  # it is nobody's, and may be used elsewhere


def test_parameters_of_others_are_refused_and_their_values_taken(ranks):
    ranks(2, _foreign)


class Own(Coded):
    """With a list of its own of what it has seen."""

    seen: ClassVar[list] = []


def _extended(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].weight = nn.Parameter(Own(model[0].weight.data))
    fully_shard(model)
    old = model[0].weight
    first = torch.optim.SGD([old], lr=0.1)
    assigned = nn.Parameter(old.detach() * 2)
    assert isinstance(assigned, DTensor)
    model[0].weight = assigned
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = assigned.to_local()._data.clone()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert model[0].weight is assigned
    assert not torch.equal(assigned.to_local()._data, before)
    with pytest.raises(RuntimeError, match=r"'0\.weight' of Sequential.*assigned in its place"):
        first.step()


def test_a_parameter_of_a_tensor_subclass_is_assigned(ranks):
    ranks(2, _extended)


def _data(rank, world, layout):
    """`.data = other` is refused: torch would change nothing but the metadata of a DTensor."""
    models = [sharded(world, (1, 3, None, layout)), make_net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    held = list(models[0].parameters())
    for parameter in held:
        parameter.mark = "mine"
    data = batches(5, ROWS)
    weight = models[0].blocks[0].up.weight
    for replacement in (weight.detach() * 2, weight.data.double(), torch.zeros(weight.shape)):
        with pytest.raises(ValueError, match=r"`\.data` of parameter 'up\.weight' cannot be replaced.*copy_"):
            weight.data = replacement
        weight.data = weight.data
        compare(*models, "as before")
        backward(models, rank, world, next(data))
        assert all(p.mark == "mine" and group_of(p) is not None and p.grad is not None for p in held)
        step(models, optimizers)
        compare(*models, "trained")
    flatshard.check_buffers(models[0])
    assert all(new is old for new, old in zip(models[0].parameters(), held))
    with torch.no_grad():  # in place is as ever
        for model in models:
            model.blocks[0].up.weight.data.mul_(0.5)
            model.blocks[0].up.weight.data.copy_(model.blocks[0].up.weight.data * 2)
    backward(models, rank, world, next(data))
    compare(*models, "in place")


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_assigned_data_is_refused(ranks, layout):
    ranks(2, _data, layout)


def _compiled(rank, world):
    model = sharded(world, (1, 3, None, "tensor"))
    foreign = nn.Parameter(DTensor.from_local(torch.ones(2), unit_of(model).mesh, [Shard(0)]))

    @torch.compile(backend="eager")
    def double(parameter):
        parameter.data = parameter.data * 2

    double(foreign)
    assert torch.equal(foreign.to_local(), torch.ones(2))  # as without flatshard
    with pytest.raises(ValueError, match="cannot be replaced"):
        double(model.blocks[0].up.weight)


def test_compiled_code_assigns_data_as_other_code_does(ranks):
    ranks(2, _compiled)


def _saved_by_torch(rank, world):
    """Each rank saves and loads its own shards. ``weights_only`` is torch's default."""
    model = sharded(world, (1, 3, None, "flat"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of_net(model, next(batches(1, ROWS))).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = sharded(world, (1, 3, None, "flat"))
    again = torch.optim.AdamW(other.parameters())
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for ours, theirs in zip(other.parameters(), model.parameters()):
        pairs = [(again.state[ours][name], optimizer.state[theirs][name]) for name in ("exp_avg", "exp_avg_sq")]
        for found, wanted in [(ours, theirs), *pairs]:
            assert type(found) is type(wanted)
            assert torch.equal(found.to_local(), wanted.to_local())


def test_shards_that_torch_saves_are_loaded(ranks):
    ranks(2, _saved_by_torch)


def _called(rank, world):
    """Tensors that `torch.func.functional_call` puts into modules for a while are not taken for new weights."""
    models = [sharded(world, KIND), make_net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    held, tokens = list(models[0].parameters()), next(batches(1, ROWS))
    with pytest.raises(ValueError, match=r"'norm\.weight' was replaced by a tensor that is not an nn\.Parameter"):
        torch.func.functional_call(models[0], {n: p.detach() * 2 for n, p in models[0].named_parameters()}, (tokens,))
    assert all(new is old for new, old in zip(models[0].parameters(), held))
    backward(models, rank, world, tokens)
    compare(*models, "refused")
    step(models, optimizers)
    compare(*models, "trained")


def test_functional_calls_do_not_change_the_model(ranks):
    ranks(2, _called)


def _converted(rank, world):
    """Converted before anything has used what was assigned: with its own gradient, and not that of its predecessor."""
    model = sharded(world, KIND)
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    assigned = nn.Parameter(model.head.weight.detach().clone())
    assigned.grad = torch.full_like(assigned, 7.0)
    model.head.weight = assigned
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.double()
    assert model.head.weight is assigned
    assert assigned.dtype == assigned.grad.dtype == torch.float64
    assert bool((full(assigned.grad) == 7.0).all())
    before = full(assigned).clone()
    optimizer.step()
    torch.testing.assert_close(full(assigned), before - 3.5)
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    flatshard.check_buffers(model)


def test_what_was_assigned_is_converted(ranks):
    ranks(2, _converted)


def _removed(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model[0].weight = nn.Parameter(Own(model[0].weight.data))
    fully_shard(model)
    weight = model[0].weight
    model[0].weight = None
    with pytest.raises(ValueError, match=r"'0\.weight' was removed"):
        model(torch.ones(2, 6))
    assert model[0].weight is weight
    assert weight.device.type == "cpu"
    model(torch.ones(2, 6)).sum().backward()


def _parametrized_late(rank, world):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"'0\.weight' was removed.*parametrize modules before fully_shard"):
        model(torch.ones(2, 6))


def test_a_module_that_is_parametrized_after_sharding_is_refused_with_the_fix(ranks):
    ranks(2, _parametrized_late)


def test_a_removed_parameter_of_a_tensor_subclass_is_put_back(ranks):
    ranks(2, _removed)
