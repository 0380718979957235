"""Meta-device models get the same values on every rank and for every number of ranks."""

import pytest
import torch
from torch import nn

import flatshard
from flatshard import fully_shard
from flatshard.engine.tree.build import units_below
from tests.dist.test_engine import full


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(4.0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 301)
        self.norm = nn.BatchNorm1d(301)
        self.back = nn.Linear(301, 8, bias=False)
        self.rotary = Rotary()

    def forward(self, x):
        return self.back(self.norm(self.linear(x))) + self.rotary.angles.repeat(2)


def build(**kwargs):
    with torch.device("meta"):
        model = nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(8, 3))
    for layer in model[:3]:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _values(rank, world, layout, explicit):
    torch.manual_seed(rank)  # ranks that would initialise differently
    model = build(layout=layout)
    state = torch.get_rng_state()
    if explicit:
        flatshard.materialize(model)
    else:
        model(torch.zeros(4, 8))
    assert torch.equal(torch.get_rng_state(), state)
    flatshard.check_buffers(model)
    buffers = [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(4, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return [full(p).detach() for p in model.parameters()], buffers[:1]


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_values_are_equal_for_any_number_of_ranks(ranks, layout):
    results = [result for world in (1, 2, 3, 4) for result in ranks(world, _values, layout, True)]
    first, buffers = results[0]
    assert len({float(p.std()) for p in first}) > 3
    for values, others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, first))
        assert all(torch.equal(a, b) for a, b in zip(others, buffers))


def test_the_first_forward_materializes(ranks):
    ((explicit, _), *_), ((implicit, _), *_) = (ranks(2, _values, "tensor", way) for way in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(explicit, implicit))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


def _no_way(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Own())
    fully_shard(model)
    with pytest.raises(ValueError, match="cannot initialise 1:"):
        flatshard.materialize(model)
    assert all(p.is_meta for p in model.parameters())  # nothing has changed
    flatshard.materialize(model, lambda module: [nn.init.constant_(p, 2.0) for p in module.parameters(recurse=False)])
    assert all(bool((full(p) == 2).all()) for p in model.parameters())


def test_a_module_without_a_way_to_initialise_is_named(ranks):
    assert ranks(2, _no_way) == [None] * 2


class Half(Own):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Parameter(torch.empty(3))
        self.register_buffer("flag", torch.empty(1, dtype=torch.bool))


def _left_out(rank, world):
    def made():
        with torch.device("meta"):
            return nn.Sequential(Half())

    def some(module):
        if hasattr(module, "flag"):
            module.flag.data.fill_(True)
            module.weight.data.fill_(1.0)

    with pytest.raises(ValueError, match=r"'0\.forgotten' was not initialised"):
        flatshard.materialize(fully_shard(made()))
    with pytest.raises(ValueError, match=r"'0\.forgotten' was not initialised"):
        flatshard.materialize(fully_shard(made()), some)
    model = fully_shard(made())
    whole = {"0.forgotten": torch.arange(3.0)}
    model.load_state_dict(whole, strict=False, assign=True)
    flatshard.materialize(model, some)  # what has been loaded has values
    assert torch.equal(full(model[0].forgotten), whole["0.forgotten"])
    assert bool(model[0].flag)


def test_what_no_initialiser_sets_is_named(ranks):
    ranks(2, _left_out)


def _peak(rank, world):
    """The full tensors of one unit at a time: never two units' at once."""
    model = build()
    sizes = [sum(group.layout.payload for group in unit.groups) for _, unit in units_below(model)]
    live, peak = 0, 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal live, peak
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format and result.device.type == "cpu" and result.dim():
                live += result.numel()
                peak = max(peak, live)
                storage = result.untyped_storage()
                size = result.numel()

                def gone(_, size=size):
                    nonlocal live
                    live -= size

                weak = torch.multiprocessing.reductions.StorageWeakRef(storage)
                watched.append((weak, gone))
            for weak, gone in list(watched):
                if weak.expired():
                    gone(None)
                    watched.remove((weak, gone))
            return result

    watched = []
    with Counting():
        flatshard.materialize(model)
    shards = sum(group.main.local.numel() for _, unit in units_below(model) for group in unit.groups)
    return peak, max(sizes), sum(sizes), shards


def test_peak_extra_memory_is_one_unit(ranks):
    for peak, largest, total, shards in ranks(2, _peak):
        buffers = 4 * 301 + 256
        assert largest <= peak <= largest + shards + buffers < total + shards


def _inferred_first(rank, world, how):
    """The first forward is one of an evaluation."""
    model = build()
    if how == "empty":
        with torch.inference_mode():
            model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.to_local().normal_()
        for module in model.modules():  # as without sharding, what is no parameter stays what was made there
            module._buffers.update({name: torch.zeros_like(buffer) for name, buffer in module._buffers.items()})
    with torch.inference_mode():
        model(torch.zeros(4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full(model[0].back.weight).detach().clone()
    model(torch.randn(4, 8)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert not torch.equal(full(model[0].back.weight), before)
    with torch.inference_mode():
        model[3].double().float()  # no unit of its own: the next forward finds out
        model(torch.zeros(4, 8))
    model.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    flatshard.check_buffers(model)


@pytest.mark.parametrize("how", ["initialised", "empty"])
def test_a_model_whose_first_forward_is_under_inference_mode_trains(ranks, how):
    ranks(2, _inferred_first, how)
