"""State of whole matrices: saved by name, loaded on any number of ranks; and all else that is done to optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import flatshard
from flatshard import fully_shard_optimizer, whole_optimizer
from flatshard.captured import _optimizers_that_step
from flatshard.optim import CombinedOptimizer
from flatshard.optim.optimizer_state import state_places
from tests.dist.models import assert_rows
from tests.whole.cases import (
    MAKERS,
    Net,
    assert_equal_bits,
    bits,
    give,
    gradients,
    inside,
    muon,
    shard,
)

SPLIT = {"*qkv.weight": 3}


def build(model: Net, kind: str) -> Any:
    """An optimizer of a model, sharded or not, that is saved under the same names on any."""
    if kind == "muon":
        first = whole_optimizer(muon, model, inside, split=SPLIT, bucket_bytes=500)
        rest = [(n, p) for n, p in model.named_parameters() if not inside(n, p)]
        second = torch.optim.AdamW(rest, lr=1e-2, foreach=False)
        return CombinedOptimizer([first, second])
    if kind == "adamw":
        return whole_optimizer(lambda matrices: torch.optim.AdamW(matrices, foreach=False), model, inside, split=SPLIT)
    optimizer = MAKERS[kind]([p for p in model.parameters() if p.dim()])
    return fully_shard_optimizer(optimizer, whole=True, bucket_bytes=500) if _is_sharded(model) else optimizer


def _is_sharded(model: Net) -> bool:
    return isinstance(model, flatshard.FSDPModule)


def run(model: Net, optimizer: Any, steps: range) -> None:
    for step in steps:
        give(model, gradients(model, step))
        optimizer.step()
        optimizer.zero_grad()


def uninterrupted(kind: str, steps: int = 5) -> tuple[Net, Any]:
    model = Net()
    optimizer = build(model, kind)
    run(model, optimizer, range(steps))
    return model, optimizer


def _save(rank: int, world: int, path: Any, kind: str, how: dict[str, Any] | None) -> None:
    model = Net() if how is None else shard(Net(), **how)
    optimizer = build(model, kind)
    run(model, optimizer, range(3))
    flatshard.checkpoint.save(path, model, optimizer, progress=False)


def _load(rank: int, world: int, path: Any, kind: str, how: dict[str, Any] | None) -> None:
    model = Net() if how is None else shard(Net(), **how)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = build(model, kind)
    flatshard.checkpoint.load(path, model, optimizer, progress=False)
    run(model, optimizer, range(3, 5))
    reference, wanted = uninterrupted(kind)
    if kind == "soap":  # has a matrix that lies by columns; loaded, it lies by rows, and its products round otherwise
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert_rows(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    else:
        assert_equal_bits(model, reference)
    if kind == "spectral":
        assert optimizer.param_groups[0]["steps"] == wanted.param_groups[0]["steps"] == 5


@pytest.mark.parametrize(
    "kind",
    ["muon", "spectral", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("shampoo", "soap", "adafactor"))],
)
def test_checkpoints_load_on_other_ranks_and_unsharded(ranks, tmp_path, kind):
    if kind in ("shampoo", "soap"):
        pytest.importorskip("pytorch_optimizer")
    ranks(3, _save, tmp_path / "three", kind, {"layout": "flat"})
    ranks(2, _load, tmp_path / "three", kind, {})
    ranks(1, _load, tmp_path / "three", kind, None)
    ranks(1, _save, tmp_path / "plain", kind, None)
    ranks(2, _load, tmp_path / "plain", kind, {"strategy": 1})


class Numbered(torch.optim.Optimizer):
    """Keeps its momentum under a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault(0, torch.zeros_like(p))
                p.add_(momentum.mul_(0.9).add_(p.grad), alpha=-group["lr"])


def _numbered(rank: int, world: int, path: Any) -> None:
    model = shard(Net())
    optimizer = fully_shard_optimizer(Numbered(model.parameters()), whole=True)
    run(model, optimizer, range(1))
    flatshard.checkpoint.save(path, model, optimizer, progress=False)
    run(model, optimizer, range(1, 2))
    once = [bits(p.full_tensor()) for p in model.parameters()]
    flatshard.checkpoint.load(path, model, optimizer, progress=False)
    run(model, optimizer, range(1, 2))
    assert all(torch.equal(bits(p.full_tensor()), wanted) for p, wanted in zip(model.parameters(), once))


def test_entries_of_state_need_not_be_strings(ranks, tmp_path):
    ranks(2, _numbered, tmp_path / "saved")


