"""Full parameters outside of forwards: `gathered`, parts of a unit that are called by themselves, whole tensors."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from flatshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, gathered
from tests.order.cases import DIM, backward_of_all, compare, grads_of, make, optimizer_of, rows, shard, weights_of
from tests.order.test_generation import Gathers

pytestmark = [pytest.mark.xdist_group("interpreters"), pytest.mark.limit(30)]


def _held(rank, world):
    """Gathers of a first and of later evaluations in one body, per step."""
    model, reference = shard(make()), make()
    optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
    counts = []
    for number in range(3):
        with gathered(model), torch.no_grad():
            for _ in range(2):
                with Gathers() as gathers:
                    torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
                    torch.testing.assert_close(model.blocks[1].up(rows(rank)), reference.blocks[1].up(rows(rank)))
                counts.append(gathers.count)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert all(isinstance(p, DTensor) for p in model.parameters())
        model(rows(rank, number)).square().mean().backward()
        backward_of_all([reference(rows(r, number)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return counts


def test_a_body_gathers_once_and_sees_every_step(interpreters):
    for counts in interpreters(2, _held):
        assert counts == [0] * 6


def _sharded_again(rank, world, strategy, gather_format):
    """After a pass, as of a model that is evaluated between a backward and its step."""
    policy = MixedPrecisionPolicy(gather_format=gather_format, encodes=lambda name, weight: weight.dim() > 1)
    model = shard(make(), strategy=strategy, mp_policy=policy)
    model(rows(rank)).square().mean().backward()
    norm = clip_grad_norm_(model, 1e9)
    for _ in range(2):
        with gathered(model), torch.no_grad():
            model(rows(rank))
        assert all(isinstance(p, DTensor) for p in model.parameters())
    assert clip_grad_norm_(model, 1e9) == norm > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(rows(rank)).any()
    assert not any(value.full_tensor().any() for value in model.state_dict().values())


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("gather_format", [None, "int8"])
def test_parameters_are_sharded_again_under_every_strategy(interpreters, strategy, gather_format):
    interpreters(2, _sharded_again, strategy, gather_format)


def _train_held(rank, world):
    model, reference = shard(make()), make()
    optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
    with gathered(model.blocks[0]):
        for number in range(3):
            model(rows(rank, number)).square().mean().backward()
            backward_of_all([reference(rows(r, number)).square().mean() for r in range(world)])
            assert not isinstance(model.blocks[0].up.weight, DTensor)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    compare(weights_of(model), weights_of(reference))


def test_training_in_a_body_equals_one_process(interpreters):
    interpreters(2, _train_held)


def _no_forward(rank, world):
    model, reference = shard(make()), make()

    def loss(of, who):
        return F.linear(rows(who), of.blocks[0].up.weight).square().mean() + of.norm(rows(who, 1)).square().mean()

    with gathered(model):
        loss(model, rank).backward()
    backward_of_all([loss(reference, r) for r in range(world)])
    compare(grads_of(model), grads_of(reference))


def test_gradients_of_what_is_used_without_a_forward_are_reduced(interpreters):
    interpreters(2, _no_forward)


class Narrow(nn.Module):
    """Its layers can be called by themselves, and one has a row on rank 0 only."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.norm = nn.Linear(DIM, 1, bias=False), nn.Linear(DIM, 8), nn.LayerNorm(DIM)
        self.words, self.conv = nn.Embedding(5, DIM), nn.Conv1d(DIM, 4, 1)

    def forward(self, x):
        return self.up(self.norm(x)) * self.gate(x)


def _outside(rank, world, layout):
    """Ragged shards know whose they are; of the others DTensor speaks."""
    block, x = fully_shard(make(Narrow), layout=layout, reshard_after_forward=True), rows(rank)
    unseen = {
        "gate.weight": lambda: block.gate(x),
        "up.(bias|weight)": lambda: block.up(x),
        "up.weight": lambda: F.linear(x, block.up.weight),
        "norm.weight": lambda: block.norm(x),
        "words.weight": lambda: block.words(torch.arange(3)),
        "conv.weight": lambda: block.conv(torch.ones(1, DIM, 2)),
        "conv.bias": lambda: block.conv.bias * torch.ones(4),
        "up.bias": lambda: torch.ones(2, 8) + block.up.bias,
        "norm.bias": lambda: torch.cat([block.norm.bias, torch.ones(4)]),
    }
    for grads in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for name, use in unseen.items():
            whose = rf"'{name}' of unit '(FSDP)?Narrow'.*flatshard\.gathered"
            with grads(), pytest.raises(RuntimeError, match=whose if layout == "flat" else "torch.Tensor and DTensor"):
                use()
        block(x)
    with gathered(block):
        for use in unseen.values():
            use()


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_layers_called_outside_of_a_forward_are_refused(interpreters, layout):
    interpreters(2, _outside, layout)


