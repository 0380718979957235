"""Bodies of the buffer tests: run on CPU ranks by `tests/dist`, on GPU ranks by `tests/gpu`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Replicated

from flatshard.buffer import DBuffer, Lane, Pool
from flatshard.buffer.dtensor import as_dtensor
from flatshard.buffer.ragged import RaggedDTensor
from flatshard.layout import Flat, Partial, Replicate, plan
from flatshard.megatron.experimental.redistribute import redistribute

SHAPES = [(5, 3), (16, 8), (7,), (), (0, 4), (3, 0), (1, 2, 2)]
AVG, SUM = Partial("avg"), Partial("sum")


def mesh_of(device: str, *sizes: int):
    return init_device_mesh(device, sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def full_tensors(device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Small whole numbers, so that sums are exact in every dtype."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=rng).to(dtype).to(device) for shape in SHAPES]


def expect(buffer: DBuffer, tensors: list[torch.Tensor]) -> None:
    """The buffer holds exactly this rank's part of `tensors`."""
    wanted = DBuffer.distribute(tensors, buffer.layout, buffer.mesh, buffer.placements)
    for index in range(len(tensors)):
        torch.testing.assert_close(buffer.local_view(index), wanted.local_view(index), rtol=0, atol=0)


def every_legal_transition_1d(rank, world, device, layout, dtype):
    mesh = mesh_of(device, world)
    planned = plan(SHAPES, world, layout=layout)
    addends = [full_tensors(device, seed, dtype) for seed in range(world)]
    total = [sum(parts[1:], parts[0]) for parts in zip(*addends)]
    mean = [part / world for part in total]
    values = addends[0]

    sharded = DBuffer.distribute(values, planned, mesh, [Flat()])
    expect(redistribute(sharded, [Replicate()]), values)
    expect(redistribute(redistribute(sharded, [Replicate()]), [Flat()]), values)
    for op, wanted in ((SUM, total), (AVG, mean)):
        partial = DBuffer.distribute(addends[rank], planned, mesh, [op])
        before = partial.local.clone()
        expect(redistribute(partial, [Flat()]), wanted)
        expect(redistribute(partial, [Replicate()]), wanted)
        assert torch.equal(partial.local, before)


def every_legal_transition_2d(rank, world, device, layout):
    mesh = mesh_of(device, 2, 2)
    outer, inner = mesh.get_coordinate()
    values = full_tensors(device)
    addends = [full_tensors(device, seed) for seed in range(4)]
    total = [sum(parts[1:], parts[0]) for parts in zip(*addends)]
    both = plan(SHAPES, 4, layout=layout)
    legal = [(Replicate(), Replicate()), (Replicate(), Flat()), (Flat(), Flat())]
    for source, target in itertools.product(legal, legal):
        expect(redistribute(DBuffer.distribute(values, both, mesh, source), target), values)
    partial = DBuffer.distribute(addends[2 * outer + inner], both, mesh, [SUM, SUM])
    for target in legal:
        expect(redistribute(partial, target), total)
    # Partial over the outer axis only: how gradients rest between micro-batches under HSDP and HFSDP.
    resting = redistribute(partial, [SUM, Flat()])
    expect(redistribute(resting, [Replicate(), Flat()]), total)
    expect(redistribute(resting, [Flat(), Flat()]), total)
    # HSDP plans for the inner axis alone.
    hybrid = DBuffer.distribute(addends[2 * outer + inner], plan(SHAPES, 2, layout=layout), mesh, [AVG, AVG])
    expect(redistribute(hybrid, [Replicate(), Flat()]), [part / 4 for part in total])


