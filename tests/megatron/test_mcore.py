"""Megatron-Core's training loop: its wrapper, its optimizer, tensor parallelism and experts by marks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard.megatron import (
    DistributedDataParallelConfig,
    DistributedOptimizer,
    FSDPDistributedIndex,
    FullyShardedDataParallel,
)
from flatshard.megatron.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.megatron.cases import DIM, Experts, Model, ParallelMLP, groups_of

MICRO, ROWS, CLIP = 2, 8, 0.5


def data(steps):
    rng = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randn(MICRO, ROWS, DIM, generator=rng)


def wrapped(module, groups, **config):
    config = {"data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True, **config}
    config = DistributedDataParallelConfig(overlap_param_gather=True, use_megatron_fsdp=True, **config)
    mcore = SimpleNamespace(calculate_per_token_loss=False, init_model_with_meta_device=False)
    units = [ParallelMLP, Experts]
    return FullyShardedDataParallel(mcore, config, module, fsdp_unit_modules=units, pg_collection=groups)


def loop(model, optimizer, rank, world, steps, batches=None):
    """The calls of Megatron-Core's loop, in its order."""
    norms = []
    for batch in batches or data(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with model.no_sync():
            for rows in batch[:-1]:
                (model(rows.chunk(world)[rank]).square().mean()).backward()
        model.start_param_sync()
        model(batch[-1].chunk(world)[rank]).square().mean().backward()
        model.start_grad_sync()
        model.finish_grad_sync(force_all_reduce=model.force_all_reduce)
        model.scale_gradients(1 / MICRO)
        stepped, norm, _ = optimizer.step()
        assert stepped
        norms.append(norm)
        model.start_param_sync(force_sync=True)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.synchronize_param_gather()
    model.stop_communication()
    return norms


def one_process(steps, experts=True):
    reference = Model()
    if not experts:
        reference.layers[1] = nn.Identity()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for batch in data(steps):
        for rows in batch:
            (reference(rows).square().mean() / MICRO).backward()
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return reference, norms


def whole(tensor):
    return uneven_dtensor_to_full_tensor(tensor.detach())


def _tensor_parallel(rank, world, folder):
    groups = groups_of(dp_cp=[[0, 2], [1, 3]], tp=[[0, 1], [2, 3]])
    built = Model(tp=groups.tp)
    built.layers[1] = nn.Identity()
    model = wrapped(built, groups)
    model.broadcast_params()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    optimizer = DistributedOptimizer(optimizer, [model], [model.param_and_grad_buffer], clip_grad=CLIP)
    norms = loop(model, optimizer, groups.dp_cp.rank(), groups.dp_cp.size(), 3)
    reference, wanted = one_process(3, experts=False)
    assert norms == pytest.approx(wanted, rel=1e-4)
    plain = dict(reference.named_parameters())
    for name, parameter in model.state_dict_for_save_checkpoint().items():
        assert parameter.shape == plain[name].shape, name  # also of what is cut by rows
        torch.testing.assert_close(whole(parameter), plain[name].data, rtol=1e-4, atol=1e-5, msg=name)
    state = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict()}
    dcp.save(state, checkpoint_id=folder)
    # Into another model, which then goes on as this one does.
    again = wrapped(_other(groups), groups)
    fresh = torch.optim.AdamW(again.parameters(), lr=1e-2, eps=1e-4)
    fresh = DistributedOptimizer(fresh, [again], None, clip_grad=CLIP)
    target = {"model": again.sharded_state_dict(), "optimizer": fresh.sharded_state_dict(is_loading=True)}
    dcp.load(target, checkpoint_id=folder)
    again.load_state_dict(target["model"], strict=True)
    fresh.load_state_dict(target["optimizer"])
    more = list(data(4))[3:]
    assert loop(again, fresh, groups.dp_cp.rank(), 2, 1, more) == loop(
        model, optimizer, groups.dp_cp.rank(), 2, 1, more
    )
    for (name, one), other in zip(again.named_parameters(), model.parameters()):
        assert torch.equal(one.to_local(), other.to_local()), name


def _other(groups):
    built = Model(tp=groups.tp)
    built.layers[1] = nn.Identity()
    for parameter in built.parameters():
        parameter.data.zero_()
    return built


def test_the_loop_with_tensor_parallelism_by_marks(ranks, tmp_path):
    ranks(4, _tensor_parallel, tmp_path / "checkpoint")


def _experts(rank, world):
    groups = groups_of(dp_cp=[[0, 1, 2, 3]], expt_dp=[[0, 2], [1, 3]], ep=[[0, 1], [2, 3]])
    model = wrapped(Model(ep=groups.ep), groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    optimizer = DistributedOptimizer(optimizer, [model], [model.param_and_grad_buffer])
    loop(model, optimizer, rank, world, 3)
    reference = Model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    for batch in data(3):
        for rows in batch:
            (reference(rows).square().mean() / MICRO).backward()
        theirs.step()
        theirs.zero_grad()
    mine = groups.ep.rank()
    plain = {name.replace(f"local.{mine}.", "local.0."): p for name, p in reference.named_parameters()}
    for name, parameter in model.module.module.named_parameters():
        torch.testing.assert_close(whole(parameter), plain[name].data, rtol=2e-4, atol=2e-5, msg=name)


def test_the_loop_with_experts_by_marks(ranks):
    """Their gradients are means over all ranks, whose data has reached them, not over those that hold them."""
    ranks(4, _experts)


def _orders(rank, world):
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim")
    for given in ((config, nn.Linear(2, 2)), (nn.Linear(2, 2), config)):
        model = FullyShardedDataParallel(SimpleNamespace(), *given)
        assert isinstance(model.megatron_fsdp_dist_index, FSDPDistributedIndex)
        assert model.ddp_config is config
        assert model.state_dict().keys() == {"weight", "bias"}
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute"):
        FullyShardedDataParallel(
            SimpleNamespace(), DistributedDataParallelConfig(delay_wgrad_compute=True), nn.Linear(2, 2)
        )
    with pytest.raises(TypeError, match="module"):
        FullyShardedDataParallel(SimpleNamespace(), config, config)


def test_both_orders_of_arguments(ranks):
    ranks(2, _orders)
