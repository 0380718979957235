"""Stages of torch's pipelining that are sharded."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

import flatshard
from flatshard import fully_shard
from flatshard.engine.units.unit import unit_of

DIM, MICRO, VOCAB = 6, 4, 10


def _block():
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM))


def _model(blocks):
    torch.manual_seed(8)
    return nn.Sequential(*(_block() for _ in range(blocks)))


def _loss(output, target):
    return (output - target).square().mean()


ONE = (ScheduleGPipe, Schedule1F1B)  # stage per rank
VEE = (ScheduleZBVZeroBubble, ScheduleDualPipeV)  # the first rank has the first and the last
SCHEDULES = (*ONE, ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble, *VEE)


def _pipeline(rank, world, kind):
    per_rank = 1 if kind in ONE else 2
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    stages, blocks = [], 2 * 2 * per_rank
    for number in range(per_rank):
        place = 1 - pp.get_local_rank() if number and kind in VEE else pp.get_local_rank()
        index = place + 2 * number
        part = _model(blocks)[2 * index : 2 * index + 2]
        for block in part:
            fully_shard(block, mesh=dp, reshard_after_forward=False)
        fully_shard(part, mesh=dp, reshard_after_forward=False)
        device = torch.device("cpu")
        stages.append(PipelineStage(part, index, 2 * per_rank, device, group=pp.get_group()))
    schedule = kind(stages if per_rank > 1 else stages[0], MICRO, loss_fn=_loss)
    reference = _model(blocks)
    for step in range(2):
        rng = torch.Generator().manual_seed(step)
        x, y = (torch.randn(world // 2 * MICRO, DIM, generator=rng) for _ in range(2))
        mine, theirs = (t.chunk(world // 2)[dp.get_local_rank()] for t in (x, y))
        inputs = (mine,) if pp.get_local_rank() == 0 else ()
        last = any(stage.is_last for stage in stages)
        schedule.step(*inputs, **({"target": theirs} if last else {}))
        _loss(reference(x), y).backward()
        held, order = [p for stage in stages for p in stage.submod.parameters()], (2.0, torch.inf)[step]
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()], order)
        torch.testing.assert_close(flatshard.clip_grad_norm_(held, 1e9, order, stages=pp), norm)
        for stage in stages:
            names = dict(reference[2 * stage.stage_index : 2 * stage.stage_index + 2].named_parameters())
            for name, parameter in stage.submod.named_parameters():
                assert isinstance(parameter, DTensor)
                wanted = names[name].grad
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted, msg=lambda m, n=name: f"{n}: {m}")
            stage.submod.zero_grad()
            assert not unit_of(stage.submod).root.reduces.in_flight
        reference.zero_grad()


# Before torch 2.13, stages on one rank that follow each other cannot send each other anything over Gloo.
IN_A_VEE = pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch cannot send to its own rank")


@pytest.mark.limit(120)  # the first imports torch's pipelining in every rank
@pytest.mark.parametrize(
    "kind",
    [
        *(ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble),
        pytest.param(ScheduleZBVZeroBubble, marks=IN_A_VEE),
        pytest.param(ScheduleDualPipeV, marks=[IN_A_VEE, pytest.mark.full]),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in (ScheduleInterleaved1F1B, ScheduleLoopedBFS)),
    ],
)
def test_a_pipeline_of_sharded_stages_equals_one_process(ranks, kind):
    ranks(4, _pipeline, kind)


def _in_backward(rank, world):
    """The schedule divides the reduced gradients by the micro-batches, so no backward may have stepped them before."""
    stage = fully_shard(
        _model(2)[rank : rank + 1], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    )
    place = PipelineStage(stage, rank, world, torch.device("cpu"))
    schedule, reference = ScheduleGPipe(place, MICRO, loss_fn=_loss), _model(2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (stage, reference)]
    flatshard.fully_shard_optimizer(optimizers[0], in_backward=True)
    for step in range(3):
        x, y = torch.randn(2, MICRO, DIM, generator=torch.Generator().manual_seed(step))
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
        _loss(reference(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, wanted in zip(stage.parameters(), reference[rank].parameters()):
        torch.testing.assert_close(mine.full_tensor(), wanted)


@pytest.mark.limit(120)
def test_optimizers_that_step_in_backward_step_what_the_schedule_has_scaled(ranks):
    ranks(2, _in_backward)


def _by_rows(rank, world):
    """The schedule unshards the embedding, whose look-ups do not use the full weight."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    torch.manual_seed(8)
    reference = nn.Sequential(nn.Embedding(VOCAB, DIM), _block(), _block(), _block())
    stages = []
    for index in (rank, rank + 2):
        part = fully_shard(copy.deepcopy(reference)[index], mesh=mesh, rows=index == 0, reshard_after_forward=True)
        stages.append(PipelineStage(part, index, 4, torch.device("cpu")))
    schedule = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=_loss)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randint(VOCAB, (MICRO, 3), generator=rng), torch.randn(MICRO, 3, DIM, generator=rng)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
    _loss(reference(x), y).backward()
    for stage in stages:
        for mine, wanted in zip(stage.submod.parameters(), reference[stage.stage_index].parameters()):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


@pytest.mark.limit(120)
def test_an_embedding_by_rows_in_a_stage(ranks):
    ranks(2, _by_rows)


class Tied(nn.Module):
    """A language model whose output weights are those of its embedding; or a stage of it, which has one of the ends."""

    def __init__(self, ends: tuple[str, ...] = ("first", "last")) -> None:
        super().__init__()
        torch.manual_seed(8)
        blocks, self.weight = [_block(), _block()], nn.Parameter(torch.randn(VOCAB, DIM))
        self.blocks = nn.ModuleList(blocks[:1] * ("first" in ends) + blocks[1:] * ("last" in ends))
        self.ends = ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(x, self.weight) if "first" in self.ends else x
        for block in self.blocks:
            x = block(x)
        return x @ self.weight.T if "last" in self.ends else x


