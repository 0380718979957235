"""Steps of state, and of weights, that are copied from host memory in pieces: the same bits as without."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import flatshard
from flatshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from flatshard.engine.units.unit import unit_of
from flatshard.engine.weights.offload import Home, HostCopy
from flatshard.optim import AdamW8bit, adamw8bit, streaming
from flatshard.optim.optimizer_state import is_settled
from tests.dist import test_step_in_backward
from tests.dist.models import batches, loss_of, make_net
from tests.dist.test_engine import shard_net
from tests.dist.test_step_in_backward import MIXED, ROWS, Paths
from tests.fsdp2.test_offload import keep_apart

OPTIMIZERS = test_step_in_backward.OPTIMIZERS | {
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.02, amsgrad=True),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "8 bits": lambda params: AdamW8bit(params, lr=0.02),
}
ROUNDED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
ON_DEVICE = CPUOffloadPolicy(device_grad_bytes=1 << 30)
CASES = {
    "zero 3": {},
    "zero 1": {"strategy": 1, "mp_policy": MIXED},
    "flat": {"layout": "flat"},
    "cast": {"mp_policy": ROUNDED},
    "offload": {"offload_policy": CPUOffloadPolicy(), "mp_policy": MIXED},
    "offload, zero 1": {"offload_policy": CPUOffloadPolicy(), "strategy": 1, "mp_policy": MIXED},
    "offload, float32": {"offload_policy": CPUOffloadPolicy()},
    "offload, kept": {"offload_policy": ON_DEVICE, "mp_policy": MIXED},
    "offload, some kept": {"offload_policy": CPUOffloadPolicy(device_grad_bytes=4096), "layout": "flat"},
}


def _as_on_accelerators(patch: pytest.MonkeyPatch) -> None:
    """`CPUOffloadPolicy` works as on a mesh of accelerators, pieces are small, and short rows are in 8 bits too."""
    keep_apart(patch)
    patch.setattr(streaming, "PIECE", 64)
    patch.setattr(adamw8bit, "_LEAST_ROW", 8)


def _groups(model, decays=(0.1, 0.0)):
    """Matrices and the rest, with other options."""
    parameters = list(model.parameters())
    sets = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [
        {"params": params, "lr": 0.01 * (1 + n), "weight_decay": d} for n, (params, d) in enumerate(zip(sets, decays))
    ]


def _held(value):
    return value.to_local() if isinstance(value, DTensor) else value


def _snapshot(model, optimizer):
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    copied = {
        name: {key: copy.deepcopy(_held(value)) for key, value in entries.items()} for name, entries in state.items()
    }
    return [_held(p).detach().clone() for p in model.parameters()], copied


def _assert_equal(ours, theirs):
    for one, two in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(one, two)
    assert ours[1].keys() == theirs[1].keys()
    for name, entries in ours[1].items():
        assert list(entries) == list(theirs[1][name]), name
        for key, value in entries.items():
            assert type(value) is type(theirs[1][name][key])
            assert torch.equal(value, theirs[1][name][key]), (name, key)


def _train(model, optimizer, rank, world, micro=1, steps=4, skip=0):
    for number, tokens in enumerate(batches(skip + steps, ROWS)):
        parts = tokens.chunk(world)[rank].chunk(micro)
        for index, part in enumerate(parts) if number >= skip else ():
            with microbatch(model, is_first=index == 0, is_last=index == micro - 1):
                loss_of(model, part).backward()
        if number >= skip:
            optimizer.step()
            optimizer.zero_grad()


def _equal(rank, world, kind, case, micro, options):
    choices, found = CASES[case], []
    for streams in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            _as_on_accelerators(patch)
            model = shard_net(make_net(), **choices)
            told = options if streams else {"offload_state": False}
            optimizer = fully_shard_optimizer(OPTIMIZERS[kind](_groups(model)), **told)
            run = mock.Mock(side_effect=streaming.StreamedStep.step, autospec=True)
            patch.setattr(streaming.StreamedStep, "step", lambda *given, run=run: run(*given))
            _train(model, optimizer, rank, world, micro)
            assert run.called == streams
            found.append(_snapshot(model, optimizer))
    _assert_equal(*found)


OFFLOADED, EARLY = {"offload_state": True}, {"in_backward": True}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["zero 3", "zero 1", "flat", "cast", "offload"])
@pytest.mark.parametrize(
    ("kind", "micro", "options"),
    [
        ("adamw", 1, OFFLOADED | EARLY),
        ("fused", 2, OFFLOADED | EARLY),
        ("amsgrad", 2, OFFLOADED),
        ("momentum", 1, OFFLOADED | EARLY),
        ("asgd", 1, OFFLOADED),
        ("nadam", 1, OFFLOADED),
        ("8 bits", 2, OFFLOADED),
        ("8 bits", 1, OFFLOADED | EARLY),
    ],
)
def test_state_in_host_memory(ranks, kind, case, micro, options):
    if kind == "8 bits" and case == "cast":  # which that optimizer does itself
        case = "offload, float32"
    ranks(2, _equal, kind, case, micro, options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["offload", "offload, zero 1", "offload, float32"])
@pytest.mark.parametrize(
    ("kind", "micro"), [("adamw", 1), ("fused", 2), ("amsgrad", 1), ("momentum", 2), ("8 bits", 1)]
)
def test_weights_in_host_memory(ranks, kind, case, micro):
    ranks(2, _equal, kind, case, micro, EARLY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "micro"), [("adamw", 2), ("momentum", 1), ("8 bits", 1), ("8 bits", 2)])
def test_weights_in_host_memory_by_default(ranks, kind, micro):
    ranks(2, _equal, kind, "offload", micro, {})


def _on_the_cpu(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        _as_on_accelerators(patch)
        patch.setattr(streaming.StreamedStep, "step", mock.Mock(side_effect=AssertionError("streamed")))

        class Mine(torch.optim.SGD):
            pass

        for make in (OPTIMIZERS["fused"], lambda params: Mine(params, lr=0.1)):
            model = shard_net(make_net(), **CASES["offload"])
            _train(model, fully_shard_optimizer(make(model.parameters())), rank, world, steps=2)


def test_fused_and_unknown_optimizers_step_weights_in_host_memory_on_the_cpu(ranks):
    ranks(2, _on_the_cpu)


def _paths(rank, world, options, policy):
    """Parameters that are not sharded, some without a gradient in some steps, and one that is frozen at first."""
    found = []
    for streams in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            _as_on_accelerators(patch)
            torch.manual_seed(0)
            model = Paths()
            ignored = set(model.plain.parameters())
            for unit in (model.a, model.b, model.c, model):
                fully_shard(unit, ignored_params=ignored, offload_policy=policy)
            model.a.bias.requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            fully_shard_optimizer(optimizer, **(options if streams else {}))
            for step in range(7):
                model.a.bias.requires_grad_(step >= 3)
                model(torch.ones(2, 6) * (rank + 1), by_b=step % 3 < 2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 4:  # what users change counts
                    optimizer.state[model.b.weight]["exp_avg"].to_local().mul_(0.5)
                    optimizer.state[model.c.weight]["exp_avg"] = torch.zeros_like(model.c.weight, requires_grad=False)
        found.append(_snapshot(model, optimizer))
    _assert_equal(*found)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (OFFLOADED, OffloadPolicy()),
        (OFFLOADED | EARLY, OffloadPolicy()),
        (EARLY, CPUOffloadPolicy()),
        (OFFLOADED, CPUOffloadPolicy()),
    ],
)
def test_parameters_without_gradients_and_changed_state(ranks, options, policy):
    ranks(2, _paths, options, policy)


def _other_dtype(rank, world, kind, options):
    """Gradients that are given in their own dtype may have another one than in the last step."""
    model = shard_net(make_net(), mp_policy=MixedPrecisionPolicy(grad_dtype=torch.bfloat16))
    optimizer = fully_shard_optimizer(OPTIMIZERS[kind](model.parameters()), **options)
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(grad_dtype=torch.bfloat16)):
        _train(model, optimizer, rank, world, steps=1)
        before = [_held(p).detach().clone() for p in model.parameters()]
        model.set_mp_policy(policy)
        _train(model, optimizer, rank, world, steps=1)
        assert not any(torch.equal(_held(p), old) for p, old in zip(model.parameters(), before) if old.numel())


@pytest.mark.parametrize(("kind", "options"), [("adamw", OFFLOADED), ("8 bits", OFFLOADED), ("8 bits", {})])
def test_gradients_get_another_dtype(ranks, kind, options):
    ranks(2, _other_dtype, kind, options)


def _loaded(rank, world, kind, before, after, how, folder):
    """Training goes on from a state that was saved with and without offloaded state."""
    found = []
    for is_loaded in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            _as_on_accelerators(patch)
            model = shard_net(make_net())
            optimizer = fully_shard_optimizer(OPTIMIZERS[kind](_groups(model)), **(before if is_loaded else {}))
            _train(model, optimizer, rank, world, steps=2)
            if is_loaded:
                saved, model = (model, optimizer), shard_net(make_net(seed=1))
                optimizer = fully_shard_optimizer(OPTIMIZERS[kind](_groups(model)), **after)
                if how == "state dict":
                    model.load_state_dict(saved[0].state_dict())
                    optimizer.load_state_dict(copy.deepcopy(saved[1].state_dict()))
                else:
                    flatshard.checkpoint.save(folder, *saved, progress=False)
                    flatshard.checkpoint.load(folder, model, optimizer, progress=False)
            _train(model, optimizer, rank, world, steps=2, skip=2)
            found.append(_snapshot(model, optimizer))
    _assert_equal(*found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["state dict", "checkpoint"])
@pytest.mark.parametrize("kind", ["adamw", "fused", "8 bits"])
@pytest.mark.parametrize(("before", "after"), [(OFFLOADED, OFFLOADED), (OFFLOADED, {}), ({}, OFFLOADED | EARLY)])
def test_state_is_loaded_into_the_same_and_the_other_kind(ranks, kind, before, after, how, tmp_path):
    ranks(2, _loaded, kind, before, after, how, str(tmp_path / "saved"))


def _work_of_the_host(rank, world):
    """How often the host casts weights, and gradients are copied to it, in the first step and in the third."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        _as_on_accelerators(patch)
        model = shard_net(make_net(), offload_policy=CPUOffloadPolicy(), mp_policy=MIXED)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), in_backward=True)
        cast, write = HostCopy._run, Home.write
        patch.setattr(HostCopy, "_run", lambda *given: found.append("cast") or cast(*given))
        patch.setattr(Home, "write", lambda *given: found.append("gradients") or write(*given))
        _train(model, optimizer, rank, world, steps=1)
        first = list(found)
        _train(model, optimizer, rank, world, steps=1)
        found.clear()
        _train(model, optimizer, rank, world, steps=1)
        third = list(found)
        found.clear()
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)  # main weights that users change are cast again
        _train(model, optimizer, rank, world, steps=1)
    return first, third, list(found)


