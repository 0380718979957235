"""Megatron-Core's training loop: its wrapper, its optimizer, tensor parallelism and experts by marks."""

import logging
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
    norms = model.compute_per_param_norms()
    assert norms["head.weight"]["param_norm"] == pytest.approx(plain["head.weight"].norm().item(), rel=1e-4)
    assert norms["layers.0.down.weight"]["grad_norm"] > 0
    assert model.check_all_fsdp_buffers()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("flatshard").addHandler(handler)
    logging.getLogger("flatshard").setLevel("INFO")
    model.log_per_param_norms(7, prefix="[norms]")
    model.log_parameter_groups()
    logging.getLogger("flatshard").removeHandler(handler)
    logging.getLogger("flatshard").setLevel("NOTSET")
    assert len(told) == (0 if rank else len(plain) + 1)
    assert rank or (told[0].startswith("[norms] iteration 7, ") and "layers.0" in told[-1])
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


EXPERTS = 4
# Each with the number of optimizer instances, of which several make it hybrid.
LAYOUTS = [
    (1, {"dp_cp": [[0, 1, 2, 3]], "expt_dp": [[0, 2], [1, 3]], "ep": [[0, 1], [2, 3]]}),
    (1, {"dp_cp": [[0, 1, 2, 3]], "expt_dp": [[0], [1], [2], [3]], "ep": [[0, 1, 2, 3]]}),
    (
        2,
        {
            "dp_cp": [[0, 1, 2, 3]],
            "intra_dp_cp": [[0, 1], [2, 3]],
            "inter_dist_opt": [[0, 2], [1, 3]],
            "intra_expt_dp": [[0], [1], [2], [3]],
            "ep": [[0, 1], [2, 3]],
        },
    ),
]


def _experts(rank, world, folder):
    """One step in each layout, each going on with what the one before has saved; and one of the experts is idle."""
    reference, norms = Model(experts=EXPERTS), []
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    for number, batch in enumerate(data(len(LAYOUTS))):
        reference.layers[1].idle = number
        for rows in batch:
            (reference(rows).square().mean() / MICRO).backward()
        for parameter in reference.layers[1].local[number].parameters():
            parameter.grad = torch.zeros_like(parameter)
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), CLIP).item())
        theirs.step()
        theirs.zero_grad()
    for number, ((instances, members), batch) in enumerate(zip(LAYOUTS, data(len(LAYOUTS)))):
        groups = groups_of(**members)
        built = Model(ep=groups.ep, experts=EXPERTS)
        built.layers[1].idle = number
        model = wrapped(built, groups, num_distributed_optimizer_instances=instances)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        optimizer = DistributedOptimizer(optimizer, [model], [model.param_and_grad_buffer], clip_grad=CLIP)
        if number:
            target = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict(is_loading=True)}
            dcp.load(target, checkpoint_id=f"{folder}/{number - 1}")
            model.load_state_dict(target["model"])
            optimizer.load_state_dict(target["optimizer"])
        found = loop(model, optimizer, rank, world, 1, [batch])
        assert found == pytest.approx(norms[number : number + 1], rel=1e-4), (number, found, norms)
        state = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/{number}")
    plain = dict(reference.named_parameters())
    assert [name for name in state["model"] if "local" in name] == [
        f"layers.1.local.{2 * groups.ep.rank() + number}.{name}" for number in range(2) for name in ("weight", "bias")
    ]
    for name, value in state["model"].items():
        torch.testing.assert_close(whole(value), plain[name].data, rtol=2e-4, atol=2e-5, msg=name)
        moment = whole(state["optimizer"]["state"][name]["exp_avg"])
        torch.testing.assert_close(moment, theirs.state[plain[name]]["exp_avg"], rtol=2e-4, atol=2e-5, msg=name)
    outer = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
    with pytest.raises(NotImplementedError, match="sharded along ep"):
        wrapped(Model(ep=groups.ep, experts=EXPERTS), groups, **outer)
    model.load_state_dict(dict(reference.state_dict()), strict=False)  # one process's, whole
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), plain[name].data), name


def test_the_loop_with_experts_by_marks(ranks, tmp_path):
    """Their gradients are means over all ranks, whose data has reached them, not over those that hold them."""
    ranks(4, _experts, str(tmp_path))


class Grouped(nn.Module):
    def forward(self, x):
        return x