def in_place_gather(rank, world, device, layout, dtype):
    mesh = mesh_of(device, world)
    planned = plan(SHAPES, world, layout=layout)
    values = full_tensors(device, dtype=torch.float32)
    main = DBuffer.distribute(values, planned, mesh, [Flat()])
    lane = Lane("gather", torch.device(device))
    pool = Pool(lane)
    gathered = DBuffer(planned, mesh, [Replicate()], pool.empty(planned.buffer_numel(world), dtype))
    views: list[torch.Tensor] = []
    for _ in range(3):
        pool.allocate(gathered.local)
        views = views or [gathered.local_view(index) for index in range(len(values))]
        with lane.entered((lane.mark(),)):
            for own, source in zip(gathered.runs(main.held), main.runs()):
                own.copy_(source)  # the cast into this rank's slice
        ticket = gathered.gather_in_place([Flat()], lane=lane, name="unit.0")
        ticket.wait()
        for view, value in zip(views, values):
            torch.testing.assert_close(view.float(), value, rtol=0, atol=0)
        pool.release(gathered.local)
        assert gathered.local.untyped_storage().nbytes() == 0
    assert pool.live_bytes == 0
    assert pool.peak_buffers == 1
    assert [op.name for op in lane.history] == ["unit.0"] * 3
    assert lane.launched == 3  # one coalesced launch each, however many segments


def in_place_gather_over_two_axes(rank, world, device):
    mesh = mesh_of(device, 2, 2)
    planned = plan(SHAPES, 4)
    values = full_tensors(device)
    main = DBuffer.distribute(values, planned, mesh, [Flat(), Flat()])
    full = DBuffer.zeros(planned, mesh, [Replicate(), Replicate()], dtype=torch.float32, device=device)
    torch._foreach_copy_(full.runs(main.held), main.runs())
    lane = Lane("gather", torch.device(device))
    full.gather_in_place([Flat(), Flat()], lane=lane, after=[lane.mark()]).wait()
    expect(full, values)


def lanes_with_their_own_groups(rank, world, device):
    """Two lanes with groups of their own."""
    mesh = mesh_of(device, world)
    planned = plan(SHAPES, world)
    addends = [full_tensors(device, seed) for seed in range(world)]
    mean = [sum(parts[1:], parts[0]) / world for parts in zip(*addends)]
    gather, reduce = (Lane(n, torch.device(device), own_groups=True) for n in ("gather", "reduce"))
    assert gather.group(mesh, 0) is not reduce.group(mesh, 0)
    assert gather.group(mesh, 0) is gather.group(mesh, 0)
    partial = DBuffer.distribute(addends[rank], planned, mesh, [AVG])
    shard = redistribute(partial, [Flat()], lane=reduce)
    expect(redistribute(shard, [Replicate()], lane=gather), mean)
    assert redistribute(shard, [Flat()]) is shard
    assert reduce.history[-1].kind == "reduce_scatter"


def fp8_travels_as_bytes(rank, world, device):
    mesh = mesh_of(device, world)
    planned = plan([(8, 4), (6,)], world)
    values = [torch.randn(8, 4, device=device), torch.randn(6, device=device)]
    main = DBuffer.distribute(values, planned, mesh, [Flat()]).cast(torch.float8_e4m3fn)
    full = redistribute(main, [Replicate()])
    for index, value in enumerate(values):
        assert torch.equal(full.local_view(index).view(torch.uint8), value.to(torch.float8_e4m3fn).view(torch.uint8))
    partial = DBuffer(planned, mesh, [SUM], full.local)
    with pytest.raises(TypeError, match="cast to"):
        redistribute(partial, [Flat()])


