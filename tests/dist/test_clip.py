"""Clipping by the global norm, norms per parameter, non-finite gradients: as for the unsharded model."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flatshard import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    find_nonfinite,
    fully_shard,
    fully_shard_optimizer,
    grad_norms,
    weight_norms,
)
from flatshard.buffer import Lane
from flatshard.buffer.groups import joint_group
from tests.dist.models import assert_rows, batches, loss_of, make_net

pytestmark = pytest.mark.sampled(2)

ROWS = 12
INF = float("inf")


def shard(net, **kwargs):
    for block in net.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(net, **kwargs)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def with_gradients(rank, world, frozen=True, **kwargs):
    """A reference with its gradients, and the sharded model with its own."""
    tokens = next(batches(1, ROWS))
    models = []
    for shards in (False, True):
        net = make_net(depth=2)
        net.embed.requires_grad_(not frozen)
        net.unused = nn.Linear(3, 3)  # never has a gradient
        net = shard(net, **kwargs) if shards else net
        loss_of(net, tokens.chunk(world)[rank] if shards else tokens).backward()
        models.append(net)
    return models


def collectives(monkeypatched=Lane):
    """Count what lanes launch."""
    count = []
    record_launch = monkeypatched.record_launch

    def counted(self, group, kind, name, *args):
        count.append((kind, name))
        return record_launch(self, group, kind, name, *args)

    monkeypatched.record_launch = counted
    return count, lambda: setattr(monkeypatched, "record_launch", record_launch)


def _clip(rank, world, norm_types, shape, outer=None):
    mesh, norms = init_device_mesh("cpu", shape), []
    for norm_type, share in itertools.product(norm_types, (0.3, 10.0)):  # of the norm: clips, does not clip
        one, ours = with_gradients(rank, world, mesh=mesh, outer_strategy=outer)
        theirs = with_gradients(rank, world, mesh=mesh, outer_strategy=outer)[1]
        before = torch.nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None], norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(one.parameters(), share * before.item(), norm_type)
        count, stop = collectives()
        norm = clip_grad_norm_(ours, share * before.item(), norm_type)
        stop()
        assert count == [("all_reduce", "norms")]  # one mesh, one collective
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, wanted, rtol=1e-4, atol=0)
        # PITFALL 14: torch's own function sees all shards too.
        by_torch = torch.nn.utils.clip_grad_norm_(theirs.parameters(), share * before.item(), norm_type)
        torch.testing.assert_close(full(by_torch), wanted, rtol=1e-4, atol=0)
        for (name, p), q, r in zip(ours.named_parameters(), one.parameters(), theirs.parameters()):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert_rows(p.grad, q.grad, rtol=1e-3, atol=1e-7)
                assert_rows(r.grad, q.grad, rtol=1e-3, atol=1e-7)
        norms.append(norm.item())
    return norms


@pytest.mark.parametrize(
    ("shape", "outer", "norm_types"),
    [((3,), None, (1, 2, 3.5, INF)), ((2, 2), None, (1, INF)), ((2, 2), "optim", (2, 3.5, INF))],
    ids=str,
)
def test_the_norm_is_that_of_the_unsharded_model(ranks, shape, outer, norm_types):
    norms = ranks(math.prod(shape), _clip, norm_types, shape, outer)
    assert all(mine == norms[0] for mine in norms)  # to the bit, or ranks would drift apart


def _few_rows(rank, world):
    model, wanted = fully_shard(nn.Linear(1, 1)), nn.Linear(1, 1)
    for net in (model, wanted):
        net(torch.ones(2, 1)).sum().backward()
    grads, whole = ([p.grad for p in net.parameters()] for net in (model, wanted))
    for norm_type, foreach in itertools.product((1, 2, INF), (True, False)):
        norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        torch.testing.assert_close(full(norm), torch.nn.utils.get_total_norm(whole, norm_type))


def test_torchs_norms_of_gradients_of_which_a_rank_has_no_rows(ranks):
    ranks(2, _few_rows)


@pytest.mark.parametrize(
    ("device", "value", "max_norm", "count"),
    [
        ("cpu", 3.0, 9.0, 0),  # in host memory, a multiplication by one would read and write all gradients
        ("cpu", 3.0, 1.0, 1),
        ("cpu", math.nan, 9.0, 1),
        ("cpu", INF, INF, 1),
        ("meta", 3.0, 9.0, 1),  # cannot be read, as a device that is still at work must not be
    ],
)
def test_gradients_on_the_host_are_scaled_only_by_other_factors_than_one(device, value, max_norm, count):
    parameter = nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = torch.full_like(parameter, value)
    written = parameter.grad._version
    clip_grad_norm_([parameter], max_norm)
    assert parameter.grad._version - written == count


def _joint(rank, world):
    mesh = init_device_mesh("cpu", (2, 1, 2))
    assert joint_group(mesh, (0, 1, 2)) is dist.group.WORLD  # nothing new where there is one
    assert joint_group(mesh, (2,)) is mesh.get_group(2)
    made = joint_group(mesh, (1, 2))
    assert dist.get_process_group_ranks(made) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert joint_group(init_device_mesh("cpu", (2, 1, 2)), (1, 2)) is made  # by its ranks, once
    value, lane = torch.tensor([float(rank)]), Lane("test", torch.device("cpu"))
    lane.all_reduce(made, [value], name="test").wait()
    assert value.item() == (1.0 if rank < 2 else 5.0)


def test_a_group_over_several_axes_is_made_once(ranks):
    ranks(4, _joint)


def _scalar_only(rank, world):
    """A replicated parameter is counted once, not once per rank; a rank without rows of anything takes part."""
    module = nn.Linear(1, 1, bias=False)
    module.scale = nn.Parameter(torch.tensor(3.0))
    fully_shard(module)
    for p, value in zip(module.parameters(), (4.0, 3.0)):
        p.grad = torch.full_like(p, value)
    assert clip_grad_norm_(module.scale, 100.0).item() == 3.0
    assert clip_grad_norm_([module.weight], 100.0).item() == 4.0
    assert clip_grad_norm_(module.parameters(), 1.0).item() == 5.0
    assert grad_norms(module) == pytest.approx({"weight": 0.8, "scale": 0.6}, rel=1e-5)
    assert clip_grad_norm_(module, 1.0, INF).item() == pytest.approx(0.8)
    module.zero_grad()
    assert clip_grad_norm_(module, 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_replicated_parameters_count_once_and_empty_shards_take_part(ranks):
    ranks(3, _scalar_only)


def _mixed(rank, world):
    """Two meshes, two dtypes, a tensor-parallel and a plain parameter: as if one vector."""
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    torch.manual_seed(1)
    parts = [nn.Linear(5, 6), nn.Linear(6, 7, dtype=torch.bfloat16), nn.Linear(3, 3, bias=False)]
    parts.extend(nn.Linear(4, 4, bias=False) for _ in range(3))
    gradients = [torch.randn_like(p) for part in parts for p in part.parameters()]
    wanted = {t: torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in gradients]), t) for t in (1, 2, INF)}
    for part, mesh in zip(parts, meshes):
        fully_shard(part, mesh=mesh)
    # The second mesh has parameters that are cut over either of its axes, and over both.
    cuts = ([Replicate(), Shard(1)], [Shard(0), Replicate()], [Shard(1), Shard(0)])
    for part, placements in zip(parts[3:], cuts):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), meshes[1], placements))
    parameters = [p for part in parts for p in part.parameters()]
    for p, g in zip(parameters, gradients):
        cut = isinstance(p, DTensor)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if cut else g.clone()
    for norm_type, value in wanted.items():
        count, stop = collectives()
        norm = clip_grad_norm_(parameters, INF, norm_type)
        stop()
        assert len(count) == 2  # one per mesh
        assert norm.item() == pytest.approx(value.item(), rel=1e-3)
    clip_grad_norm_(parameters, wanted[2].item() / 2)
    for p, g in zip(parameters, gradients):
        torch.testing.assert_close(full(p.grad), g / 2, rtol=1e-2, atol=1e-3)
        assert p.grad.dtype == g.dtype


def test_meshes_and_dtypes_mix(ranks):
    ranks(4, _mixed)


def _per_parameter(rank, world):
    one, ours = with_gradients(rank, world)
    for norm_type in (1, 2, INF):
        grads, weights = grad_norms(ours, norm_type), weight_norms(ours, norm_type)
        assert list(grads) == [n for n, p in one.named_parameters() if p.grad is not None]
        assert list(weights) == [n for n, _ in one.named_parameters()]
        for name, p in one.named_parameters():
            assert weights[name] == pytest.approx(p.norm(norm_type).item(), rel=1e-4)
            if p.grad is not None:
                assert grads[name] == pytest.approx(p.grad.norm(norm_type).item(), rel=1e-3)


def test_norms_per_parameter_are_global(ranks):
    ranks(2, _per_parameter)


def _nonfinite(rank, world, shape):
    ours = with_gradients(rank, world, mesh=init_device_mesh("cpu", shape))[1]
    assert find_nonfinite(ours) == []
    if rank == 1:
        ours.head.weight.grad.to_local()[0, 0] = math.nan
        ours.blocks[1].up.weight.grad.to_local()[0, 0] = -INF
    if rank == 0:
        ours.head.weight.grad.to_local()[1, 0] = INF
    found = find_nonfinite(ours)
    assert found == [("blocks.1.up.weight", 1), ("head.weight", 0), ("head.weight", 1)]
    if len(shape) == 2:
        return  # replicas that differ, as here, have norms that differ
    for norm_type in (1, 2, INF):
        # A maximum over ranks must not lose the NaN of one.
        assert math.isnan(clip_grad_norm_(ours.head.weight, INF, norm_type).item())
        with pytest.raises(RuntimeError, match="find_nonfinite"):
            clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
    assert math.isinf(clip_grad_norm_(ours.blocks[1].up.weight, INF, INF).item())


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_nonfinite_gradients_are_named_with_their_rank(ranks, shape):
    ranks(math.prod(shape), _nonfinite, shape)


def _some_here(rank, world, shape):
    """Ranks whose batches used different parts of the model: each parameter is spoken of by its name all the same."""
    mesh = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False, dtype=torch.float64) for name in "abcd"})
    model["plain"] = nn.Linear(2, 2, bias=False)
    for name in "abcd":
        fully_shard(model[name], mesh=mesh)
    missing = {0: "bd", 1: "ad", 2: "abd", 3: "d"}[rank]
    for number, name in enumerate("abc"):
        if name not in missing:
            model[name].weight.grad = torch.full_like(model[name].weight, number + 1.0)
    if rank == 0:
        model["plain"].weight.grad = torch.ones(2, 2)
        model["c"].weight.grad.to_local()[0, 0] = math.nan
    if rank == 1:
        model["b"].weight.grad.to_local()[0, 0] = INF
    assert find_nonfinite(model) == [("b.weight", 1), ("c.weight", 0)]
    for name in "bc":
        if model[name].weight.grad is not None:
            model[name].weight.grad.to_local().nan_to_num_(7.0, 7.0)
    norms = grad_norms(model, 1)
    wanted = ["a.weight", "b.weight", "c.weight"]
    assert list(norms) == (wanted if rank else [*wanted, "plain.weight"])
    norm = clip_grad_norm_([p for n, p in model.named_parameters() if n != "plain.weight"], INF, 1)
    if len(shape) == 1:  # replicas that differ, as here, have norms that differ
        assert list(norms.values())[:3] == [8.0, 16.0 + 5.0, 48.0 + 4.0]
        assert norm.item() == sum(list(norms.values())[:3])


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_ranks_that_have_different_gradients_speak_of_the_same_parameters(ranks, shape):
    ranks(math.prod(shape), _some_here, shape)


def _low_precision_gradients(rank, world):
    """Gradients that rest in bf16 are clipped as they are; the optimizer casts them, or is given them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, grad_dtype=torch.bfloat16)
    model = with_gradients(rank, world, mp_policy=policy)[1]
    grads = {n: full(p.grad).float() for n, p in model.named_parameters() if p.grad is not None}
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
    expected = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
    assert clip_grad_norm_(model, INF).item() == pytest.approx(expected, rel=1e-5)
    before = {n: full(p).clone() for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="fully_shard_optimizer"):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        torch.testing.assert_close(full(p), before[name] - 0.5 * grads.get(name, 0.0), rtol=0, atol=0)
    seen = set()

    class Looks(torch.optim.Optimizer):
        def step(self, closure=None):
            seen.update(p.grad.dtype for group in self.param_groups for p in group["params"] if p.grad is not None)

    fully_shard_optimizer(Looks(model.parameters(), {}), precision_aware=True).step()
    assert seen == {torch.bfloat16}
    fully_shard_optimizer(Looks(model.parameters(), {})).step()
    assert seen == {torch.bfloat16, torch.float32}
    # PITFALL 32: other gradients, and none, may follow.
    loss_of(model, next(batches(1, ROWS))).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, next(batches(1, ROWS))).backward()
    optimizer.step()


