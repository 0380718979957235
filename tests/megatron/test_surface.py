"""The functions and methods of Megatron-FSDP's first version: what each does here, and what is refused."""

import copy
import gc
import inspect
import logging
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatshard
import flatshard.megatron as megatron
from flatshard.engine.units.unit import unit_of
from flatshard.megatron import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    utils,
)
from flatshard.megatron.distributed_data_parallel_config import schedule_of
from flatshard.megatron.fully_shard import ShardingStrategy
from flatshard.megatron.param_and_grad_buffer import (
    FixedPoolAllocator,
    MaxPoolAllocator,
    StorageResizeBasedBucketAllocator,
)
from tests.dist.models import Block, assert_rows, batches, loss_of, make_net

ROWS = 8
BF16 = torch.bfloat16


def tokens_of(rank, world, number=0):
    return list(batches(number + 1, ROWS))[number].chunk(world)[rank]


def sharded(**kwargs):
    model = kwargs.pop("model", None)
    model = make_net(depth=2) if model is None else model
    kwargs.setdefault("fsdp_unit_modules", [Block])
    return fully_shard_model(model, **kwargs)


def adamw(model):
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))


def output(model, tokens):
    with torch.no_grad():
        return model(tokens).float()


# Names

# fmt: off
MODEL_ARGUMENTS = [
    "module", "device_mesh", "dp_shard_dim", "dp_outer_dim", "tp_dim", "hybrid_fsdp_group",
    "hybrid_fsdp_expt_group", "expt_device_mesh", "fsdp_group_ag", "expt_fsdp_group_ag", "fsdp_unit_modules",
    "zero_dp_strategy", "outer_dp_sharding_strategy", "device", "init_model_with_meta_device",
    "mixed_precision_policy", "overlap_grad_reduce", "overlap_param_gather", "sync_model_each_microbatch",
    "preproc_state_dict_for_dcp_ckpt", "report_nan_in_param_grad", "average_in_collective", "disable_bucketing",
    "calculate_per_token_loss", "keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail", "disable_symmetric_registration", "enable_fine_grained_param_gather",
    "use_decoupled_grad", "cuda_graph_mode", "maxpool_double_buffer",
]
# fmt: on


def test_arguments_are_those_of_megatron_fsdp_and_come_in_its_order():
    ours = list(inspect.signature(fully_shard_model).parameters)
    further = ["layout", "preserve_fp32_weights", "grad_reduce_in_fp32"]
    assert ours == [*MODEL_ARGUMENTS, *further]
    assert list(inspect.signature(fully_shard).parameters) == ["module", "optimizer", *MODEL_ARGUMENTS[1:], *further]
    fields = ["main_params_dtype", "main_grads_dtype", "grad_comm_dtype"]
    assert list(inspect.signature(MixedPrecisionPolicy).parameters)[:3] == fields


def test_what_marks_on_parameters_and_meshes_say(monkeypatch, caplog):
    plain, cut = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    cut.tensor_model_parallel, cut.partition_dim = True, 1
    assert [utils.is_mcore_tensor_parallel_duplicated(each) for each in (plain, cut)] == [True, False]
    index = SimpleNamespace(tp_dim="tp", get_submesh=lambda *args, **kwargs: mesh)
    for size in (1, 4):
        mesh = SimpleNamespace(mesh=torch.arange(size))
        assert utils.using_tensor_parallel(index) == (size > 1)
    index.tp_dim = None
    assert not utils.using_tensor_parallel(index)
    for said, rank in (("7", 7), ("none", 0)):
        monkeypatch.setenv("RANK", said)
        assert utils.safe_get_rank() == rank
        for told in (0, 7):
            utils.log_single_rank(logging.getLogger("flatshard"), logging.WARNING, "%s of %s", said, told, rank=told)
    assert [record.getMessage() for record in caplog.records] == ["7 of 7", "none of 0"]
    assert megatron.__version__.count(".") == 2