def _refused(rank: int, world: int, path: Any) -> None:
    model = shard(Net())
    run(model, optimizer := build(model, "muon"), range(1))
    flatshard.checkpoint.save(path, model, optimizer, progress=False)
    other = CombinedOptimizer([whole_optimizer(muon, model, inside), optimizer.optimizers[1]])
    with pytest.raises(flatshard.checkpoint.CheckpointError, match=r"qkv.weight': 'momentum_buffer\[0:6\]' .* `split`"):
        flatshard.checkpoint.load(path, model, other, progress=False)
    with pytest.raises(ValueError, match="saved with another `split`"):
        other.load_state_dict(optimizer.state_dict())


def test_state_of_another_split_is_refused(ranks, tmp_path):
    ranks(2, _refused, tmp_path / "checkpoint")


# State dicts of torch


def _state_dicts(rank: int, world: int, folder: Any) -> None:
    full = StateDictOptions(full_state_dict=True)
    for kind in ("muon", "spectral", "adamw"):  # the last brings its counters up to date when it loads
        reference, _ = uninterrupted(kind)
        model = shard(Net())
        optimizer = build(model, kind)
        run(model, optimizer, range(3))
        weights = copy.deepcopy({n: p.detach().clone() for n, p in model.named_parameters()})

        def again(load: Any, kind=kind, weights=weights, reference=reference) -> None:
            other = shard(Net())
            fresh = build(other, kind)
            for name, parameter in other.named_parameters():
                parameter.detach().copy_(weights[name])
            load(other, fresh)
            run(other, fresh, range(3, 5))
            assert_equal_bits(other, reference)

        saved = copy.deepcopy(optimizer.state_dict())  # torch loads what it is given, without a copy
        again(lambda other, fresh, saved=saved: fresh.load_state_dict(saved))
        found = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))
        if kind == "muon":
            assert found["state"]["blocks.0.qkv.weight"]["momentum_buffer[0:6]"].shape == (6, 6)
            assert type(found["state"]["blocks.0.down.weight"]["momentum_buffer"]) is torch.Tensor
        again(lambda other, fresh, found=found: set_optimizer_state_dict(other, fresh, found, options=full))
        sharded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(sharded, checkpoint_id=folder / kind)

        def from_dcp(other: Any, fresh: Any, kind=kind) -> None:
            target = {"optimizer": get_optimizer_state_dict(other, fresh)}
            dcp.load(target, checkpoint_id=folder / kind)
            set_optimizer_state_dict(other, fresh, target["optimizer"])

        again(from_dcp)


def test_state_dicts_of_torch(ranks, tmp_path):
    ranks(2, _state_dicts, tmp_path)


# What else is done to optimizers


def _used(rank: int, world: int) -> None:
    tokens = torch.randint(0, 13, (12,), generator=torch.Generator().manual_seed(3))
    models, losses = [Net(), shard(Net())], []
    for model in models:
        mine = tokens if model is models[0] else tokens.chunk(world)[rank]
        optimizer = build(model, "muon")
        assert set(optimizer.defaults) >= {"lr", "weight_decay"}  # of both; some schedulers look there
        assert "momentum" not in optimizer.defaults
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(mine), mine)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            flatshard.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert [group["lr"] for group in optimizer.param_groups] == [0.02 * 0.125, 1e-2 * 0.125]
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        (torch.nn.functional.cross_entropy(model(mine), mine) * float("inf")).backward()
        scaler.step(optimizer)  # finds infinities, on every rank, and takes no step
        for name, parameter in model.named_parameters():
            old, new = (t.to_local() if hasattr(t, "to_local") else t for t in (before[name], parameter.detach()))
            assert torch.equal(bits(old), bits(new)), name
    for (name, plain), sharded in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(sharded.full_tensor(), plain.data, rtol=2e-2, atol=2e-3, msg=name)


def test_schedulers_clipping_and_scaling(ranks):
    ranks(2, _used)


def test_together_is_its_parts_to_a_captured_step():
    both = CombinedOptimizer([torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) for _ in range(2)])
    with _optimizers_that_step() as found:
        both.step()
    assert found == both.optimizers
    assert all(state_places(each) for each in found)


def _from_before(rank: int, world: int) -> None:
    """State of steps that were taken on shards goes to the owners."""
    for layout in ("tensor", "flat"):
        reference = Net()
        model = shard(copy.deepcopy(reference), layout=layout)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
        for each, optimizer in zip((model, reference), optimizers):
            run(each, optimizer, range(2))
        assert fully_shard_optimizer(optimizers[0], whole=lambda name, p: p.dim() > 1) is optimizers[0]
        for each, optimizer in zip((model, reference), optimizers):
            run(each, optimizer, range(2, 4))
        assert_equal_bits(model, reference)
        held = [p for p in model.parameters() if p.dim() > 1 and optimizers[0].state[p]]
        assert all(type(optimizers[0].state[p]["momentum_buffer"]) is torch.Tensor for p in held)
        assert 0 < len(held) < len([p for p in model.parameters() if p.dim() > 1])


def test_state_from_before(ranks):
    ranks(2, _from_before)