class Peeking(nn.Module):
    """Its forward reads a weight of a unit inside."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Narrow(), nn.Linear(DIM, 1)

    def forward(self, x):
        return F.linear(self.head(x) + x, self.inner.up.weight)


def _peeks(rank, world, tp):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    model = make(Peeking)
    if tp:  # the input is a DTensor then, of another mesh than the sharded weight
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(use_local_output=False)})
    fully_shard(model.inner, mesh=mesh["dp"], reshard_after_forward=True)
    fully_shard(model, mesh=mesh["dp"])
    x = rows(rank)
    if tp:
        x = DTensor.from_local(x, mesh["tp"], [Replicate()])
    words = "different mesh|Cross device mesh" if tp else "mixed torch.Tensor"  # the second: before torch 2.13
    for grads in (torch.enable_grad, torch.no_grad):
        with grads(), pytest.raises(RuntimeError, match=words) as error:
            model(x)
        assert str(error.value).count("with flatshard.gathered(module)") == 1
    if not tp:
        with gathered(model.inner):
            model(x)


@pytest.mark.parametrize("tp", [False, True])
def test_a_forward_that_reads_weights_of_another_unit_is_told_what_to_do(interpreters, tp):
    interpreters(2, _peeks, tp)


def _parts(rank, world, policy):
    model, reference = shard(make(), **policy), make()

    def loss(of, who):
        x = of.norm(rows(who))
        for block in of.blocks:
            x = block(x)
        return of.output(x).square().mean()

    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model.norm(rows(rank)), reference.norm(rows(rank)))
        assert isinstance(model.norm.weight, DTensor)
        loss(model, rank).backward()
        model(rows(rank)).square().mean().backward()
        backward_of_all([loss(reference, r) + reference(rows(r)).square().mean() for r in range(world)])
    compare(grads_of(model), grads_of(reference))


@pytest.mark.parametrize("policy", [{}, {"reshard_after_forward": True}, {"strategy": 2}], ids=str)
def test_parts_of_the_root_can_be_called_by_themselves(interpreters, policy):
    interpreters(2, _parts, policy)


def _written(rank, world, layout):
    model = shard(make(), layout=layout)
    before = weights_of(model)
    with gathered(model, write=True), torch.no_grad():
        model.blocks[0].up.weight.fill_(3.0)
        model.norm.bias.add_(1.0)
    wanted = before | {"blocks.0.up.weight": torch.full((8, DIM), 3.0), "norm.bias": before["norm.bias"] + 1}
    compare(weights_of(model), wanted)
    with contextlib.suppress(KeyError), gathered(model, write=True), torch.no_grad():
        model.norm.bias.zero_()
        raise KeyError
    with pytest.raises(RuntimeError, match=r"within gathered\(write=True\)"), gathered(model, write=True):
        model(rows(rank))
    compare(weights_of(model), wanted)
    model(rows(rank)).sum().backward()


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_what_a_body_writes_is_kept(interpreters, layout):
    interpreters(2, _written, layout)


def _whole(rank, world, layout):
    """Plain tensors of an unsharded model go into a sharded one: by a state dict, assigned or not, and by copy_."""
    wanted = {name: tensor + 1 for name, tensor in make().state_dict().items()}
    for assign in (False, True):
        model = shard(make(), layout=layout)
        optimizer = optimizer_of(model.parameters())
        model.load_state_dict(wanted, assign=assign)
        compare(weights_of(model), wanted)
        model(rows(rank)).sum().backward()
        optimizer.step()
    model = shard(make(), layout=layout)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(wanted[name])
    compare(weights_of(model), wanted)


@pytest.mark.parametrize("layout", ["tensor", "flat"])
def test_whole_tensors_are_cut_where_they_are_put(interpreters, layout):
    interpreters(2, _whole, layout)


def _evaluated_by_one(rank, world, strategy):
    """What launches nothing waits for nobody, also if it is the first pass of its kind; and predicts nothing."""
    model, reference = shard(make(), strategy=strategy), make()
    optimizers = [optimizer_of(each.parameters()) for each in (model, reference)]
    for number in range(3):
        with gathered(model), torch.no_grad():
            if rank == 0:
                torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
                model.blocks, blocks = model.blocks[1:], model.blocks  # a forward that does not use all
                model(rows(rank))
                model.blocks = blocks
        if number == 1:
            with torch.no_grad():
                torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
        model(rows(rank, number)).square().mean().backward()
        backward_of_all([reference(rows(r, number)).square().mean() for r in range(world)])
        compare(grads_of(model), grads_of(reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_one_rank_alone_evaluates_what_is_gathered(interpreters, strategy):
    interpreters(2, _evaluated_by_one, strategy)


def _part_between(rank, world):
    """One rank runs a part, and gives its graph up, between the forward and the backward of all."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    for layer in model[:3]:
        fully_shard(layer)
    fully_shard(model)
    found = []
    for _ in range(3):
        loss = model(torch.full((2, 6), rank + 1.0)).square().mean()
        with gathered(model):
            assert rank or model[1](torch.ones(2, 6)).requires_grad
        loss.backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        model.zero_grad()
    return found


def test_one_rank_alone_runs_a_part_between_a_forward_and_its_backward(interpreters):
    for first, *others in interpreters(2, _part_between):
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


def _replicas(rank, world):
    """Nothing is gathered where every rank has all weights."""
    model, reference = shard(make(), strategy=0), make()
    model(rows(rank)).square().mean().backward()
    if rank == 0:
        with torch.no_grad():
            torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))
    torch.distributed.barrier()
    with torch.no_grad():
        torch.testing.assert_close(model(rows(rank)), reference(rows(rank)))


def test_one_rank_alone_evaluates_its_replica(interpreters):
    interpreters(2, _replicas)