def _names(rank, world):
    """Experts that are numbered by the ends of their names, and stacks of them."""
    groups = groups_of(dp_cp=[[0, 1]], expt_dp=[[0], [1]], ep=[[0, 1]])
    held = nn.Linear(DIM, DIM, bias=False)
    held.experts = Grouped()
    for name, shape in (("weight0", (2, DIM)), ("weight1", (2, DIM)), ("stack", (3, DIM, 2))):
        held.experts.register_parameter(name, nn.Parameter(torch.full(shape, float(rank))))
        getattr(held.experts, name).allreduce = False
    model = wrapped(nn.Sequential(held, ParallelMLP()), groups)
    state = model.state_dict()
    first = 2 * rank
    names = [f"0.experts.weight{first}", f"0.experts.weight{first + 1}", "0.experts.stack"]
    assert list(state)[:4] == ["0.weight", *names]
    assert [tuple(state[name].shape) for name in names] == [(2, DIM), (2, DIM), (6, DIM, 2)]
    groups = groups_of(dp_cp=[[0], [1]], tp=[[0, 1]])
    strided = Model(tp=groups.tp)
    strided.layers[0].up.weight.partition_stride = 2
    strided.layers[1] = nn.Identity()
    model = wrapped(strided, groups)
    state = model.state_dict()
    assert list(state)[:2] == ["layers.0.up.weight.stride_2_of_2", "layers.0.up.bias"]
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"missing \['layers.0.up.weight'\]"):
        model.load_state_dict({name.removesuffix("2") + "4" * (name[-1] == "2"): v for name, v in state.items()})


def test_names_of_experts_and_strides(ranks):
    ranks(2, _names)


def _chunks(rank, world, folder):
    """Virtual pipelining: a rank has several models, and one optimizer."""
    mesh = groups_of(dp_cp=[[0, 1]])

    def build():
        chunks = [wrapped(nn.Sequential(ParallelMLP(), ParallelMLP()), mesh) for _ in range(2)]
        optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2, eps=1e-4)
        buffers = [chunk.param_and_grad_buffer for chunk in chunks]
        return chunks, DistributedOptimizer(optimizer, chunks, buffers, clip_grad=CLIP)

    def step(chunks, optimizer, batch):
        with chunks[0].no_sync(), chunks[1].no_sync():
            chunks[1](chunks[0](batch[0].chunk(world)[rank])).square().mean().backward()
        chunks[1](chunks[0](batch[1].chunk(world)[rank])).square().mean().backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
            chunk.scale_gradients(1 / MICRO)
        norm = optimizer.step()[1]
        optimizer.zero_grad()
        return norm

    reference = nn.Sequential(*(ParallelMLP() for _ in range(4)))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    chunks, optimizer = build()
    for number, batch in enumerate(data(2)):
        if number:
            dcp.save({"optimizer": optimizer.sharded_state_dict(), **_by_chunk(chunks)}, checkpoint_id=folder)
            chunks, optimizer = build()
            target = {"optimizer": optimizer.sharded_state_dict(is_loading=True), **_by_chunk(chunks)}
            dcp.load(target, checkpoint_id=folder)
            optimizer.load_state_dict(target["optimizer"])
            for place, chunk in enumerate(chunks):
                chunk.load_state_dict(target[f"model{place}"])
        for rows in batch:
            (reference(rows).square().mean() / MICRO).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), CLIP).item()
        theirs.step()
        theirs.zero_grad()
        assert step(chunks, optimizer, batch) == pytest.approx(norm, rel=1e-4)
    held = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for ours, plain in zip(held, reference.parameters()):
        torch.testing.assert_close(whole(ours), plain.data, rtol=2e-4, atol=2e-5)


def _by_chunk(chunks):
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def test_several_model_chunks(ranks, tmp_path):
    ranks(2, _chunks, str(tmp_path / "saved"))


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


def _plain_optimizer(rank, world):
    """Gradients that rest in bfloat16 step float32 main weights, by an optimizer that knows of neither."""
    model = wrapped(Model().bfloat16(), groups_of(dp_cp=[[0, 1]]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    model(next(data(1))[0].chunk(world)[rank].bfloat16()).square().mean().backward()
    model.finish_grad_sync()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    optimizer.step()
    after = [parameter.to_local() for parameter in model.parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(before, after))
    model.zero_grad_buffer()
    model(next(data(1))[0].chunk(world)[rank].bfloat16()).square().mean().backward()
    model.complete_gradients()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


def test_gradients_for_any_optimizer(ranks):
    ranks(2, _plain_optimizer)
