"""Bad input raises with the fix and changes nothing; exceptions in a step leave a model that trains on."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from flatshard import FSDPModule, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.dist.models import assert_rows, batches, loss_of, make_net
from tests.dist.test_engine import shard_net


class Tied(nn.Module):
    """Two blocks that share a weight, as embedding and head often do; or a whole module, with ``module``."""

    def __init__(self, module: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.decoder = nn.Sequential(self.encoder[0] if module else nn.Linear(4, 4), nn.Tanh())
        self.decoder[0].weight = self.encoder[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def refused(model: nn.Module, call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """``call`` raises and says these words, and ``model`` is as it was: same class, plain and trainable parameters."""
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(kind) as raised:
        call()
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in {raised.value}"
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) and not isinstance(after[name], DTensor) for name in before)
    assert [type(m) for m in model.modules()] == kinds
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    for parameter in after.values():
        parameter.grad = None
        parameter.sum().backward()
        assert parameter.grad is not None


def _bad_modules(rank: int, world: int) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    refused(plain, lambda: fully_shard([]), ValueError, "empty list")
    refused(plain, lambda: fully_shard("model"), TypeError, "str")
    refused(plain, lambda: fully_shard([plain[0], plain[0].weight]), TypeError, "Parameter")
    refused(plain, lambda: fully_shard([plain, plain[0]]), ValueError, "one that it contains")
    refused(plain, lambda: fully_shard([plain[1], plain[1][0]]), ValueError, "one that it contains")
    scripted = torch.jit.script(nn.Linear(4, 4))
    refused(scripted, lambda: fully_shard(scripted), ValueError, "RecursiveScriptModule", "around it")
    listed = nn.ModuleList([nn.Linear(4, 4)])
    refused(listed, lambda: fully_shard(listed), ValueError, "ModuleList", "never called", "list")
    named = nn.ModuleDict({"a": nn.Linear(4, 4)})
    refused(named, lambda: fully_shard(named), ValueError, "ModuleDict")


def _bad_arguments(rank: int, world: int) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cube = init_device_mesh("cpu", (1, 1, world), mesh_dim_names=("a", "b", "c"))
    refused(plain, lambda: fully_shard(plain, mesh=cube), ValueError, "3 axes")
    refused(plain, lambda: fully_shard(plain, layout="diagonal"), ValueError, "diagonal")
    refused(plain, lambda: fully_shard(plain, reshard_after_forward="sometimes"), (ValueError, TypeError), "sometimes")
    other = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    if rank == 1:
        refused(plain, lambda: fully_shard(plain, mesh=other), ValueError, "this rank is not in mesh")
    for reversed_ranks in ([1, 0], [[1], [0]]):
        reordered = DeviceMesh("cpu", reversed_ranks)
        refused(plain, lambda mesh=reordered: fully_shard(plain, mesh=mesh), ValueError, "ascending order")
    turned = nn.Linear(4, 3)
    turned.weight = nn.Parameter(torch.randn(4, 3).t())
    refused(turned, lambda: fully_shard(turned), ValueError, "weight", "contiguous")
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"parameter '1\.weight' of a lazy module.*before fully_shard"):
        fully_shard(lazy)
    assert not isinstance(lazy[0].weight, DTensor)
    wave = nn.Linear(4, 4, dtype=torch.complex64)
    before = wave.weight
    with pytest.raises(ValueError, match=r"weight.*complex64"):
        fully_shard(wave)
    assert wave.weight is before


def _tied_across_units(rank: int, world: int) -> None:
    half = init_device_mesh("cpu", (1, world), mesh_dim_names=("outer", "inner"))
    for shared_module in (False, True):
        model = Tied(shared_module)
        fully_shard(model.encoder)
        with pytest.raises(ValueError, match=r"'0\.weight' is tied to '0\.weight'.*another mesh"):
            fully_shard(model.decoder, mesh=half)
        model.encoder.unshard()
        with pytest.raises(RuntimeError, match=r"'0\.weight' is tied to '0\.weight'.*reshard\(\)"):
            fully_shard(model.decoder)
        together = Tied(shared_module)
        fully_shard([together.encoder, together.decoder])
        fully_shard(together)
        assert together.encoder[0].weight is together.decoder[0].weight
        together(torch.ones(2, 4)).sum().backward()
        assert len(list(together.parameters())) == (2 if shared_module else 3)


def _wrong_moment(rank: int, world: int) -> None:
    model = make_net()
    fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="already called on this FSDPBlock"):
        fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="already called"):
        fully_shard([model.blocks[1], model.blocks[0]])
    assert not isinstance(model.blocks[1], FSDPModule)
    model.blocks[0].unshard()
    with pytest.raises(RuntimeError, match=r"unsharded.*reshard\(\)"):
        fully_shard(model)
    assert not isinstance(model, FSDPModule)
    model.blocks[0].reshard()
    fully_shard(model)
    loss_of(model, next(batches(1, 2))).backward()


def _pickled(rank: int, world: int) -> None:
    model = shard_net(make_net())
    for call in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        for each in (model, model.blocks):
            with pytest.raises(pickle.PicklingError, match=r"(Net|Block) is sharded.*checkpoint\.save.*new \1"):
                call(each)
    copied = copy.deepcopy(model)
    loss_of(copied, next(batches(1, 2))).backward()


def _without_its_root(rank: int, world: int) -> None:
    part = shard_net(make_net()).norm  # as PEFT's merge_and_unload returns the model inside the one that was sharded
    gc.collect()
    with pytest.raises(RuntimeError, match=r"part of unit 'Net', whose module has been deleted\. Keep"):
        part(torch.ones(2, 12))


@pytest.mark.parametrize(
    "body",
    [_bad_modules, _bad_arguments, _tied_across_units, _wrong_moment, _pickled, _without_its_root],
    ids=lambda body: body.__name__.strip("_"),
)
def test_a_mistake_is_refused_with_the_fix_and_changes_nothing(ranks, body):
    ranks(2, body)


def _one_group_reversed(rank: int, world: int) -> None:
    net, mesh = nn.Linear(4, 3), DeviceMesh("cpu", [[0, 1], [3, 2]])
    refused(net, lambda: fully_shard(net, mesh=mesh), ValueError, "ascending order")


def test_all_ranks_refuse_a_mesh_of_which_one_group_is_reversed(ranks):
    ranks(4, _one_group_reversed)


def test_without_a_process_group_the_error_names_torchrun():
    model = nn.Linear(4, 4)
    refused(model, lambda: fully_shard(model), RuntimeError, "torchrun", "init_process_group")


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype"])
@pytest.mark.parametrize("value", ["bf16", torch.int32, torch.complex64, 16], ids=str)
def test_a_wrong_dtype_in_the_policy_is_named(field, value):
    with pytest.raises(TypeError, match=field):
        MixedPrecisionPolicy(**{field: value})


def _attributes(rank: int, world: int) -> None:
    model, plain = make_net(), make_net()
    for number, parameter in enumerate(model.parameters()):
        parameter.number, parameter.group = number, {"decay": number % 2}
    keys, shapes = list(plain.state_dict()), {k: v.shape for k, v in plain.state_dict().items()}
    shard_net(model)
    assert type(model).__name__ == "FSDPNet"
    assert isinstance(model, type(plain))

    def checked() -> None:
        assert [parameter.number for parameter in model.parameters()] == list(range(len(keys)))
        assert [parameter.group["decay"] for parameter in model.parameters()] == [n % 2 for n in range(len(keys))]

    checked()
    seen = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append((module.weight.number, module.weight.group)))
    tokens = next(batches(1, 2))
    loss = loss_of(model, tokens)
    assert seen == [(len(keys) - 1, {"decay": (len(keys) - 1) % 2})]  # the full parameter has them too
    # The root is kept after its forward: its parameters are plain, but a state dict holds the sharded ones.
    assert not isinstance(model.head.weight, DTensor)
    state = model.state_dict()
    assert list(state) == keys
    assert all(isinstance(value, DTensor) for value in state.values())
    assert {name: value.shape for name, value in state.items()} == shapes
    assert all(torch.equal(state[name].full_tensor(), value) for name, value in plain.state_dict().items())
    loss.backward()  # the state dict took the weights away; backward gathers them again
    wanted = loss_of(plain, tokens)
    wanted.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
    checked()


def test_attributes_and_state_dicts_survive_in_every_phase(ranks):
    ranks(2, _attributes)


def _load(rank: int, world: int) -> None:
    source, model, tokens = shard_net(make_net(seed=3)), shard_net(make_net(seed=4)), next(batches(1, 2))
    loss_of(model, tokens)  # the root stays gathered, with the old weights
    held = list(model.parameters())
    result = model.load_state_dict(source.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    del held
    with torch.no_grad():
        wanted = loss_of(make_net(seed=3), tokens)
        torch.testing.assert_close(loss_of(model, tokens), wanted)
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict({k: v for k, v in source.state_dict().items() if k != "head.weight"})


def test_load_state_dict_reaches_the_next_forward(ranks):
    ranks(2, _load)


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


def _raise(*_: Any) -> None:
    raise ValueError("in forward")


def _interrupted(rank: int, world: int, where: str, recompute: str | None) -> None:
    for at, reset in (("blocks.1", False), ("norm", True), ("blocks.2.down", False), ("embed", True)):
        _interrupted_at(rank, world, where, at, recompute, reset)


def _interrupted_at(rank: int, world: int, where: str, at: str, recompute: str | None, reset: bool) -> None:
    """Two steps, one that raises, one step: the weights are those of three steps."""
    models = [make_net(recompute=recompute), shard_net(make_net(recompute=recompute))]
    optimizers = [fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in models]
    for number, tokens in enumerate(batches(3, 4 * world)):
        if number == 2:
            model = models[1]
            hook = model.get_submodule(at).register_forward_hook(
                _raise if where == "forward" else lambda module, args, output: Bomb.apply(output)
            )
            with pytest.raises(ValueError, match=f"in {where}"):
                loss_of(model, tokens.chunk(world)[rank]).backward()
            hook.remove()
            model.zero_grad()
            if reset:
                model.reset()
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for model, optimizer, part in zip(models, optimizers, (tokens, tokens.chunk(world)[rank])):
            loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters()):
        assert_rows(ours.detach(), theirs.detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("where", "recompute"),
    [("forward", "reentrant"), ("backward", None), ("backward", "non-reentrant")]
    + [
        pytest.param(*each, marks=pytest.mark.full)
        for each in (("forward", None), ("forward", "non-reentrant"), ("backward", "reentrant"))
    ],
)
def test_a_step_that_raises_leaves_a_model_that_trains_on(ranks, where, recompute):
    ranks(2, _interrupted, where, recompute)


def _child_alone(rank: int, world: int) -> None:
    models = [make_net(), shard_net(make_net())]
    optimizers = [fully_shard_optimizer(torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4)) for m in models]
    x = torch.randn(3, 12)
    for tokens in batches(3, 4 * world):
        with torch.no_grad():
            torch.testing.assert_close(models[1].blocks[1](x), models[0].blocks[1](x))  # before the root ever ran, too
        for model, optimizer, part in zip(models, optimizers, (tokens, tokens.chunk(world)[rank])):
            loss = loss_of(model, part)
            model.blocks[0](x)  # with gradients that nobody asks for, between a forward and its backward
            loss.backward()
            model.blocks[2](x).sum().backward()  # a second loss of a part
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=2e-4, atol=2e-5)


def test_a_child_unit_can_be_called_alone_between_steps(ranks):
    ranks(2, _child_alone)