def test_gradients_may_rest_in_a_lower_precision_than_main(ranks):
    ranks(2, _low_precision_gradients)


def _decoupled(rank, world):
    """Gradients that are not in `.grad` have the same norms, and are clipped."""
    reference, model = with_gradients(rank, world)
    norms = grad_norms(model)
    model.zero_grad()
    model.set_decoupled_gradients()
    loss_of(model, next(batches(1, ROWS)).chunk(world)[rank]).backward()
    assert grad_norms(model) == pytest.approx(norms)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
    torch.testing.assert_close(clip_grad_norm_(model, INF).item(), 0.1, rtol=1e-4, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    weight = next(parameter for parameter in model.parameters() if parameter.decoupled_grad is not None)
    weight.decoupled_grad.to_local().fill_(math.nan)
    assert {rank for _, rank in find_nonfinite(model)} == set(range(world))


def test_decoupled_gradients_are_clipped(ranks):
    ranks(2, _decoupled)


def _unsharded_root(rank, world):
    """After a forward without a backward the root shows full parameters; the sharded ones have the gradients."""
    reference, model = with_gradients(rank, world)
    names = grad_norms(model).keys()
    loss = loss_of(model, next(batches(1, ROWS)).chunk(world)[rank])
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert grad_norms(model).keys() == names
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), expected)
    del loss
    torch.testing.assert_close(clip_grad_norm_(model, INF).item(), 0.1, rtol=1e-4, atol=0)


