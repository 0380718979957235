"""Bytes at rest, and what `del model` frees without the garbage collector."""

from __future__ import annotations

import gc
import time
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from flatshard import _torch, fully_shard
from flatshard.engine.units.unit import unit_of
from flatshard.rehearsal import rehearse
from tests.dist.test_counts import DIM, equal, root_of, rows, sharded_chain


def storages(model: nn.Module) -> dict[str, StorageWeakRef]:
    """Every storage that the units hold."""
    found = {}
    for unit in root_of(model).units:
        for number, group in enumerate(unit.groups):
            found[f"{unit.name} {number} main"] = StorageWeakRef(group.main.local.untyped_storage())
            found[f"{unit.name} {number} gathered"] = StorageWeakRef(group.source.buffer.local.untyped_storage())
            for member in group.params:
                if member.sharded.grad is not None:
                    local = member.sharded.grad.to_local()
                    found[f"{unit.name} {member.name} gradient"] = StorageWeakRef(local.untyped_storage())
    return found


class Mixed(nn.Module):
    """Groups of several dtypes, frozen ones, scalars, and rows that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, DIM))
        self.inner[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.short = nn.Parameter(torch.randn(3, DIM, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.short.float().sum(0)


def _bytes(rank: int, world: int) -> None:
    model = Mixed()
    originals = list(model.parameters())
    shapes = [(p.shape, p.element_size()) for p in originals]
    before = [StorageWeakRef(p.untyped_storage()) for p in originals]
    fully_shard(model.inner)
    fully_shard(model)
    assert all(ref.expired() for ref in before)
    equal([p.untyped_storage().nbytes() for p in originals], [0] * len(originals))
    model(rows()).sum().backward()
    held = 0
    for unit in root_of(model).units:
        for group in unit.groups:
            numel = group.layout.shard_numel  # of a replicated group too: it has one shard
            equal(group.main.local.untyped_storage().nbytes(), numel * group.main.local.element_size())
            if group.source.buffer is not group.main:  # what is replicated is used where it is
                equal(group.source.buffer.local.untyped_storage().nbytes(), 0)
            held += group.main.local.untyped_storage().nbytes()
    ideal = sum(-(-shape[0] // world) * shape[1:].numel() * size if shape else size for shape, size in shapes)
    padding = 15 * 4 * len(shapes)  # every run starts at a multiple of 16 elements
    assert ideal <= held <= ideal + padding
    root = root_of(model)
    equal((root.gather_pool.live_bytes, root.gather_pool.live_buffers), (0, 0))
    model.zero_grad()
    for unit in root_of(model).units:
        for group in unit.groups:
            main_grads = group.gradients.main_grads
            assert main_grads.buffer is None or not main_grads.buffer.local.untyped_storage().nbytes()
    kept = [parameter.grad for parameter in model.parameters()]
    assert kept == [None] * len(kept)


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_at_rest_are_those_of_the_layout_and_the_originals_are_freed(ranks, world):
    ranks(world, _bytes)


class _Memory:
    """In the place of a CUDA memory pool, which caches what was allocated from it as long as it exists."""


def _given_back(rank: int, world: int) -> None:
    model = sharded_chain()
    model(rows()).sum().backward()
    grads = [group.gradients.main_grads for unit in root_of(model).units for group in unit.groups]

    def pools() -> list[weakref.ref[_Memory]]:
        with mock.patch.object(_torch, "memory", side_effect=lambda device: _Memory()):
            return [weakref.ref(each._memory) for each in grads]  # as a micro-batch that is not the last makes them

    found = pools()
    model.zero_grad()
    with torch.no_grad():
        model(rows())
    equal([pool() for pool in found], [None] * len(grads))
    found = pools()
    model(rows()).sum().backward()  # all of a step
    equal([pool() for pool in found], [None] * len(grads))


def test_memory_of_gradients_that_were_added_to_is_given_back(ranks):
    ranks(2, _given_back)


def _alive(held: dict[str, StorageWeakRef], ignored: str) -> list[str]:
    """The storages that are left. Gloo's threads let go of one a moment after its work has been waited for."""
    for _ in range(100):
        alive = [name for name, ref in held.items() if ignored not in name and not ref.expired()]
        if not alive:
            break
        time.sleep(0.01)
    return alive


def _deletion(rank: int, world: int, recompute: str | None, last: str) -> None:
    gc.collect()
    gc.disable()
    try:
        model = sharded_chain(recompute=recompute)
        if last == "lists":
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
            model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            loss = model(rows()).sum()
            if last != "forward":
                loss.backward()
                optimizer.step()
        if last == "raises":
            with pytest.raises(RuntimeError, match="shapes"):
                model(torch.ones(1, DIM + 1))
        held = storages(model)
        dead = [weakref.ref(model), weakref.ref(unit_of(model)), weakref.ref(root_of(model))]
        if last != "loss":
            del loss
        del model, optimizer
        equal([ref() for ref in dead], [None] * 3)
        # The graph of a loss that is still there knows the full parameters; their storage is empty after a backward.
        ignored = "gathered" if last == "loss" else "nothing"
        equal(_alive(held, ignored), [])
    finally:
        gc.enable()


@pytest.mark.parametrize("last", ["backward", "loss", "forward", "raises", "lists"])
def test_del_frees_everything_without_the_garbage_collector(ranks, last):
    # The graph of a checkpointed module owns the module, so a loss that is kept keeps it, and so does an exception.
    for recompute in (None,) if last in ("loss", "raises") else (None, "reentrant", "non-reentrant"):
        ranks(2, _deletion, recompute, last)


def test_zero_grad_of_the_model_frees_gradients():
    with rehearse(2):
        model = sharded_chain()
        model(rows()).sum().backward()
        held = {name: StorageWeakRef(_torch.local_of(p.grad).untyped_storage()) for name, p in model.named_parameters()}
        model.zero_grad()
        equal(_alive(held, "nothing"), [])
