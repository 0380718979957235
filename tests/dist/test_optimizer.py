"""fully_shard_optimizer: equal to one process and to the DTensor path, on plain tensors, and the same from outside."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from flatshard import fully_shard, fully_shard_optimizer
from flatshard.buffer.rules import add_rules
from flatshard.optim.optimizer_state import is_settled
from tests.dist.models import batches, loss_of, make_net

pytestmark = pytest.mark.sampled(2)

ROWS = 12


class Lion(Optimizer):
    """A user's optimizer: an elementwise update, counters in its parameter groups and python numbers in its state."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["steps"] = 0
                state["steps"] += 1
                one, two = group["betas"]
                p.add_(torch.sign(state["exp_avg"] * one + p.grad * (1 - one)), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"] * two + p.grad * (1 - two)  # a new tensor every step


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, maximize=True),
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "user": Lion,
}


class Gated(nn.Module):
    """A net with a branch that is used in some steps only, and a frozen part."""

    def __init__(self):
        super().__init__()
        self.net = make_net(depth=1)
        self.extra = nn.Linear(29, 29)
        self.frozen = nn.Linear(29, 29, bias=False).requires_grad_(False)
        for parameter in (*self.extra.parameters(), *self.frozen.parameters()):
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))
        for name, parameter in self.named_parameters():
            parameter.no_decay = "norm" in name or name.endswith("bias")

    def forward(self, tokens, use_extra=True):
        x = self.frozen(self.net(tokens))
        return x + self.extra(x) if use_extra else x


def shard(model, **kwargs):
    for block in model.net.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def by_attribute(model):
    """Two parameter groups, told apart by an attribute that was put on the parameters before they were sharded."""
    decay = [p for p in model.parameters() if not p.no_decay]
    return [{"params": decay}, {"params": [p for p in model.parameters() if p.no_decay], "lr": 3e-3}]