def _named_meshes(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    assert utils.get_mesh_names(mesh) == ["dp", "cp"]
    mesh["dp", "cp"]._flatten("dp_cp")
    assert utils.get_mesh_names(mesh) == ["dp", "cp", "dp_cp"]
    assert utils.get_mesh_names(mesh, only_submesh_dims=True) == ["dp", "cp"]
    assert utils.get_mesh_names() == []
    assert utils.contains_submesh(mesh, "dp_cp")
    assert utils.contains_submesh(mesh, ["dp", "cp"])
    assert not utils.contains_submesh(mesh, ["dp", "tp"])
    assert not utils.contains_submesh(None, "dp")
    assert not utils.contains_submesh(mesh, None)


def test_names_of_meshes(ranks):
    ranks(2, _named_meshes)


def _older(rank, world):
    for given, wanted in (
        ({"preserve_fp32_weights": False}, MixedPrecisionPolicy(main_params_dtype=None)),
        ({"grad_reduce_in_fp32": True}, MixedPrecisionPolicy(grad_reduce_in_fp32=True)),
        ({"preserve_fp32_weights": True, "grad_reduce_in_fp32": False}, MixedPrecisionPolicy()),
    ):
        model = sharded(model=make_net(depth=1).bfloat16(), zero_dp_strategy=ShardingStrategy.OPTIM_GRADS, **given)
        assert model.mp_policy == wanted
        loss_of(model, tokens_of(rank, world)).backward()
        weight = model.module.head.weight
        assert weight.dtype == wanted.main_params_dtype or weight.dtype == BF16
        assert weight.grad.dtype == (wanted.main_grads_dtype or BF16)
        assert model.ddp_config.data_parallel_sharding_strategy == "optim_grads"


def test_older_spellings_as_arguments(ranks):
    ranks(2, _older)


def test_older_spellings_of_precision():
    assert MixedPrecisionPolicy(preserve_fp32_weights=False).main_params_dtype is None
    policy = MixedPrecisionPolicy(grad_reduce_in_fp32=True)
    assert policy == MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
    with pytest.raises(TypeError, match="main_dtype"):
        MixedPrecisionPolicy(main_params_dtype=torch.int32)


# A quick start, as in the README of megatron-fsdp


def _quick_start(rank, world, folder):
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    fsdp_model = fully_shard_model(
        module=model, fsdp_unit_modules=[nn.TransformerEncoder, "torch.nn.TransformerDecoder"]
    )
    assert isinstance(fsdp_model, MegatronFSDP)
    assert fsdp_model.module is model
    optimizer = fully_shard_optimizer(optimizer=torch.optim.AdamW(params=fsdp_model.parameters(), lr=0.01))
    inp, tgt = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(fsdp_model(inp, inp), tgt)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    state = {"model": fsdp_model.state_dict(), "optimizer": optimizer.state_dict()}
    assert all(name.startswith("module.") for name in state["model"])
    dcp.save(state, checkpoint_id=folder)
    wanted = {name: value.to_local().clone() for name, value in state["model"].items()}
    fresh = fully_shard_model(
        nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True), fsdp_unit_modules=[nn.TransformerEncoder]
    )
    other = fully_shard_optimizer(torch.optim.AdamW(fresh.parameters(), lr=0.01))
    ckpt = {"model": fresh.state_dict(), "optimizer": other.state_dict()}
    dcp.load(state_dict=ckpt, checkpoint_id=folder)
    fresh.load_state_dict(ckpt["model"], strict=False)
    other.load_state_dict(ckpt["optimizer"])
    assert all(torch.equal(value.to_local(), wanted[name]) for name, value in fresh.state_dict().items())
    for each, opt in ((fsdp_model, optimizer), (fresh, other)):
        nn.functional.mse_loss(each(inp, inp), tgt).backward()
        opt.step()
    for one, two in zip(fsdp_model.parameters(), fresh.parameters()):
        assert torch.equal(one.to_local(), two.to_local())


def test_the_quick_start(ranks, tmp_path):
    ranks(2, _quick_start, tmp_path / "ckpt")


# The optimizer


def _optimizer(rank, world):
    tokens = tokens_of(rank, world)
    model = sharded(mixed_precision_policy=MixedPrecisionPolicy(), zero_dp_strategy=2)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert not optimizer.state  # and no step was taken to make it
    before = output(model, tokens)
    loss_of(model, tokens).backward()
    optimizer.step(install_optimized_model_weights=False)
    scheduler.step()
    assert torch.equal(output(model, tokens), before)
    model.install_optimized_model_weights()
    assert not torch.equal(output(model, tokens), before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
    # gradients that are kept
    grads = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.to_local().any() for p, g in zip(model.parameters(), grads))
    optimizer.zero_grad(zero_grad_buffer=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="fully_shard_model"):
        fully_shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))


def test_the_step_and_zero_grad_of_an_optimizer(ranks):
    ranks(2, _optimizer)