def test_the_host_does_no_arithmetic(ranks):
    for first, third, changed in ranks(2, _work_of_the_host):
        assert first.count("cast") == first.count("gradients") > 1
        assert third == []
        assert changed == ["cast"]


def _through_data(model):
    model.blocks[0].up.weight.data.mul_(0.5)
    model.blocks[0].reshard()


CHANGES = {
    "operation": lambda model, saved: model.blocks[0].up.weight.detach().mul_(0.5),
    "local": lambda model, saved: model.blocks[0].up.weight.to_local().detach().mul_(0.5),
    "data": lambda model, saved: _through_data(model),
    "state dict": lambda model, saved: model.load_state_dict(saved),
    "other optimizer": lambda model, saved: _other_step(model),
    "gathered": lambda model, saved: _written(model),
}


def _other_step(model):
    weight = model.blocks[0].up.weight
    weight.grad = torch.ones_like(weight, requires_grad=False)
    fully_shard_optimizer(torch.optim.SGD([weight], lr=0.1)).step()
    weight.grad = None


def _written(model):
    with flatshard.gathered(model.blocks[0], write=True):
        model.blocks[0].up.weight.detach().mul_(0.5)


def _changed(rank, world, change, before_step):
    """Outputs of a model whose weights were changed between the step and the next forward, or before the step."""
    found = []
    for early in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            _as_on_accelerators(patch)
            model = shard_net(make_net(), offload_policy=CPUOffloadPolicy(), mp_policy=MIXED)
            saved = copy.deepcopy(model.state_dict())
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), in_backward=early)
            _train(model, optimizer, rank, world, steps=2)
            tokens = next(batches(1, ROWS)).chunk(world)[rank]
            loss_of(model, tokens).backward()
            acts = [optimizer.step, functools.partial(CHANGES[change], model, saved)]
            for act in reversed(acts) if early and before_step else acts:
                act()
            optimizer.zero_grad()
            found.append(loss_of(model, tokens).item())
    assert found[0] == found[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before_step", [False, True])
def test_weights_that_are_changed_count_in_the_next_forward(ranks, change, before_step):
    ranks(2, _changed, change, before_step)


def _stepped_on_the_cpu(rank, world, early, is_one):
    """Losses of a model whose biases are stepped by a fused optimizer on the CPU, before or with its weights."""
    found = []
    for options in (early, {"offload_state": False}):
        with pytest.MonkeyPatch.context() as patch:
            _as_on_accelerators(patch)
            model = shard_net(make_net(), offload_policy=CPUOffloadPolicy(), mp_policy=MIXED)
            fused, others = ([p for p in model.parameters() if (p.dim() == 1) is kind] for kind in (True, False))
            groups = [{"params": fused, "fused": True}], [{"params": others}]
            groups = [[*groups[0], *groups[1]]] if is_one else groups
            optimizers = [torch.optim.AdamW(each, lr=0.05) for each in groups]
            fully_shard_optimizer(optimizers[-1], **options)
            found.append([])
            for tokens in batches(4, ROWS):
                loss = loss_of(model, tokens.chunk(world)[rank])
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                found[-1].append(loss.item())
    assert found[0] == found[1]


@pytest.mark.parametrize(("early", "is_one"), [(EARLY, False), ({}, False), ({}, True)])
def test_weights_that_are_stepped_on_the_cpu_beside_count_in_the_next_forward(ranks, early, is_one):
    ranks(2, _stepped_on_the_cpu, early, is_one)


def _broken(rank, world):
    """An exception in a backward: gradients that were not stepped are in host memory, complete."""
    with pytest.MonkeyPatch.context() as patch:
        _as_on_accelerators(patch)
        model = shard_net(make_net(), offload_policy=CPUOffloadPolicy())
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), in_backward=True)
        _train(model, optimizer, rank, world, steps=2)
        tokens = next(batches(1, ROWS)).chunk(world)[rank]
        gradients = []
        for is_broken in (False, True):
            for each in (group.gradients for block in model.blocks for group in unit_of(block).groups):
                patch.setattr(each, "on_final", lambda complete, reduced: None)
            if is_broken:
                model.embed.register_full_backward_pre_hook(_fail)
            with pytest.raises(KeyError) if is_broken else nullcontext():
                loss_of(model, tokens).backward()
            with torch.no_grad():
                model(tokens[:, :-1])
            gradients.append([_held(p.grad).clone() for p in model.blocks[-1].parameters()])
            model.zero_grad()
    assert all(map(torch.equal, *gradients))
    assert all(grad.any() for grad in gradients[0])