def _tied(rank, world):
    """Each end has its copy, and gradients of the other end's use: they are added once a step, shard by shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    first = pp.get_local_rank() == 0
    part = fully_shard(Tied(("first",) if first else ("last",)), mesh=dp)
    stage = PipelineStage(part, pp.get_local_rank(), 2, torch.device("cpu"), group=pp.get_group())
    schedule = Schedule1F1B(stage, MICRO, loss_fn=_entropy)
    reference = Tied()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (part, reference)]
    for step in range(3):
        tokens = torch.randint(VOCAB, (2, 2 * MICRO, 3), generator=torch.Generator().manual_seed(step))
        x, y = (t.chunk(2)[dp.get_local_rank()] for t in tokens)
        schedule.step(*((x,) if first else ()), **({} if first else {"target": y}))
        flatshard.sum_shared_gradients(part.weight, pp)
        _entropy(reference(tokens[0]), tokens[1]).backward()
        torch.testing.assert_close(part.weight.grad.full_tensor(), reference.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(part.weight.full_tensor(), reference.weight.data, rtol=1e-4, atol=1e-5)


class Ends(nn.Module):
    """A stage of `Tied` in four: what it has of the embedding, blocks and head, in the order of their use."""

    def __init__(self, stage: int, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.stage, self.block = stage, _block()
        if weight is not None:
            self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(x, self.weight) if self.stage == 0 else x
        x = x + self.block(x)  # the sum is no view: torch detaches what a stage returns in place
        return x @ self.weight.T + 0 if self.stage == 3 else x


def _ends():
    torch.manual_seed(8)
    weight = nn.Parameter(torch.randn(VOCAB, DIM))
    return [Ends(stage, weight if stage in (0, 3) else None) for stage in range(4)]


def _tied_in_a_vee(rank, world, kind, order):
    """First and last stage are on one rank: one parameter, which has the gradients of both uses, scaled once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    first, parts, reference = pp.get_local_rank() == 0, _ends(), nn.Sequential(*_ends())
    mine = [0, 3] if first else [1, 2]
    for index in mine[::order]:
        fully_shard(parts[index].block, mesh=dp, reshard_after_forward=False)
        fully_shard(parts[index], mesh=dp, reshard_after_forward=False)
    stages = [PipelineStage(parts[i], i, 4, torch.device("cpu"), group=pp.get_group()) for i in mine]
    schedule = kind(stages, MICRO, loss_fn=_entropy)
    held = nn.ModuleList(parts[index] for index in mine)
    if first:
        assert parts[0].weight is parts[3].weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (held, reference)]
    for step in range(3):
        tokens = torch.randint(VOCAB, (2, 2 * MICRO, 3), generator=torch.Generator().manual_seed(step))
        x, y = (t.chunk(2)[dp.get_local_rank()] for t in tokens)
        schedule.step(*((x,) if first else ()), **({"target": y} if first else {}))
        _entropy(reference(tokens[0]), tokens[1]).backward()
        for index in mine:
            for (name, ours), theirs in zip(parts[index].named_parameters(), reference[index].parameters()):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, index in zip(held, mine):
        for sharded, value in zip(ours.parameters(), reference[index].parameters()):
            torch.testing.assert_close(sharded.full_tensor(), value.data, rtol=1e-4, atol=1e-5)


@IN_A_VEE
@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (ScheduleZBVZeroBubble, 1),
        (ScheduleDualPipeV, -1),
        pytest.param(ScheduleZBVZeroBubble, -1, marks=pytest.mark.full),
        pytest.param(ScheduleDualPipeV, 1, marks=pytest.mark.full),
    ],
)
def test_first_and_last_stage_of_one_rank_share_an_embedding(ranks, kind, order):
    ranks(4, _tied_in_a_vee, kind, order)


def _split(rank, world):
    """What torch does to a stage: gradients of inputs first, of the parameters that the modules show, later."""
    stage = _model(2)
    fully_shard(stage[0])
    fully_shard(stage)
    stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(False)
    stage.set_requires_gradient_sync(False)
    x = torch.randn(3, DIM, requires_grad=True)
    stage(x).sum().backward()  # an ordinary backward is none of that
    loss = stage(x).sum()
    with pytest.raises(RuntimeError, match=r"unit '0' was resharded after its forward.*reshard_after_forward=False"):
        torch.autograd.grad(loss, x)


def test_blocks_that_are_released_cannot_split_their_backward(ranks):
    ranks(2, _split)


def test_all_schedules_of_torch_are_here():
    public = {name for name in vars(pipelining) if name.startswith("Schedule")}
    assert public == {kind.__name__ for kind in SCHEDULES}


def _entropy(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_first_and_last_stage_share_an_embedding(ranks):
    ranks(4, _tied)


def _far_ends(rank, world):
    """Stages in between have nothing to do with it; several dtypes, and a gradient that is missing."""
    stages = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    held = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    for number, parameter in enumerate(held[: 2 if rank == 0 else 3]):
        parameter.grad = torch.full_like(parameter, rank + number + 1)
    flatshard.sum_shared_gradients(held, stages)
    wanted = [2.0, 3.0, 4.0] if rank == 1 else [4.0, 6.0, 5.0]
    assert [parameter.grad.tolist() for parameter in held] == [[value] * 2 for value in wanted]
    with pytest.raises(ValueError, match="one axis"):
        flatshard.sum_shared_gradients(held, None)


def test_gradients_of_both_ends_are_added(ranks):
    ranks(3, _far_ends)