def dtensors_are_canonical(rank, world, device):
    mesh = mesh_of(device, world)
    shapes = [(5, 3), (16, 8), (7,), (0, 4), (3, 0)]
    values = [torch.randn(shape, device=device) for shape in shapes]
    buffer = DBuffer.distribute(values, plan(shapes, world), mesh, [Flat()])
    for index, value in enumerate(values):
        seen = as_dtensor(buffer, index)
        assert seen.shape == value.shape
        assert seen.stride() == value.stride()
        local = seen.to_local()
        assert not local.numel() or local.data_ptr() == buffer.local_view(index).data_ptr()
        chunks = value.chunk(world) if value.numel() else ()
        expected = chunks[rank] if rank < len(chunks) else value[:0]
        assert torch.equal(seen.to_local().flatten(), expected.flatten())
        if device == "cpu":  # DTensor's own gather of CUDA tensors over Gloo crashes in torch 2.11
            assert torch.equal(seen.full_tensor(), value)
    whole = DBuffer.distribute(values, plan(shapes, world), mesh, [Replicate()])
    assert torch.equal(as_dtensor(whole, 0).full_tensor(), values[0])
    if world == 1:
        return  # whatever lies on one rank is torch.chunk's only chunk
    pair = [torch.randn(5, 3, device=device), torch.randn(7, 3, device=device)]
    packed = DBuffer.distribute(pair, plan([(5, 3), (7, 3)], world, layout="flat"), mesh, [Flat()])
    ragged = as_dtensor(packed, 1)
    assert isinstance(ragged, RaggedDTensor)
    assert torch.equal(ragged.full_tensor(), pair[1])
    assert torch.equal((ragged * 2 + 1).full_tensor(), pair[1] * 2 + 1)
    torch.testing.assert_close(torch.linalg.vector_norm(ragged), torch.linalg.vector_norm(pair[1]))
    for name in ("sum", "mean", "max", "min"):
        torch.testing.assert_close(getattr(ragged, name)(), getattr(pair[1], name)())
    most = pair[1].max()
    assert [(ragged < most).all().item(), (ragged == most).any().item(), (ragged > most).any().item()] == [0, 1, 0]
    with pytest.raises(NotImplementedError, match="layout='tensor'"):
        ragged @ ragged.t()
    with pytest.raises(NotImplementedError, match="sharded differently"):
        ragged + as_dtensor(packed, 0)
    with pytest.raises(NotImplementedError, match="into a plain tensor"):
        pair[1].copy_(ragged)
    with pytest.raises(NotImplementedError, match=r"aten\.equal"):
        torch.equal(ragged, ragged)


def replicated(tensor: DTensor) -> torch.Tensor:
    return tensor.redistribute(placements=[Replicated()]).to_local()


def gradients_of_ragged_shards(rank: int, world: int, device: str = "cpu") -> None:
    """Gradients have the rows of what they are gradients of. Before torch 2.13 a backward raises, and nothing else."""
    mesh = init_device_mesh(device, (world,))
    torch.manual_seed(0)
    values = [torch.randn(5, 3, device=device), torch.randn(7, 3, device=device)]
    packed = DBuffer.distribute(values, plan([(5, 3), (7, 3)], world, layout="flat"), mesh, [Flat()])
    for function in (
        lambda tensor: tensor.norm(),
        lambda tensor: (tensor * 2).norm(),
        lambda tensor: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).pow(2).sum(),
        lambda tensor: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).pow(2).sum(),
        lambda tensor: (replicated(tensor) if isinstance(tensor, DTensor) else tensor).pow(2).sum(),
        lambda tensor: tensor.abs().sum() + tensor.pow(2).mean() + tensor.max() - tensor.min(),
    ):
        whole = values[1].clone().requires_grad_()
        ragged = as_dtensor(packed, 1).detach().requires_grad_()
        loss = function(ragged)
        if torch.__version__ < "2.13":
            with pytest.raises(NotImplementedError, match=r"needs torch 2\.13"):
                loss.backward()
            assert ragged.grad is None
            continue
        loss.backward()
        function(whole).backward()
        torch.testing.assert_close(ragged.grad.full_tensor(), whole.grad)
    fixed, other = as_dtensor(packed, 1).detach().requires_grad_(), torch.ones(3, device=device, requires_grad=True)
    fixed.clone().detach()
    (other * 2).to(fixed).sum().backward()  # of which `fixed` gives only the dtype
    assert other.grad is not None
    with pytest.raises(Exception, match=r"torch\.compile of operations: not supported"):
        torch.compile(lambda tensor: tensor * 2, backend="eager")(ragged)