def _repointed(rank, world):
    """One call for both: parameter groups and state are kept."""
    models, optimizers = [make_net(depth=1), make_net(depth=1)], []
    for model in models:
        decayed, others = [[p for p in model.parameters() if (p.dim() > 1) == flag] for flag in (True, False)]
        optimizers.append(
            torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-3)
        )
        loss_of(model, next(batches(1, ROWS))).backward()
        optimizers[-1].step()
        optimizers[-1].zero_grad()
    wrapped, optimizer = fully_shard(models[0], optimizers[0], fsdp_unit_modules=[Block])
    assert optimizer is optimizers[0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(g["params"]) for g in optimizers[1].param_groups
    ]
    loss_of(wrapped, tokens_of(rank, world)).backward()
    loss_of(models[1], next(batches(1, ROWS))).backward()
    for each in optimizers:
        each.step()
    for (name, mine), plain in zip(wrapped.module.named_parameters(), models[1].parameters()):
        assert_rows(mine.detach(), plain.data, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_fully_shard_keeps_parameter_groups_and_state(ranks):
    ranks(2, _repointed)


def _first_update(rank, world):
    """The first real update is AdamW's: state is not made by a step."""
    reference = make_net(depth=1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    model = sharded(model=make_net(depth=1))
    optimizer = adamw(model)
    optimizer.state_dict()  # which has tensors to load into
    assert optimizer.state_dict()["state"][0]["step"] == 0
    loss_of(reference, next(batches(1, ROWS))).backward()
    loss_of(model, tokens_of(rank, world)).backward()
    theirs.step()
    optimizer.step()
    for mine, plain in zip(model.parameters(), reference.parameters()):
        assert_rows(mine.detach(), plain.data, rtol=1e-4, atol=1e-6)


def test_the_first_update_is_whole(ranks):
    ranks(2, _first_update)


def _decoupled(rank, world):
    model = sharded(use_decoupled_grad=True, mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=BF16))

    class Descent(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                assert parameter.grad is None
                parameter.sub_(parameter.decoupled_grad.float(), alpha=0.1)

    optimizer = fully_shard_optimizer(Descent(model.parameters()))
    losses = []
    for _ in range(3):
        loss = loss_of(model, tokens_of(rank, world))
        loss.backward()
        losses.append(loss.item())
        assert model.module.head.weight.decoupled_grad.dtype == BF16
        optimizer.step()
        optimizer.zero_grad()
        assert model.module.head.weight.decoupled_grad is None
    assert losses[2] < losses[0]


def test_decoupled_gradients(ranks):
    ranks(2, _decoupled)


def _graph_mode(rank, world):
    model = sharded(cuda_graph_mode=True)
    optimizer = adamw(model)
    seen = []
    for number in range(3):
        loss_of(model, tokens_of(rank, world, number)).backward()
        seen.append([(id(p.grad), p.grad.to_local().data_ptr()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] == seen[1] == seen[2]


def test_cuda_graph_mode_keeps_gradients_where_they_are(ranks):
    ranks(2, _graph_mode)


# Gradients


def _by_tokens(rank, world):
    """A loss per token is a sum, and the caller divides once."""
    model, reference = sharded(calculate_per_token_loss=True), make_net(depth=2)
    (loss_of(model, tokens_of(rank, world)) * ROWS / world).backward()
    model.scale_gradients(1 / ROWS)
    loss_of(reference, next(batches(1, ROWS))).backward()
    for mine, plain in zip(model.parameters(), reference.parameters()):
        assert_rows(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)


def test_a_loss_per_token_is_summed(ranks):
    ranks(2, _by_tokens)


def _not_a_number(rank, world):
    model = sharded(report_nan_in_param_grad=True, sync_model_each_microbatch=False)
    optimizer = adamw(model)
    loss_of(model, tokens_of(rank, world)).backward()
    optimizer.step()
    loss_of(model, tokens_of(rank, world)).backward()
    if rank == 1:
        model.module.blocks[1].up.weight.grad.to_local()[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight.*rank 1"):
        optimizer.step()


def test_gradients_that_are_not_finite_are_named(ranks):
    ranks(2, _not_a_number)


def _microbatches(rank, world):
    """HSDP: the outer axis is reduced once, when gradients are finished."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "dp"))
    model = sharded(device_mesh=mesh, dp_shard_dim="dp", dp_outer_dim="outer", sync_model_each_microbatch=False)
    reference = make_net(depth=2)
    for number in range(3):
        with model.no_sync():
            assert not model.is_last_microbatch
            loss_of(model, tokens_of(rank, world, number)).backward()
        assert model.is_last_microbatch
        loss_of(reference, list(batches(3, ROWS))[number]).backward()
    assert model.microbatch_count == 3
    lane = unit_of(model.module).root.reduce_lane
    before = [op.kind for op in lane.history].count("all_reduce")
    model.start_grad_sync()
    model.finish_grad_sync()
    assert [op.kind for op in lane.history].count("all_reduce") > before
    assert model.microbatch_count == 0
    for mine, plain in zip(model.parameters(), reference.parameters()):
        assert_rows(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
    model.set_model_auto_sync(True)
    model.zero_grad_buffer()
    assert all(parameter.grad is None for parameter in model.parameters())
    with model.no_sync():  # of no effect now
        loss_of(model, tokens_of(rank, world)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_are_finished_by_hand(ranks):
    ranks(4, _microbatches)


def _hidden(rank, world):
    """No gradient shows before it is complete, and then all do, whatever has happened to them meanwhile."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "dp"))
    reference = make_net(depth=2)
    for number in range(3):
        (loss_of(reference, list(batches(3, ROWS))[number]) / 2).backward()
    for case in (
        *({"zero_dp_strategy": strategy} for strategy in range(4)),
        {"device_mesh": mesh, "dp_shard_dim": "dp", "dp_outer_dim": "outer"},
        {"use_decoupled_grad": True},
        {"cuda_graph_mode": True},
    ):
        model = sharded(sync_model_each_microbatch=False, **case)
        name = "decoupled_grad" if case.get("use_decoupled_grad") else "grad"

        def shown(model=model, name=name):
            return [each for parameter in model.parameters() if (each := getattr(parameter, name)) is not None]

        def check(factor, model=model, name=name):
            for mine, plain in zip(model.parameters(), reference.parameters()):
                assert_rows(getattr(mine, name), plain.grad * factor, rtol=1e-4, atol=1e-6)

        loss_of(model, tokens_of(rank, world)).backward()
        model.zero_grad_buffer()  # forgets those that do not show, too
        for number in range(3):
            with model.no_sync() if number < 2 else nullcontext():
                loss_of(model, tokens_of(rank, world, number)).backward()
            assert not shown()
        model.scale_gradients(0.25)
        model.start_grad_sync()
        assert not shown()
        model.finish_grad_sync()
        check(0.5)
        for number in range(3):  # and more on top of them, which nobody has hidden
            loss_of(model, tokens_of(rank, world, number)).backward()
        model.finish_grad_sync()
        check(2.5)
        model.zero_grad_buffer()
        assert "cuda_graph_mode" in case or not shown()
        for number in range(3):
            model.set_model_auto_sync(number == 2)
            loss_of(model, tokens_of(rank, world, number)).backward()
            assert bool(shown()) == (number == 2 or "cuda_graph_mode" in case)
        check(2.0)
        with model.sync():
            model.zero_grad_buffer()
            loss_of(model, tokens_of(rank, world)).backward()
            assert shown()


def test_gradients_show_when_they_are_complete(ranks):
    ranks(4, _hidden)


# Weights


def _weights(rank, world):
    model = sharded()
    block = model.module.blocks[0]
    model.all_gather_and_wait_parameters_ready(block.parameters())
    assert not isinstance(block.up.weight, DTensor)
    assert isinstance(model.module.head.weight, DTensor)
    model._replace_param_with_distributed_if_needed()
    assert isinstance(block.up.weight, DTensor)
    assert block.up.weight._megatron_fsdp_model.module is model.module
    assert {name for name, _ in model.param_and_grad_buffer.optimizer_named_parameters} == set(
        dict(model.module.named_parameters())
    )
    tokens = tokens_of(rank, world)
    with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=BF16)):
        loss_of(model, tokens).backward()
    coarse = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad_buffer()
    loss_of(model, tokens).backward()
    assert any(not torch.equal(p.grad.to_local(), c) for p, c in zip(model.parameters(), coarse))
    assert model.get_distributed_index().get_dp_group().size() == world
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(tokens)
    assert sum(event.name == "CustomFSDP.forward" for event in profile.events()) == 1


def test_weights_are_gathered_and_precision_changed_by_hand(ranks):
    ranks(2, _weights)


def _groups(rank, world):
    """What the model is made of, by the names of buckets."""
    model = sharded(
        model=make_net(depth=2).bfloat16(),
        zero_dp_strategy=1,
        sync_model_each_microbatch=False,
        fsdp_double_buffer=True,
    )
    buffer = model.param_and_grad_buffer
    groups = buffer.parameter_groups
    assert buffer.num_buckets == len(groups)
    assert sum(len(group.params) for group in groups) == len(list(model.parameters()))
    block = max((group for group in groups if group.fsdp_unit_id == 1), key=lambda group: len(group.params))
    assert set(block.params) <= set(model.module.blocks[0].parameters())
    for group in groups:
        assert (group.dtype, group.grad_dtype, group.requires_grad, group.is_expert_param) == (BF16, BF16, True, False)
        assert group.main_weight_buffer.data.dtype == torch.float32
        assert group.main_grad_buffer.data.dtype == BF16
        assert group.main_weight_buffer.params == group.params
    assert isinstance(buffer.weight_alloc, FixedPoolAllocator)
    assert buffer.weight_alloc.pool is None
    with model.no_sync():
        loss_of(model, tokens_of(rank, world)).backward()
    root = unit_of(model.module).root
    assert (buffer.weight_alloc.pool, buffer.main_grad_alloc.pool) == (root.gather_pool, root.reduce_pool)
    assert block.model_weight_buffer.data.dtype == BF16
    buffer.reduce_scatter_gradients()
    assert block.main_grad_buffer.data.any()
    before = block.model_weight_buffer.data.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1.0)
    buffer.all_gather_parameters()
    assert not torch.equal(block.model_weight_buffer.data, before)
    assert (buffer.mp_policy, buffer.ddp_config, buffer.use_decoupled_grad) == (
        model.mp_policy,
        model.ddp_config,
        False,
    )
    with pytest.raises(AttributeError, match="buckets"):
        buffer.buckets  # noqa: B018
    other = sharded(maxpool_double_buffer=True)
    assert isinstance(other.param_and_grad_buffer.main_grad_alloc, MaxPoolAllocator)
    with pytest.raises(RuntimeError, match="start_param_sync"):
        other.param_and_grad_buffer.all_gather_parameters()
    assert isinstance(sharded().param_and_grad_buffer.weight_alloc, StorageResizeBasedBucketAllocator)
    unnamed = sharded(mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None))
    for group in unnamed.param_and_grad_buffer.parameter_groups:
        assert group.main_weight_buffer is None
        assert group.model_weight_buffer.data.dtype == torch.float32


def test_groups_and_pools_of_a_model(ranks):
    ranks(2, _groups)


def _replicas(rank, world):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first = copy.deepcopy(net)
    for parameter in first.parameters():
        dist.broadcast(parameter.data, 0)
    model = fully_shard_model(net, zero_dp_strategy="no_shard")
    model.broadcast_params()
    for mine, plain in zip(model.parameters(), first.parameters()):
        assert torch.equal(mine.to_local(), plain.data)
    x = torch.ones(1, 3)
    assert torch.equal(output(model, x), first(x).detach())


def test_broadcast_params_makes_replicas_agree(ranks):
    ranks(2, _replicas)


def _mixture(rank, world, values):
    """What is said of them, and which values each rank goes on with."""
    from flatshard.megatron import experimental, v2

    mesh = init_device_mesh("cpu", (world,))
    placements = experimental.Placements([0], *[[experimental.Flat()]] * 3)
    told, kept = [], []
    with pytest.MonkeyPatch.context() as patch:
        if values is not None:
            patch.setenv("FLATSHARD_VALUES", values)
        for shard in (
            lambda net: fully_shard_model(net, fsdp_unit_modules=[nn.Linear]),
            lambda net: experimental.fully_shard(net, mesh, placements),
            lambda net: v2.fully_shard(net, mesh),
        ):
            torch.manual_seed(rank)
            net = nn.Sequential(nn.Linear(4, 4))
            own = net[0].weight.data.clone()
            model = shard(net) or net
            kept.append(torch.equal(net[0].weight.to_local(), own[2 * rank : 2 * rank + 2]))
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                try:
                    model(torch.ones(1, 4))
                except RuntimeError as error:
                    found = [SimpleNamespace(message=error, category=RuntimeError)]
            told.append([(each.category, str(each.message)) for each in found if "ranks differ" in str(each.message)])
    return told, kept


@pytest.mark.parametrize("values", [None, "same", "first"])
def test_ranks_that_begin_with_different_values(ranks, values):
    for rank, (told, kept) in enumerate(ranks(2, _mixture, values)):
        for said, own in zip(told, kept):
            assert own == (values != "first" or rank == 0)
            assert len(said) == (values != "first")
            for category, text in said:
                assert category is (RuntimeError if values else UserWarning)
                assert ("training mixes their values" in text) == (values is None)
                assert "weight' was sharded with other values on rank 1 than on rank 0" in text


def _units(rank, world):
    def names(model):
        return {name for name, module in model.module.named_modules() if unit_of(module) is not None}

    assert names(sharded()) == {"", "blocks.0", "blocks.1"}
    fine = names(sharded(enable_fine_grained_param_gather=True))
    assert fine == {"", *(f"blocks.{n}{part}" for n in (0, 1) for part in ("", ".norm", ".up", ".down"))}
    model = sharded(enable_fine_grained_param_gather=True)
    reference = make_net(depth=2)
    loss_of(model, tokens_of(rank, world)).backward()
    loss_of(reference, next(batches(1, ROWS))).backward()
    for mine, plain in zip(model.parameters(), reference.parameters()):
        assert_rows(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
    replicated = sharded(fsdp_unit_modules=None)  # as by DistributedDataParallel
    assert all(parameter.to_local().shape == parameter.shape for parameter in replicated.parameters())
    assert names(sharded(fsdp_unit_modules=None, zero_dp_strategy=1, disable_bucketing=True)) == {""}
    assert len(names(sharded(fsdp_unit_modules=None, zero_dp_strategy=1))) > 2


def test_how_parameters_are_grouped_into_units(ranks):
    ranks(2, _units)


def _gather_group(rank, world):
    group = dist.new_group(list(range(world)))
    model = sharded(
        fsdp_group_ag=group, device_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), dp_shard_dim="dp"
    )
    loss_of(model, tokens_of(rank, world)).backward()
    root, index = unit_of(model.module).root, model.get_distributed_index()
    assert root.gather_lane.group(index.dp_mesh, 0) is group
    assert root.reduce_lane.group(index.dp_mesh, 0) is not group
    assert index.get_fsdp_group(independent_all_gather=True) is group
    for given in ({}, {"expt_device_mesh": index.device_mesh}):  # of experts, and there are none
        plain = sharded(expt_fsdp_group_ag=group, device_mesh=index.device_mesh, dp_shard_dim="dp", **given)
        loss_of(plain, tokens_of(rank, world)).backward()
        assert unit_of(plain.module).root.gather_lane.group(index.dp_mesh, 0) is not group
    other = dist.new_group(list(range(world - 1)))
    wrong = sharded(fsdp_group_ag=other, device_mesh=index.device_mesh, dp_shard_dim="dp") if rank < world - 1 else None
    if wrong is not None:
        with pytest.raises(ValueError, match="ranks"):
            wrong(tokens_of(rank, world))


def test_gathers_use_the_group_that_is_given_for_them(ranks):
    ranks(2, _gather_group)


# What is not there


def _refusals(rank, world):
    def refused(kind, match, **kwargs):
        model = make_net(depth=1)
        with pytest.raises(kind, match=match):
            fully_shard_model(model, fsdp_unit_modules=[Block], **kwargs)
        assert type(model).__name__ == "Net"
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    refused(NotImplementedError, "transposes", keep_fp8_transpose_cache=True)
    refused(ValueError, "nccl_ub.*cpu", nccl_ub=True)
    refused(ValueError, "zero_dp_strategy", zero_dp_strategy="zero3")
    refused(ValueError, "outer_dp_sharding_strategy", outer_dp_sharding_strategy="optim")
    refused(ValueError, "device_mesh", dp_outer_dim="outer")
    refused(ValueError, "mesh is on cpu", device="meta")
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    refused(ValueError, "dp_shard_dim", device_mesh=mesh)
    refused(ValueError, "no axis 'other'", device_mesh=mesh, dp_shard_dim="other")
    hybrid = {"device_mesh": init_device_mesh("cpu", (world, 1), mesh_dim_names=("outer", "dp")), "dp_shard_dim": "dp"}
    refused(
        ValueError,
        "optim_grads_params",
        **hybrid,
        dp_outer_dim="outer",
        zero_dp_strategy=2,
        outer_dp_sharding_strategy=1,
    )
    with pytest.raises(ValueError, match="needs fsdp_unit_modules"):
        fully_shard_model(make_net(depth=1), **hybrid, dp_outer_dim="outer", outer_dp_sharding_strategy=1)
    index = FSDPDistributedIndex(mesh, "dp", tp_dim="tp")
    for name in ("check_for_large_grads", "reduce_scatter_with_fp32_accumulation", "delay_wgrad_compute"):
        with pytest.raises(NotImplementedError, match=name):
            MegatronFSDP(make_net(depth=1), index, DistributedDataParallelConfig(**{name: True}))
    with pytest.raises(ValueError, match="TransformerEngine"):
        MegatronFSDP(make_net(depth=1), index, DistributedDataParallelConfig(fp8_param_gather=True))
    with pytest.raises(NotImplementedError, match="fine_grained_recurse"):
        MegatronFSDP(make_net(depth=1), index, fine_grained_recurse_module_types=(Block,))
    with pytest.raises(ValueError, match="fsdp_double_buffer: ask for it in ddp_config"):
        MegatronFSDP(make_net(depth=1), index, DistributedDataParallelConfig(), fsdp_double_buffer=True)
    experts = make_net(depth=1)
    experts.head.weight.allreduce = False
    with pytest.raises(ValueError, match="expt_device_mesh"):
        MegatronFSDP(experts, index)


def test_what_is_not_there_is_refused_with_the_reason(ranks):
    ranks(2, _refusals)


def _schedule(rank, world):
    model = sharded(overlap_grad_reduce=False, overlap_param_gather=False, maxpool_double_buffer=True)
    loss_of(model, tokens_of(rank, world)).backward()
    policy = unit_of(model.module).root.policy
    assert (policy.prefetch, policy.async_reduce) == (False, False)
    assert model.ddp_config.fsdp_double_buffer


def test_overlap_and_double_buffers_are_the_schedule(ranks):
    ranks(2, _schedule)


# What stays whole


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.encoder.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.gain = nn.Parameter(torch.ones(6))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x):
        return self.block(self.encoder(x) * self.gain)