def _other_placements(rank, world):
    """A gradient that a user has put in place of another is placed as it says, not as its parameter."""
    reference, model = with_gradients(rank, world)
    parameter = max((p for p in model.parameters() if p.grad is not None), key=torch.Tensor.numel)
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), expected)


@pytest.mark.parametrize("body", [_unsharded_root, _other_placements])
def test_gradients_are_found_where_they_are(ranks, body):
    ranks(2, body)


@pytest.mark.parametrize("norm_type", [0.5, 2.0, 3.0, INF])
def test_norms_of_large_tensors(norm_type):
    parameter = nn.Parameter(torch.zeros(3, 98_765))  # not a multiple of what a norm on the CPU is computed by
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    parameter.grad[-1, -1] = 5e3  # the last element counts
    before = parameter.grad.clone()
    wanted = torch.linalg.vector_norm(before.double(), norm_type)
    norm = clip_grad_norm_([parameter], wanted.item() / 2, norm_type)
    torch.testing.assert_close(norm.double(), wanted, rtol=2e-5, atol=0.0)
    torch.testing.assert_close(parameter.grad, before / 2, rtol=2e-5, atol=0.0)
    parameter.grad[0, 7] = math.nan
    assert clip_grad_norm_([parameter], 1.0, norm_type).isnan()
