"""Backwards that the user ends: `set_manual_backward_finalization` and `finalize_backward`, of torch 2.15."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatshard
from tests.fsdp2.cases import Launched, check_grads, mine, reference_grads, sharded_chain


def _finalized(rank, world, async_op, sizes):
    names = ("replicate", "shard")[-len(sizes) :]
    model = sharded_chain(mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    assert model.finalize_backward() is None  # before the first forward
    model.finalize_backward(async_op=True).wait()
    for step in range(2):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        for number in (0, 1):
            model(mine(rank, world, number)).sum().backward()
        assert not isinstance(model.head.weight, DTensor)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        with Launched(model) as launched:
            handle = model.finalize_backward(async_op=async_op)
        assert (launched.gathers, launched.reduces) == (0, 4 * len(sizes))
        if async_op:
            assert isinstance(handle, flatshard.GradientReductionHandle)
            with pytest.raises(RuntimeError, match="wait"):
                model.finalize_backward()
            handle.wait()
            handle.wait()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        check_grads(model, reference_grads(world, (0, 1)))
        model.zero_grad()
        model.set_manual_backward_finalization(False)
        if step:
            continue
        model(mine(rank, world)).sum().backward()  # ends by itself
        check_grads(model, reference_grads(world))
        model.zero_grad()
    model.set_manual_backward_finalization(True)
    model(mine(rank, world)).sum().backward()  # its reduces are waited for when it is finalized
    model.finalize_backward()
    check_grads(model, reference_grads(world))


@pytest.mark.parametrize(("async_op", "sizes"), [(False, (2,)), (True, (2,)), (True, (2, 1))])
def test_backwards_are_finalized_by_hand(ranks, async_op, sizes):
    ranks(2, _finalized, async_op, sizes)


def _refusals(rank, world):
    model = sharded_chain()
    loss = model(mine(rank, world)).sum()
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\)"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match=r"must be called on the root FSDP module; 'blocks\.0' is not"):
        model.blocks[0].set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model.blocks[0].finalize_backward()
    told = []

    def within(gradient):
        for call in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError, match="during a backward") as raised:
                call()
            told.append(raised)

    loss.register_hook(within)
    loss.backward()
    assert len(told) == 2
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="discarded by reset_iter_state"):
        handle.wait()
    model.zero_grad()
    model(mine(rank, world)).sum().backward()
    model.finalize_backward()
    check_grads(model, reference_grads(world))


def test_finalizing_where_it_cannot_be(ranks):
    ranks(2, _refusals)


def _hooked(rank, world, by_hand):
    model, wanted = sharded_chain(), {}
    names = {parameter: name for name, parameter in model.named_parameters()}

    def step(parameter):
        wanted.setdefault(names[parameter], []).append(parameter.grad.full_tensor().clone())
        parameter.grad = None

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(step)
    if by_hand:
        model.set_manual_backward_finalization(True)
    for _ in range(2):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model(mine(rank, world, 0)).sum().backward()
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        model(mine(rank, world, 1)).sum().backward()
        if by_hand:
            model.finalize_backward()
    for name, gradient in reference_grads(world, (0, 1)).items():
        torch.testing.assert_close(wanted[name], [gradient] * 2)


@pytest.mark.parametrize("by_hand", [False, True])
def test_hooks_of_gradients_after_backwards_that_were_not_waited_for(ranks, by_hand):
    ranks(2, _hooked, by_hand)