def _whole(rank, world):
    found = {}
    for marked in (False, True):
        with torch.device("meta"):
            towers = Towers()
        if marked:
            megatron.fsdp_no_shard(towers.encoder)
            megatron.fsdp_no_shard(towers.gain)
        model = fully_shard_model(towers, fsdp_unit_modules=[nn.Sequential], init_model_with_meta_device=True)
        flags = {name: hasattr(p, "_fsdp_no_shard") for name, p in towers.named_parameters()}
        assert flags == {name: marked and not name.startswith("block") for name in flags}  # survives materialising
        if marked:
            assert not any(isinstance(parameter, DTensor) for parameter in towers.encoder.parameters())
            assert not towers.encoder._forward_pre_hooks
            assert "no_shard" in str(flatshard.summary(towers))
        else:
            assert all(isinstance(parameter, DTensor) for parameter in towers.parameters())
        optimizer = fully_shard_optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        for _ in range(2):
            model(torch.arange(12.0).view(2, 6)[rank : rank + 1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gathers = [op for op in unit_of(towers).root.gather_lane.history if op.kind == "all_gather"]
        found[marked] = sum(op.numbytes for op in gathers)
        values = {name: p.full_tensor() if isinstance(p, DTensor) else p.data for name, p in towers.named_parameters()}
        found[marked, "values"] = values
    assert found[True] < found[False]
    for name, value in found[True, "values"].items():
        torch.testing.assert_close(value, found[False, "values"][name], rtol=1e-5, atol=1e-6, msg=name)


def test_what_is_marked_stays_whole_and_is_not_gathered(ranks):
    ranks(2, _whole)


class Counted(nn.Module):
    """`reset_parameters` forgets the buffer, unless it is told to set it."""

    sets = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("table", torch.arange(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.sets:
            self.table = torch.arange(3, device=self.table.device)

    def forward(self, x):
        return x @ self.weight * self.table.sum()


def _unset(rank, world):
    with torch.device("meta"):
        models = [nn.Sequential(Counted()), nn.Sequential(Counted())]
    with pytest.raises(ValueError, match=r"'0\.table' was not initialised"):
        fully_shard_model(models[0], fsdp_unit_modules=[Counted], init_model_with_meta_device=True)
    models[1][0].sets = True
    model = fully_shard_model(models[1], fsdp_unit_modules=[Counted], init_model_with_meta_device=True)
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 12.0))


def test_a_buffer_without_values_is_refused(ranks):
    ranks(2, _unset)


# Quantised parameters, by the protocol that those of TransformerEngine follow


def _quantised(rank, world):
    from tests.fsdp2.test_extensions import Coded, encode

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    coded = copy.deepcopy(plain)
    coded[0].weight = nn.Parameter(Coded(plain[0].weight.data.clone()))
    model = fully_shard_model(coded, fsdp_unit_modules=[nn.Linear])
    codes, scales = encode(plain[0].weight.data)
    plain[0].weight.data.copy_(codes * scales)
    x = torch.ones(1, 6)
    torch.testing.assert_close(model(x), plain(x))
    dtypes = {tensor.dtype for tensor in unit_of(coded[0]).groups[0].source.wire}
    assert dtypes == {torch.int8, torch.float32}  # codes and scales
    model(x).sum().backward()
    assert coded[0].weight.grad is not None


def test_quantised_parameters_travel_as_they_say(ranks):
    ranks(2, _quantised)


# The rest of the configuration


def _configured(rank, world):
    """With several optimizer instances, the groups of Megatron-Core's collection are two axes."""
    groups = SimpleNamespace()
    for name, lists in {
        "dp_cp": [[0, 1, 2, 3]],
        "intra_dp_cp": [[0, 1], [2, 3]],
        "inter_dist_opt": [[0, 2], [1, 3]],
    }.items():
        made = [dist.new_group(members) for members in lists]
        setattr(groups, name, next(group for group, members in zip(made, lists) if rank in members))
    reference = make_net(depth=2)
    loss_of(reference, next(batches(1, ROWS))).backward()
    for outer, averages in (("no_shard", False), ("optim", True)):
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params",
            outer_dp_sharding_strategy=outer,
            num_distributed_optimizer_instances=2,
            average_in_collective=averages,
            bucket_size=1000,
        )
        model = megatron.FullyShardedDataParallel(SimpleNamespace(), config, make_net(depth=2), pg_collection=groups)
        index = model.megatron_fsdp_dist_index
        assert index.dp_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert index.get_dp_group() is groups.dp_cp
        assert index.get_outer_fsdp_group().size() == 2
        assert index.get_logical_hybrid_fsdp_rank() == [0, 2, 1, 3][rank]
        loss_of(model, tokens_of(rank, world)).backward()
        model.finish_grad_sync()
        for mine, plain in zip(model.parameters(), reference.parameters()):
            assert_rows(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
        if index.dp_mesh.device_type == "cpu":
            with pytest.raises(ValueError, match="NCCL"):
                model.param_and_grad_buffer.manual_buffer_registration()


def test_optimizer_instances_are_an_outer_axis(ranks):
    ranks(4, _configured)


def _two_lanes(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "fsdp"))
    axes = {"dp_shard_dim": "fsdp", "dp_outer_dim": "outer", "outer_dp_sharding_strategy": 1}
    model = sharded(device_mesh=mesh, **axes)
    optimizer = adamw(model)
    for number in range(2):
        loss_of(model, tokens_of(rank, world, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    root = unit_of(model.module).root
    outer = [operation.name for operation in root.gather_pool.refresh_lane.history]
    assert outer.count("refresh blocks.0") == 3  # before the first step and after each
    assert all(name.startswith("refresh ") for name in outer)
    assert not any(operation.name.startswith("refresh ") for operation in root.gather_lane.history)


def test_gathers_along_the_outer_axis_have_a_lane_of_their_own(ranks):
    """Those that an optimizer's step starts, of all units, are not in the way of the first unit's along the inner."""
    ranks(4, _two_lanes)


def test_fields_of_buckets_are_named_in_a_warning(caplog):
    config = DistributedDataParallelConfig(bucket_size=1000, align_param_gather=True, nccl_ub=True)
    schedule_of(config)
    assert "bucket_size, align_param_gather: no effect" in caplog.text


def _deleted(rank, world):
    model = sharded()
    optimizer = adamw(model)
    loss_of(model, tokens_of(rank, world)).backward()
    optimizer.step()
    gone = weakref.ref(model.module.head.weight)
    gc.disable()
    del model, optimizer
    assert gone() is None
    gc.enable()


def test_deleting_a_model_frees_it(ranks):
    ranks(2, _deleted)
