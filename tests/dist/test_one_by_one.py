"""Parameters of one group that are converted, loaded or assigned one module after the other: taken over together."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

import flatshard
from flatshard import fully_shard, fully_shard_optimizer
from tests.dist.models import assert_rows
from tests.dist.test_engine import full


class Language(nn.Module):
    """Embedding, body, and what torchtitan makes one unit of: the norm and the output layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, 11, bias=not tied)
        if tied:
            self.output.weight = self.embed.weight

    def forward(self, tokens):
        return self.output(self.norm(torch.tanh(self.body(self.embed(tokens)))))


def language(**kwargs):
    torch.manual_seed(0)
    return Language(**kwargs)


def meta_language(**kwargs):
    with torch.device("meta"):
        return Language(**kwargs)


def shard(model, tied=False, root=True, **kwargs):
    fully_shard(model.embed, **kwargs)
    fully_shard(model.body, **kwargs)
    fully_shard([model.norm, model.output], **kwargs)
    return fully_shard(model, **kwargs) if root else model


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens_of(number):
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(number))


def train_alike(model, reference, rank, world, steps=2, optimizers=None):
    """Both train, and have the same weights afterwards; those have moved."""
    before = [full(p).clone() for p in model.parameters()]
    if optimizers is None:
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, reference)]
    for number in range(steps):
        tokens = tokens_of(number)
        loss_of(model, tokens.chunk(world)[rank]).backward()
        loss_of(reference, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs, old in zip(model.named_parameters(), reference.parameters(), before):
        assert_rows(ours.detach(), theirs.data, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert not torch.equal(full(ours), old), f"{name} has not moved"
    flatshard.check_buffers(model)


def copy_values(model, reference):
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        ours.data.copy_(distribute_tensor(theirs.data.to(ours.dtype), ours.device_mesh, ours.placements))


def _emptied(rank, world, root, strategy):
    reference, model = language(), shard(meta_language(), root=root, strategy=strategy)
    for number, parameter in enumerate(model.parameters()):
        parameter.number = number
    held = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(new is old for new, old in zip(model.parameters(), held))
    assert [parameter.number for parameter in model.parameters()] == list(range(len(held)))
    flatshard.check_buffers(model)
    copy_values(model, reference)
    if not root:
        fully_shard(model, strategy=strategy)
    train_alike(model, reference, rank, world)


@pytest.mark.parametrize(("root", "strategy"), [(True, 3), (False, 3), (True, 1)])
def test_a_list_of_modules_on_the_meta_device_trains_after_to_empty(ranks, root, strategy):
    ranks(2, _emptied, root, strategy)


def _converted(rank, world):
    """All of a list is converted, with the gradients that are there."""
    reference, model = language(), shard(language())
    held = list(model.parameters())
    for number, parameter in enumerate(held):
        parameter.number = number
    tokens = tokens_of(5)
    loss_of(model, tokens.chunk(world)[rank]).backward()
    loss_of(reference, tokens).backward()
    for net in (model, reference):
        net.double()
    assert all(new is old and new.dtype == torch.float64 for new, old in zip(model.parameters(), held))
    assert [parameter.number for parameter in model.parameters()] == list(range(len(held)))
    flatshard.check_buffers(model)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        assert ours.grad.dtype == torch.float64
        assert_rows(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    model.zero_grad()
    reference.zero_grad()
    train_alike(model, reference, rank, world)


def test_a_list_of_modules_is_converted_with_its_gradients(ranks):
    ranks(2, _converted)


def _part(rank, world):
    """One of a list is cast alone: refused when it is used, by its full name, unless the other follows."""
    model = shard(language())
    loss_of(model, tokens_of(0)).backward()
    model.zero_grad()
    before = {name: full(value).clone() for name, value in model.named_parameters()}
    model.norm.double()
    model.output.double()
    model.norm.float()
    model.output.float()
    loss_of(model, tokens_of(0)).backward()
    model.zero_grad()
    held = list(model.parameters())
    model.norm.double()
    message = r"'norm\.weight' torch\.float64.*'output\.weight' torch\.float32.*unchanged; change all of them"
    with pytest.raises(ValueError, match=message):
        model(tokens_of(0))
    assert all(new is old for new, old in zip(model.parameters(), held))
    assert all(torch.equal(full(value), before[name]) for name, value in model.named_parameters())
    flatshard.check_buffers(model)
    train_alike(model, language(), 0, 1)


def test_a_part_of_a_group_that_is_cast_alone_is_refused_when_it_is_used(ranks):
    ranks(2, _part)


def _loaded(rank, world, tied):
    """As Accelerate loads: a state dict of DTensors, made one by one, assigned to a model on the meta device."""
    reference, model = language(tied=tied), shard(meta_language(tied=tied))
    state = {}
    for name, value in model.state_dict().items():
        wanted = reference.state_dict()[name]
        state[name] = distribute_tensor(wanted, value.device_mesh, value.placements)
    held = list(model.parameters())
    optimizer = fully_shard_optimizer(torch.optim.SGD(held, lr=0.1, momentum=0.9))
    model.load_state_dict(state, assign=True)
    assert all(new is old for new, old in zip(model.parameters(), held))  # so that any optimizer trains them
    if tied:
        assert model.output.weight is model.embed.weight
        model.output.weight = model.embed.weight  # as tie_weights does
    flatshard.check_buffers(model)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_alike(model, reference, rank, world, optimizers=[optimizer, theirs])


@pytest.mark.parametrize("tied", [False, True])
def test_a_state_dict_is_assigned_to_a_meta_model_module_by_module(ranks, tied):
    ranks(2, _loaded, tied)


def _loaded_too_early(rank, world):
    """On the meta device torch assigns the parts of a full state dict, which are plain DTensors."""
    whole = [language().state_dict() if rank == 0 else {} for _ in range(2)]  # torch changes what it is given
    model, options = meta_language(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    flatshard.fully_shard(model, layout="flat")
    with pytest.raises(ValueError, match=r"call to_empty\(device=...\) before you load a state dict"):
        set_model_state_dict(model, whole[0], options=options)
    model.to_empty(device="cpu")
    set_model_state_dict(model, whole[1], options=options)
    for value, wanted in zip(model.parameters(), language().parameters()):
        assert torch.equal(full(value), wanted)


def test_a_full_state_dict_is_loaded_into_ragged_shards_after_to_empty(ranks):
    ranks(2, _loaded_too_early)


def _some_loaded(rank, world):
    """A checkpoint that lacks some of a group: what it has is kept, the rest is initialised."""
    model = shard(meta_language())
    state = {}
    for name, value in model.state_dict().items():
        if name in ("norm.weight", "output.bias", "body.weight"):
            state[name] = distribute_tensor(torch.full(value.shape, 3.0), value.device_mesh, value.placements)
    model.load_state_dict(state, strict=False, assign=True)
    with torch.no_grad():
        model(tokens_of(0))
    flatshard.check_buffers(model)
    for name, value in model.named_parameters():
        assert bool((full(value) == 3.0).all()) == (name in state), name
    assert full(model.output.weight).std() > 0.1
    loss_of(model, tokens_of(0)).backward()
    other = shard(meta_language())
    sharded = other.norm.weight
    bad = distribute_tensor(torch.ones(6, dtype=torch.float64), sharded.device_mesh, sharded.placements)
    other.load_state_dict({"norm.weight": bad}, strict=False, assign=True)
    with pytest.raises(ValueError, match=r"'norm\.weight' was given values of torch.float64.*of one dtype"):
        other(tokens_of(0))


def test_what_a_loader_leaves_out_is_initialised_and_what_it_gives_is_kept(ranks):
    ranks(2, _some_loaded)