def _clipped(rank, world, kind, streams):
    """Weights after steps in which gradients are clipped, and used in other ways, and how many were copied."""
    found = []
    for policy in (CPUOffloadPolicy(), ON_DEVICE):
        with pytest.MonkeyPatch.context() as patch:
            _as_on_accelerators(patch)
            model = shard_net(make_net(), offload_policy=policy, mp_policy=MIXED if streams else ROUNDED)
            optimizer = fully_shard_optimizer(OPTIMIZERS[kind](_groups(model)), offload_state=streams)
            write, copied, norms, counts = Home.write, [], [], []
            patch.setattr(Home, "write", lambda *given, to=copied, write=write: to.append(1) or write(*given))
            first = model.blocks[0].up.weight
            for number, tokens in enumerate(batches(9, ROWS)):
                losses = [loss_of(model, part) for part in tokens.chunk(world)[rank].chunk(2 if number == 6 else 1)]
                for loss in losses:
                    loss.backward()  # two backwards in one step: the second adds to the first
                before = len(copied)
                if number == 1:
                    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                elif number == 2:
                    first.grad = torch.ones_like(first.grad)
                elif number == 3:
                    first.grad = None
                elif number == 4:
                    flatshard.clip_grad_norm_(list(model.blocks[0].parameters())[:2], 0.05)  # of part of a group
                elif number == 5:
                    model.zero_grad()
                    loss_of(model, tokens.chunk(world)[rank]).backward()
                norms += [flatshard.clip_grad_norm_(model, most) for most in ((0.1, 1e9) if number == 7 else (0.1,))]
                optimizer.step()
                if number == 8:  # after the step they are what the optimizer has seen
                    assert flatshard.find_nonfinite(model) == []
                    norms += [p.grad.full_tensor().norm() for p in model.parameters()]
                optimizer.zero_grad()
                counts.append(len(copied) - before)
            found.append((norms, counts, _snapshot(model, optimizer)))
    return found