def one_step(model, optimizer, tokens, set_to_none=True, use_extra=True):
    loss = loss_of(lambda t: model(t, use_extra), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    return loss.item()


def weights(model):
    named = model.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def assert_same(ours, theirs, rtol=2e-5, atol=1e-6):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def _equal(rank, world, names):
    for name in names:
        _equal_steps_of(rank, world, name)


def _equal_steps_of(rank, world, name, steps=3):
    make = OPTIMIZERS[name]
    one, plain, ours = Gated(), shard(Gated()), shard(Gated())
    optimizers = [make(by_attribute(model)) for model in (one, plain, ours)]
    assert fully_shard_optimizer(optimizers[2]) is optimizers[2]
    kind = type(optimizers[2])
    assert fully_shard_optimizer(optimizers[2]) is optimizers[2]  # once, however often it is called
    assert type(optimizers[2]) is kind
    assert isinstance(optimizers[2], type(optimizers[0]))
    for number, tokens in enumerate(batches(steps, ROWS)):
        mine = tokens.chunk(world)[rank]
        use, none = number != 1, number % 2 == 0
        one_step(one, optimizers[0], tokens, none, use)
        for model, optimizer in zip((plain, ours), optimizers[1:]):
            one_step(model, optimizer, mine, none, use)
    if name != "user":  # a sign decides there: what rounding does to a gradient near zero is a whole step
        assert_same(weights(ours), weights(one), rtol=5e-3, atol=5e-4)
    assert_same(weights(ours), weights(plain))
    same_state_dict(optimizers[2].state_dict(), optimizers[1].state_dict())
    assert [g["lr"] for g in optimizers[2].param_groups] == [g["lr"] for g in optimizers[0].param_groups]
    if name == "user":
        assert [g["k"] for g in optimizers[2].param_groups] == [steps, steps]


def same_state_dict(ours, theirs):
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entries in theirs["state"].items():
        assert ours["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            mine = ours["state"][index][key]
            assert type(mine) is type(value), (key, type(mine), type(value))
            if isinstance(value, DTensor):
                assert (mine.placements, mine.shape, mine.dtype) == (value.placements, value.shape, value.dtype)
                mine, value = mine.to_local(), value.to_local()
            if isinstance(value, torch.Tensor):
                assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device)
                torch.testing.assert_close(mine, value, rtol=2e-4, atol=1e-6)
            else:
                assert mine == value


@pytest.mark.parametrize("names", [list(OPTIMIZERS)[start::4] for start in range(4)], ids="-".join)
def test_steps_equal_one_process_and_the_dtensor_path(ranks, names):
    ranks(3 if "user" in names else 2, _equal, names)


def every_torch_optimizer():
    """(class name, options) of each elementwise optimizer of torch, in each of its implementations."""
    decay = {"weight_decay": 0.1}
    by_name = {
        "SGD": [decay, {"momentum": 0.9, "nesterov": True, "maximize": True}],
        "Adam": [decay, {"amsgrad": True}],
        "AdamW": [{"maximize": True}],
        "RMSprop": [decay, {"momentum": 0.9, "centered": True}],
        "Rprop": [{}],
        **{name: [decay] for name in ("Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD")},
    }
    for name, variants in by_name.items():
        fused = [{"fused": True}] if name in ("SGD", "Adam", "AdamW", "Adagrad") else []
        # DTensors of torch 2.11 and 2.12 know no _foreach_sign_
        several = [] if name == "Rprop" and torch.__version__ < "2.13" else [{"foreach": True}]
        for mode in ({"foreach": False}, *several, *fused):
            yield from ((name, {**mode, **options}) for options in variants)
    yield "SGD", {"fused": True, "lr": torch.tensor(1e-2)}


def _without_help(rank, world, layout):
    """Every rank has the whole batch: the mean over the ranks is the gradient of one process, to the bit."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    for name, options in every_torch_optimizer():
        one, ours = make(), fully_shard(make(), layout=layout)
        assert any(type(p) is not DTensor for p in ours.parameters()) == (layout == "flat")
        for model in (one, ours):
            optimizer = getattr(torch.optim, name)(model.parameters(), **{"lr": 1e-2, **options})
            rng = torch.Generator().manual_seed(1)
            for _ in range(2):
                model(torch.randn(4, 5, generator=rng)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for (key, mine), wanted in zip(weights(ours).items(), one.parameters()):
            note = f"{key} after {name}({options})"
            torch.testing.assert_close(mine, wanted.data, rtol=1e-6, atol=1e-7, msg=note)


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_every_elementwise_optimizer_of_torch_steps_the_dtensors(ranks, layout):
    ranks(2, _without_help, layout)


def _rules(rank, world):
    """What flatshard adds to DTensor leaves alone what is not elementwise."""
    add_rules()
    whole = torch.arange(12.0).view(6, 2)
    x = distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(0)])
    x[x.gt(4.0)] = -1.0
    assert torch.equal(x.full_tensor(), whole.masked_fill(whole > 4, -1))
    with pytest.raises(RuntimeError):  # as without flatshard: the rows may be on another rank
        x[torch.tensor([0, 5])] = 1.0
    try:
        x[distribute_tensor(whole > 4, x.device_mesh, [Replicate()])] = 1.0
    except RuntimeError:  # before torch 2.15
        pass
    else:
        assert torch.equal(x.full_tensor(), whole.masked_fill(whole > 4, 1))
    y = distribute_tensor(whole, x.device_mesh, [Replicate()])
    try:
        y[distribute_tensor(torch.tensor([0, 5]), x.device_mesh, [Replicate()])] = 1.0
    except NotImplementedError:  # before torch 2.13
        pass
    else:
        assert y.full_tensor()[5].tolist() == [1.0, 1.0]


def test_masked_assignment_is_elementwise_and_other_assignment_is_torchs(ranks):
    ranks(2, _rules)


def ready(rank, world, make=OPTIMIZERS["adamw"], steps=1, params=by_attribute, wrap=True, **kwargs):
    """A sharded model and its optimizer after some steps."""
    model = shard(Gated(), **kwargs)
    optimizer = make(params(model))
    if wrap:
        fully_shard_optimizer(optimizer)
    for tokens in batches(steps, ROWS):
        one_step(model, optimizer, tokens.chunk(world)[rank])
    return model, optimizer


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations, and those on DTensors apart."""

    def __init__(self):
        super().__init__()
        self.plain = self.dtensor = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in flat):
            self.dtensor += 1
        else:
            self.plain += 1
        return func(*args, **(kwargs or {}))


