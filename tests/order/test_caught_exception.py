"""An exception that the caller catches, between the micro-batches of a step: what was accumulated before it counts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flatshard import microbatch
from tests.order.cases import BOTH, backward_of_all, compare, grads_of, make, optimizer_of, rows, shard, weights_of

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]
MICRO = 3


class BadBatch(Exception):
    pass


def raise_it(*_):
    raise BadBatch


def loss_of(model, rank, number):
    return model(rows(rank, number)).square().mean()


def accumulate(model, rank, step, way, broken, place):
    """One step; the forward of the micro-batch ``broken`` raises and is caught, the others count."""
    for number in range(MICRO):
        last = number == MICRO - 1
        if way == "no sync":
            model.set_requires_gradient_sync(last)
        elif way == "no all-reduce":
            model.set_requires_all_reduce(last)
        marked = microbatch(model, is_first=number == 0, is_last=last) if way == "microbatch" else nullcontext()
        with marked:
            if number != broken:
                loss_of(model, rank, MICRO * step + number).backward()
                continue
            handle = model.get_submodule(place).register_forward_hook(raise_it)
            with pytest.raises(BadBatch):
                loss_of(model, rank, MICRO * step + number)
            handle.remove()


def _accumulated(rank, world, way, place, broken, shape, choices, control):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    models, reference = [shard(make(), by, mesh=mesh, **choices) for by in (BOTH if control else BOTH[:1])], make()
    optimizers = [optimizer_of(each.parameters()) for each in (*models, reference)]
    for step in range(2):
        for model in models:
            accumulate(model, rank, step, way, broken, place)
        for number in range(MICRO):
            if number != broken:
                backward_of_all([loss_of(reference, r, MICRO * step + number) for r in range(world)])
        for title, model in zip(("ours", "control"), models):
            compare(grads_of(model), grads_of(reference), f"{title}, step {step}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for title, model in zip(("ours", "control"), models):
        compare(weights_of(model), weights_of(reference), f"{title}, weights")


PLACES = ["blocks.1.up", "norm", ""]  # inside a unit, in the root, after it


@pytest.mark.parametrize("place", PLACES, ids=["in-a-unit", "in-the-root", "after-the-root"])
@pytest.mark.parametrize("way", ["plain", "no sync"])
def test_accumulated_gradients_outlive_a_forward_that_raised(interpreters, way, place):
    interpreters(2, _accumulated, way, place, 1, (2,), {}, control=place == "norm")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["plain", "no sync", "no all-reduce", "microbatch"])
def test_so_do_those_that_wait_for_the_outer_axis(interpreters, way):
    interpreters(4, _accumulated, way, "blocks.1.up", 1, (2, 2), {}, control=way == "no sync")


@pytest.mark.parametrize("strategy", [0, 1, 2])
@pytest.mark.parametrize("way", ["no sync", "microbatch"])
def test_so_do_those_of_other_strategies(interpreters, way, strategy):
    interpreters(2, _accumulated, way, "blocks.1.up", 1, (2,), {"strategy": strategy}, control=False)


def _given_up(rank, world):
    """Dropping them is the caller's word: `reset`, or `zero_grad` on the model."""
    for forget in ("reset", "zero_grad"):
        model, reference = shard(make()), make()
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, 0).backward()
        handle = model.norm.register_forward_hook(raise_it)
        with pytest.raises(BadBatch):
            loss_of(model, rank, 1)
        handle.remove()
        getattr(model, forget)()
        model.set_requires_gradient_sync(True)
        loss_of(model, rank, 2).backward()
        backward_of_all([loss_of(reference, r, 2) for r in range(world)])
        compare(grads_of(model), grads_of(reference), forget)


def test_reset_and_zero_grad_drop_them(interpreters):
    interpreters(2, _given_up)


def _first_raises(rank, world):
    """The first micro-batch, or two in a row; the weights that the later ones use are those of this step."""
    mesh = init_device_mesh("cpu", (2,))
    for strategy in (1, 3):
        model, reference = shard(make(), mesh=mesh, strategy=strategy), make()
        optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
        for step in range(3):
            accumulate(model, rank, step, "microbatch", 0, "blocks.0.down")
            for number in (1, 2):
                backward_of_all([loss_of(reference, r, MICRO * step + number) for r in range(world)])
            compare(grads_of(model), grads_of(reference), f"strategy {strategy}, step {step}:")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_a_first_micro_batch_that_raised_leaves_no_old_weights(interpreters):
    interpreters(2, _first_raises)


@torch.no_grad()
def _evaluation(rank, world):
    """An evaluation that raises between micro-batches."""
    model, reference = shard(make()), make()
    with torch.enable_grad():
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, 0).backward()
    handle = model.blocks[2].register_forward_hook(raise_it)
    with pytest.raises(BadBatch):
        loss_of(model, rank, 1)
    handle.remove()
    with torch.enable_grad():
        model.set_requires_gradient_sync(True)
        loss_of(model, rank, 2).backward()
        for number in (0, 2):
            backward_of_all([loss_of(reference, r, number) for r in range(world)])
    compare(grads_of(model), grads_of(reference))


def test_an_evaluation_that_raised_drops_nothing(interpreters):
    interpreters(2, _evaluation)
