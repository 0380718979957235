"""Megatron-FSDP's second version: placements, contexts, micro-batches and buffers, in its spellings; and its third."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate

from flatshard import layout
from flatshard.megatron import MixedPrecisionPolicy, v2
from flatshard.megatron.experimental import (
    BlockAtomic,
    DBuffer,
    Flat,
    FsdpModule,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from tests.dist.models import assert_rows, batches, loss_of, make_net

ROWS = 8
AVG = dist.ReduceOp.AVG
FLAT = Placements([0], [Flat()], [Flat()], [Flat()])
PLACEMENTS = {
    "no shard": Placements([0], [Replicate()], [Partial(AVG)], [Replicate()]),
    "ZeRO 1": Placements([0], [TorchReplicate()], [TorchPartial("avg")], [Shard(0)]),
    "ZeRO 2": Placements([0], [Replicate()], [Flat()], [Flat()]),
    "ZeRO 3": Placements([-1], [Shard(0)], [Shard(0)], [Shard(0)]),
    "HSDP": Placements(["outer", "inner"], [Replicate(), Flat()], [Partial(AVG), Flat()], [Replicate(), Flat()]),
    "HFSDP": Placements([0, 1], [Replicate(), Flat()], [Partial(AVG), Flat()], [Flat(), Flat()]),
}


def mesh_of(placements, world):
    if len(placements.dp_axes) == 1:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))


def sharded(model, placements, world, **kwargs):
    for module in (*model.blocks, model):
        fully_shard(module, mesh_of(placements, world), placements, **kwargs)
    return model


def _equal(rank, world, names):
    for name in names:
        placements = PLACEMENTS[name]
        model, reference = make_net(depth=2), make_net(depth=2)
        with fully_shard_context(device=torch.device("cpu")) as context:
            sharded(model, placements, world)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, reference)]
        fully_shard_optimizer(optimizers[0])
        for step, tokens in enumerate(batches(3, 2 * ROWS)):
            for number, part in enumerate(tokens.chunk(2)):
                targets = [{"module": model}, {"context": context}, {"module": context}]
                with microbatch(**targets[step], is_last=number == 1, is_first=number == 0):
                    (loss_of(model, part.chunk(world)[rank]) / 2).backward()
                    assert (context.is_first_microbatch, context.is_last_microbatch) == (number == 0, number == 1)
                (loss_of(reference, part) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 0)
        for (key, mine), plain in zip(model.named_parameters(), reference.parameters()):
            note = f"{name}, {key}"
            assert_rows(mine.detach(), plain.data, rtol=2e-4, atol=2e-5, msg=lambda m, n=note: f"{n}: {m}")


@pytest.mark.parametrize("world", [2, 4])
def test_placements_equal_one_process(ranks, world):
    ranks(world, _equal, [name for name in PLACEMENTS if world == 4 or "H" not in name])


def _divided(rank, world):
    for divisor, placements, factor in ((2, FLAT, 0.5), (1, FLAT, 1.0), (3, PLACEMENTS["ZeRO 1"], 1 / 3)):
        model, reference = nn.Linear(3, 4), nn.Linear(3, 4)
        with torch.no_grad():
            for mine, plain in zip(model.parameters(), reference.parameters()):
                mine.copy_(plain)
                dist.broadcast(mine.data, 0)
                plain.copy_(mine)
        fully_shard(model, mesh_of(placements, world), placements, grad_divisor=divisor)
        x = torch.arange(6.0).view(2, 3)
        model(x[rank : rank + 1]).square().mean().backward()
        reference(x).square().mean().backward()
        for mine, plain in zip(model.parameters(), reference.parameters()):
            assert_rows(mine.grad, plain.grad * factor, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="grad_divisor"):
        fully_shard(nn.Linear(2, 2), mesh_of(FLAT, world), FLAT, grad_divisor=0)


def test_gradients_are_divided_once(ranks):
    ranks(2, _divided)


def _contexts(rank, world):
    mesh = mesh_of(FLAT, world)
    model = make_net(depth=2)
    with fully_shard_context() as context:
        for block in model.blocks:
            fully_shard(block, mesh, FLAT)
            with pytest.raises(RuntimeError, match="Exit fully_shard_context"):
                block(torch.zeros(1, 12))
        with pytest.raises(RuntimeError, match="nesting"), fully_shard_context():
            pass
    first, second = model.blocks
    assert context.forward_order == [first, second]
    assert context.backward_order == [second, first]
    assert first.is_root()
    assert first.name == ""
    assert isinstance(first, FsdpModule)
    assert first.context is second.context is context
    with fully_shard_context(), pytest.raises(ValueError, match="another fully_shard_context"):
        fully_shard(model, mesh, FLAT)
    fully_shard(model, mesh, FLAT)  # and without any, all are in one
    assert not first.is_root()
    assert (model.name, second.name) == ("", "blocks.1")
    assert model.context is first.context
    assert model.phase is FsdpModule.Phase.RESTING
    with pytest.raises(ValueError, match="device"), fully_shard_context(device="meta"):
        fully_shard(nn.Linear(2, 2), mesh, FLAT)
    with pytest.raises(ValueError, match="NCCL"):
        fully_shard(nn.Linear(2, 2), mesh, FLAT, use_symm_mem=True)
    for given in ({}, {"module": model, "context": context}, {"module": "model"}):
        with pytest.raises(TypeError, match="one of them"), microbatch(**given):
            pass
    with microbatch(nn.Linear(2, 2), False):  # a model that is not sharded: nothing to say
        pass


def test_contexts(ranks):
    ranks(2, _contexts)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x + self.bias))
        return x


def _annotated(rank, world):
    """Ranges of NVTX, by the names that they have there."""
    mesh, events, stack = mesh_of(FLAT, world), [], []

    def push(label):
        stack.append(label)
        events.append(f"> {label}")

    def ranges(model, x):
        events.clear()
        model(x).sum().backward()
        assert not stack
        return [event.replace("MFSDP ", "") for event in events]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.nvtx, "range_push", push)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append(f"< {stack.pop()}"))
        torch.manual_seed(0)
        model = Nested()
        for layer in model.layers:
            fully_shard(layer, mesh, FLAT)
        each = [f"{sign} <root> {phase}" for phase in ("forward", "backward") for _ in range(2) for sign in "><"]
        assert ranges(model, torch.ones(2, 4)) == each  # two roots
        fully_shard(model, mesh, FLAT)
        names = {"forward": ("layers.0", "layers.1"), "backward": ("layers.1", "layers.0")}
        wanted = [
            event
            for phase, order in names.items()
            for inside in [[f"{sign} {name} {phase}" for name in order for sign in "><"]]
            for event in (f"> <root> {phase}", *inside, f"< <root> {phase}")
        ]
        for _ in range(2):
            assert ranges(model, torch.ones(2, 4)) == wanted
        frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        fully_shard(frozen, mesh, FLAT)
        found = ranges(frozen, torch.ones(2, 4, requires_grad=True))
        assert found == [f"{sign} <root> {phase}" for phase in ("forward", "backward") for sign in "><"]
    before = list(events)
    model(torch.ones(2, 4)).sum().backward()  # a CPU has no ranges of its own
    assert events == before


def test_passes_are_ranges_of_nvtx(ranks):
    ranks(2, _annotated)


def _deleted(rank, world):
    model = sharded(make_net(depth=1), FLAT, world)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard_optimizer(optimizer)
    loss_of(model, next(batches(1, ROWS)).chunk(world)[rank]).backward()
    optimizer.step()
    assert model.parameter_groups[0].main_grad is not None
    gone = weakref.ref(model.head.weight)
    gc.disable()
    del model, optimizer
    assert gone() is None
    gc.enable()


def test_deleting_a_model_frees_it(ranks):
    ranks(2, _deleted)


def _meta(rank, world, folder):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).bfloat16()
    fully_shard(model, mesh_of(FLAT, world), FLAT)
    for number, layer in enumerate(model):
        nn.init.constant_(layer.weight, 2.0 + number)
    assert model[0].weight.dtype == torch.float32  # main
    output = model(torch.ones(1, 4).bfloat16())
    assert torch.equal(output, torch.full_like(output, 96.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    output.sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, folder)
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).bfloat16()
    fully_shard(other, mesh_of(FLAT, world), FLAT, MixedPrecisionPolicy(main_grads_dtype=torch.float32), layout="flat")
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    fully_shard_optimizer(fresh)
    load_checkpoint(other, fresh, folder, sync_model_weights=True)
    assert torch.equal(other(torch.ones(1, 4).bfloat16()), model(torch.ones(1, 4).bfloat16()))
    for one, two in zip(other.parameters(), model.parameters()):
        assert torch.equal(one.full_tensor(), two.full_tensor())
        assert torch.equal(fresh.state[one]["exp_avg"].full_tensor(), optimizer.state[two]["exp_avg"].full_tensor())


def test_meta_parameters_and_checkpoints(ranks, tmp_path):
    ranks(2, _meta, tmp_path / "checkpoint")


def _buffers(rank, world):
    tensors = [torch.arange(21.0).view(7, 3), torch.arange(10.0).view(2, 5) + 100, torch.arange(7.0) + 200]
    mesh = init_device_mesh("cpu", (world,))
    for placement in (Flat(), Shard(0), BlockAtomic(2)):
        cut = DBuffer.distribute_tensors(tensors, mesh, [placement], block_size=getattr(placement, "rows", 1))
        whole = cut.allgather(0)
        for index, tensor in enumerate(tensors):
            assert torch.equal(whole.get_local_tensor(index), tensor)
            assert torch.equal(cut.get_dtensor(index).full_tensor(), tensor)
            assert cut.get_dtensor(index).placements == (Flat(),) == (Shard(0),)
        part = whole.scatter(0, placement)
        assert part.local_buffer.equal(cut.local_buffer)
        assert part.local_buffer.untyped_storage() is whole.local_buffer.untyped_storage()
        other = DBuffer(mesh, [placement], cut.layout, torch.float32, "cpu")
        assert whole.scatter(0, placement, out=other) is other
        assert other.local_buffer.equal(cut.local_buffer)
        with pytest.raises(ValueError, match="`out` must have placements"):
            whole.scatter(0, placement, out=whole)
    for op, scale in ((dist.ReduceOp.SUM, world * (world + 1) / 2), (AVG, (world + 1) / 2)):
        mine = DBuffer.distribute_tensors([tensor * (rank + 1) for tensor in tensors], mesh, [Partial(op)])
        for result in (mine.allreduce(0), mine.reduce_scatter(0, Flat()).allgather(0)):
            torch.testing.assert_close(result.get_local_tensor(0), tensors[0] * scale)
        assert mine.get_dtensor(0).placements[0].is_partial("sum" if op == dist.ReduceOp.SUM else "avg")
        torch.testing.assert_close(mine.get_dtensor(0).full_tensor(), tensors[0] * scale)
        into = mine.view([Flat()])
        assert mine.reduce_scatter(0, Flat(), out=into) is into
        torch.testing.assert_close(into.allgather(0).get_local_tensor(1), tensors[1] * scale)
    assert whole.cast(torch.float32) is whole
    assert whole.allocation_stream is None  # on a CPU there are none
    assert not whole.is_symmetric_memory
    again = DBuffer.from_local(whole.local_buffer, mesh, [Replicate()], whole.layout, allocation_stream="this")
    assert again.allocation_stream == again.scatter(0, Flat()).allocation_stream == "this"
    coarse = whole.cast(torch.bfloat16)
    view = coarse.get_local_tensor(0)
    coarse.release_storage()
    assert coarse.local_buffer.untyped_storage().nbytes() == 0
    coarse.reallocate_storage()
    coarse.local_buffer.fill_(7.0)
    assert view.eq(7).all()
    with pytest.raises(ValueError, match=r"DBuffer\.view"):
        cut.view([Replicate()])
    with pytest.raises(ValueError, match="allgather"):
        whole.allgather(0)
    with pytest.raises(ValueError, match="flat and contiguous"):
        DBuffer.from_local(torch.zeros(2, 2), mesh, [Replicate()], [(2, 2)])
    with pytest.raises(ValueError, match="symmetric"):
        cut.rendezvous(0)
    with pytest.raises(TypeError, match="placement"):
        DBuffer(mesh, ["sharded"], [(2, 2)], torch.float32, "cpu")


def test_placements_are_of_one_class_wherever_they_are_imported_from():
    from flatshard.megatron.experimental import dbuffer

    assert dbuffer.Flat is Flat
    assert dbuffer.Partial is Partial
    assert dbuffer.to_engine(dbuffer.Partial(reduce_op=dist.ReduceOp.AVG)) == layout.Partial("avg")


def test_buffers_go_through_placements_and_back(ranks):
    ranks(2, _buffers)


def _third(rank, world):
    policy = v2.FullyShardMixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
    model, reference = make_net(depth=2), make_net(depth=2)
    for module in (*model.blocks, model):
        v2.fully_shard(module, mp_policy=policy, gradient_scaling_factor=1.0, enable_trace_pool=True)
    assert isinstance(model, v2.FSDPModule)
    tokens = next(batches(1, ROWS))
    loss_of(model, tokens.chunk(world)[rank]).backward()
    loss_of(reference, tokens).backward()
    norms = v2.compute_per_param_norms(model)
    for (name, mine), plain in zip(model.named_parameters(), reference.parameters()):
        assert_rows(mine.grad, plain.grad * world, rtol=0.05, atol=5e-3, msg=lambda m, n=name: f"{n}: {m}")
        assert norms[name]["param_norm"] == pytest.approx(plain.norm().item(), rel=1e-4)
    v2.log_per_param_norms(model, 3, "norms:")
    v2.log_parameter_groups(model)
    assert v2.check_all_fsdp_buffers(model)
    model.blocks[0].up._parameters["weight"] = nn.Parameter(model.blocks[0].up.weight.detach().clone())
    assert not v2.check_all_fsdp_buffers(model)
    decoupled = v2.fully_shard(nn.Linear(2, 2), mp_policy=v2.MixedPrecisionPolicy(use_decoupled_grad=True))
    decoupled(torch.ones(1, 2)).sum().backward()
    assert decoupled.weight.grad is None
    assert isinstance(decoupled.weight.decoupled_grad, DTensor)
    outer = nn.Sequential(nn.Linear(2, 2))
    v2.fully_shard(outer[0]).unshard()
    with pytest.raises(RuntimeError, match="unsharded"):
        v2.fully_shard(outer)
    with pytest.raises(ValueError, match="TransformerEngine"):
        v2.FullyShardFP8Policy(enabled=True)
    with pytest.raises(NotImplementedError, match="transposes"):
        v2.FullyShardMixedPrecisionPolicy(keep_fp8_transpose_cache=True)


def test_the_third_spelling(ranks):
    ranks(2, _third)


def test_blocks_of_rows_are_for_buffers():
    with pytest.raises(ValueError, match="rows=0"):
        BlockAtomic(0)
    with pytest.raises(ValueError, match=r"rows=2.*is not supported here"):
        Placements([0], [BlockAtomic(2)], [Flat()], [Flat()]).engine()