def _steady(rank, world, depth):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(6, 6) for _ in range(depth))) for _ in range(2)))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    optimizer.zero_grad(set_to_none=False)  # there are no gradients yet
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        with Counted() as counted:
            optimizer.step()
        with Counted() as zeroed:
            optimizer.zero_grad(set_to_none=False)
    return counted.plain, counted.dtensor, zeroed.plain, zeroed.dtensor


def test_a_step_dispatches_no_dtensor_and_as_much_as_there_are_groups(ranks):
    few, many = ranks(2, _steady, 2)[0], ranks(2, _steady, 20)[0]
    assert few == many  # operations do not grow with the number of parameters
    assert many[1] == many[3] == 0
    assert many[0] <= 8  # two groups: their gradients' slices, one fused update, one addition to the steps
    assert many[2] == 1


def _views(rank, world):
    model, optimizer = ready(rank, world, steps=2)
    parameter = model.net.blocks[0].up.weight
    state = optimizer.state[parameter]
    assert isinstance(state["exp_avg"], DTensor)
    assert state["step"].item() == 2
    again = optimizer.state[parameter]
    assert again["exp_avg"] is state["exp_avg"]  # built once
    before = state["exp_avg"].to_local().clone()
    for tokens in batches(1, ROWS):
        one_step(model, optimizer, tokens.chunk(world)[rank])
    assert optimizer.state[parameter]["exp_avg"] is state["exp_avg"]
    assert not torch.equal(state["exp_avg"].to_local(), before)  # a view: it follows
    shared = {e["exp_avg"].to_local().untyped_storage().data_ptr() for e in optimizer.state.values()}
    assert len(shared) < len(optimizer.state)

    # What somebody writes into the state counts: into a view, in the place of one, and for one parameter only.
    optimizer.state[parameter]["exp_avg"].zero_()
    other = model.net.blocks[0].norm.weight
    optimizer.state[other]["exp_avg_sq"] = torch.ones_like(other)
    optimizer.state[other]["step"].fill_(7)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].to_local().abs().sum() == 0
    assert optimizer.state[other]["exp_avg_sq"].to_local().sum() == pytest.approx(0.999 * other.to_local().numel())
    assert (optimizer.state[other]["step"].item(), optimizer.state[parameter]["step"].item()) == (8, 4)
    return sorted((i, *sorted(e)) for i, e in optimizer.state_dict()["state"].items())


def test_state_entries_are_views_that_are_built_once(ranks):
    keys = ranks(4, _views)
    assert all(k == keys[0] for k in keys)  # PITFALL 20: the same keys on every rank, whatever it holds (PITFALL 7)


def _replayed(rank, world):
    model, optimizer = ready(rank, world, steps=1)
    parameter = model.net.blocks[0].up.weight
    for count in range(1, 4):
        assert optimizer.state[parameter]["step"].item() == count
        assert is_settled(optimizer)
        for state in optimizer.__dict__["_flatshard_stepper"].flat_state.values():
            state["step"] += 1  # as the replay of a graph does, of which nobody is told


def test_the_state_that_is_read_between_replays_is_that_of_the_last_one(ranks):
    ranks(2, _replayed)


def _round_trip(rank, world, first, second):
    """State saved by one path and loaded by the other goes on as if nothing had happened."""
    for unused in (None, 1):
        runs = []
        for wrap in (first, second):
            model = shard(Gated())
            optimizer = OPTIMIZERS["adamw"](by_attribute(model))
            runs.append((model, fully_shard_optimizer(optimizer) if wrap else optimizer))
        (one, saved), (two, loaded) = runs
        stream = list(batches(5, ROWS))
        for number, tokens in enumerate(stream[:3]):
            one_step(one, saved, tokens.chunk(world)[rank], use_extra=number != unused)
        two.load_state_dict(one.state_dict())
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
        same_state_dict(loaded.state_dict(), saved.state_dict())
        for tokens in stream[3:]:
            for model, optimizer in runs:
                one_step(model, optimizer, tokens.chunk(world)[rank])
        assert_same(weights(one), weights(two))
        same_state_dict(loaded.state_dict(), saved.state_dict())


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_state_dicts_go_from_either_path_to_the_other(ranks, first, second):
    ranks(2, _round_trip, first, second)