@pytest.mark.parametrize(("kind", "streams"), [("adamw", True), ("8 bits", True), ("fused", False)])
def test_gradients_that_stay_on_the_device_are_clipped_and_stepped_there(ranks, kind, streams):
    for (norms, _, expected), (found, counts, state) in ranks(2, _clipped, kind, streams):
        _assert_equal(state, expected)
        assert found == norms
        if not streams:
            continue
        assert counts == [0, 8, 8, 1, 2, 0, 0, 8, 8]


def _fail(*given):
    raise KeyError("in backward")


def test_gradients_that_are_not_stepped_come_to_the_host(ranks):
    ranks(2, _broken)


def test_refusals():
    layer = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"offload_state=True supports torch's elementwise .* on whole parameters; leave"
    ):
        fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), offload_state=True, whole=True)
    with pytest.raises(
        ValueError, match=r"offload_state=True supports .* AdamW8bit on shards, not Adafactor; leave it out"
    ):
        fully_shard_optimizer(torch.optim.Adafactor(layer.parameters()), offload_state=True)
    with pytest.raises(TypeError, match=r"offload_state"):
        fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), offload_state="yes")
    optimizer = fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), offload_state=True)
    with pytest.raises(ValueError, match=r"has offload_state=True, which cannot be captured"):
        is_settled(optimizer)
    with pytest.raises(RuntimeError, match=r"a copy of an optimizer with .* offload_state=True cannot be used"):
        copy.deepcopy(optimizer).step()
