"""`shard_placement_fn`: parameters cut on any dim, evenly or not, or over another mesh than their unit's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flatshard
from flatshard import fully_shard, fully_shard_optimizer
from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.units.unit import unit_of

pytestmark = pytest.mark.sampled(2)
needs_placement_results = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has no ShardPlacementResult"
)


class Net(nn.Module):
    """Weights of two and three dims, of sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.mix = nn.Parameter(torch.randn(3, 5, 8))
        self.down = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return self.down(torch.einsum("abc,nc->na", self.mix, h)) * self.scale


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Net(), nn.Linear(4, 6), Net())


def last_dim(parameter):
    return Shard(-1) if parameter.dim() > 1 else None


def middle_dim(parameter):
    return Shard(parameter.dim() // 2)


def shard(model, choose, **choices):
    if "outer_strategy" in choices:
        shape = (2, dist.get_world_size() // 2)
        choices.setdefault("mesh", init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    for module in model:
        fully_shard(module, shard_placement_fn=choose, **choices)
    return fully_shard(model, shard_placement_fn=choose, **choices)


def _train(rank, world, choose, wrap, choices):
    """Losses, gradients and weights of several steps equal those of one process with the whole batch."""
    reference, model = build(), shard(build(), choose, **choices)
    flatshard.check_buffers(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    if wrap:
        fully_shard_optimizer(optimizers[0])
    data = torch.randn(4, 4 * world, 6, generator=torch.Generator().manual_seed(1))
    for number, batch in enumerate(data):
        loss = model(batch.chunk(world)[rank]).square().mean()
        if number == 1:
            flatshard.check_buffers(model)
        loss.backward()
        wanted = reference(batch).square().mean()
        wanted.backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        torch.testing.assert_close(mean.float(), wanted.detach())
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            assert ours.grad.placements == ours.placements
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
        norms = [clip(m.parameters(), 0.1) for m, clip in ((model, flatshard.clip_grad_norm_), (reference, _clip))]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, rtol=1e-5, atol=1e-6)


_clip = torch.nn.utils.clip_grad_norm_
WIDE = flatshard.MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)


@pytest.mark.parametrize(
    ("world", "choose", "wrap", "choices"),
    [
        (2, last_dim, True, {"mp_policy": WIDE}),
        (3, middle_dim, False, {"reshard_after_forward": False}),
        (2, last_dim, False, {"strategy": 2}),
        (4, middle_dim, True, {"outer_strategy": "optim"}),
        pytest.param(2, middle_dim, True, {}, marks=pytest.mark.full),
        pytest.param(3, last_dim, True, {"strategy": 1, "layout": "auto"}, marks=pytest.mark.full),
        pytest.param(4, middle_dim, False, {"reshard_after_forward": 2}, marks=pytest.mark.full),
    ],
)
def test_any_dim_trains_as_on_one_process(ranks, world, choose, wrap, choices):
    ranks(world, _train, choose, wrap, choices)


def _shards(rank, world):
    """Each shard is what distribute_tensor makes of the whole, contiguous, and survives state dicts and checkpoints."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = build(), shard(build(), last_dim, mesh=mesh)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        dims = theirs.dim()
        wanted = (Replicate(), Shard(dims - 1 if dims > 1 else 0) if dims else Replicate())
        assert ours.placements == wanted, name
        expected = distribute_tensor(theirs.data, mesh, wanted)
        assert ours.to_local().is_contiguous()
        assert torch.equal(ours.to_local(), expected.to_local())
        assert ours.stride() == theirs.stride()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(full[name], value) for name, value in reference.state_dict().items())
    other = shard(nn.Sequential(Net(), nn.Linear(4, 6), Net()), middle_dim, mesh=mesh)
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
    for ours, theirs in zip(other.parameters(), reference.parameters()):
        assert torch.equal(ours.full_tensor(), theirs)
    twice = {name: value.clone() * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(twice, assign=True)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    doubled = copy.deepcopy(reference)
    doubled.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
    torch.testing.assert_close(model(x), doubled(x))


def test_shards_are_those_of_torch_chunk_and_survive_state_dicts(ranks):
    ranks(4, _shards)


def _accumulate(rank, world, outer):
    """Unreduced gradients of micro-batches, and those that rest, are kept in the order of the buffers."""
    reference, model = build(), shard(build(), middle_dim, outer_strategy=outer)
    data = torch.randn(3, 2 * world, 6, generator=torch.Generator().manual_seed(1))
    for number, batch in enumerate(data):
        model.set_requires_gradient_sync(number != 0)
        model.set_requires_all_reduce(number == 2)
        model(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_accumulated_gradients_of_any_dim(ranks, outer):
    ranks(4, _accumulate, outer)


def _checkpoint(rank, world, folder):
    """Over one axis, cut in other ways, and over two."""

    def make(choose, **choices):
        model = shard(nn.Sequential(Net(), nn.Linear(4, 6), Net()), choose, **choices)
        return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))

    torch.manual_seed(0)
    model, optimizer = make(last_dim)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ways = [{}, {"outer_strategy": "optim"}, {}] if world == 4 else [{}]
    for number, choices in enumerate(ways):
        flatshard.checkpoint.save(f"{folder}/{number}", model, optimizer, progress=False)
        other, its = make(middle_dim, **choices)
        flatshard.checkpoint.load(f"{folder}/{number}", other, its, progress=False)
        for ours, theirs in zip(model.parameters(), other.parameters()):
            assert torch.equal(ours.full_tensor(), theirs.full_tensor())
            for key in ("exp_avg", "exp_avg_sq"):
                mine, loaded = optimizer.state[ours][key], its.state[theirs][key]
                assert is_cut_alike(loaded, theirs)
                assert torch.equal(mine.full_tensor(), loaded.full_tensor())
        saved = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        for name, whole in flatshard.checkpoint.iter_full_tensors(other, bucket_bytes=1):
            assert torch.equal(whole, saved.pop(name))
        assert not saved
        full = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(full[name], p.full_tensor()) for name, p in model.named_parameters())
        twice = {name: 2 * value for name, value in full.items()}
        set_model_state_dict(model, dict(twice), options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(twice[name], p.full_tensor()) for name, p in model.named_parameters())
        model, optimizer = other, its


@pytest.mark.parametrize("world", [3, 4])
def test_checkpoints_move_between_dims(ranks, tmp_path, world):
    ranks(world, _checkpoint, str(tmp_path))


def _own_mesh(rank, world):
    """A parameter on a mesh of its own: gathered and averaged over that mesh alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    world_mesh = init_device_mesh("cpu", (4,))
    pair = _fsdp_common.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)

    def choose(parameter):
        return _fsdp_common.ShardPlacementResult(Shard(1), pair) if parameter.dim() == 2 else None

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=world_mesh, shard_placement_fn=choose)
    assert model[0].weight.device_mesh == mesh["shard"]
    assert model[0].weight.placements == (Shard(1),)
    assert model[0].bias.device_mesh == world_mesh
    data = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
    model(data[rank]).square().sum().backward()
    losses = [reference(batch).square().sum() for batch in data]
    names, parameters = zip(*reference.named_parameters())
    each = [torch.autograd.grad(loss, parameters) for loss in losses]
    ours = dict(model.named_parameters())
    for index, name in enumerate(names):
        over = [rank // 2 * 2, rank // 2 * 2 + 1] if "weight" in name else range(4)
        wanted = torch.stack([each[other][index] for other in over]).mean(0)
        assert isinstance(ours[name].grad, DTensor)
        torch.testing.assert_close(ours[name].grad.full_tensor(), wanted)


@needs_placement_results
def test_a_parameter_can_have_a_mesh_of_its_own(ranks):
    ranks(4, _own_mesh)


class Experts(nn.Module):
    """A matrix for all, and one per expert, of which each rank of an expert-parallel pair has half."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(4, 3, 4))
        if mesh is not None:
            self.experts = nn.Parameter(distribute_tensor(self.experts.data, mesh, [Shard(0)]))

    def forward(self, x, mine):
        weights = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts[mine]
        return torch.einsum("eij,nj->eni", weights, torch.tanh(self.gate(x)))


def _experts(rank, world):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model, reference = Experts(sparse["expert"]), Experts()
    chosen = _fsdp_common.FSDPMeshInfo(sparse["data"], shard_mesh_dim=0)

    def choose(parameter):
        return _fsdp_common.ShardPlacementResult(Shard(1), chosen) if parameter.dim() == 3 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=choose, reshard_after_forward=True)
    assert model.experts.placements == (Shard(1), Shard(0))
    data = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1))
    halves = [slice(0, 2), slice(2, 4)]
    model(data[rank], halves[rank % 2]).square().sum().backward()
    # Each expert sees the data of two ranks, and its gradient is their mean; the gate's is the mean of all four.
    losses = [reference(batch, halves[number % 2]).square().sum() for number, batch in enumerate(data)]
    gate = torch.autograd.grad(sum(losses) / 4, reference.gate.weight, retain_graph=True)[0]
    experts = torch.autograd.grad(sum(losses) / 2, reference.experts)[0]
    torch.testing.assert_close(model.gate.weight.grad.full_tensor(), gate)
    torch.testing.assert_close(model.experts.grad.full_tensor(), experts)
    norm = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(flatshard.clip_grad_norm_(model, 1.0), norm)


@needs_placement_results
def test_experts_on_a_mesh_of_their_own(ranks):
    ranks(4, _experts)


def _refused(rank, world):
    model = nn.Linear(4, 4)
    before = dict(model.named_parameters())
    for choose, error, text in [
        (lambda p: Shard(2), ValueError, "weight"),
        (lambda p: Replicate(), ValueError, "Shard"),
        (3, TypeError, "function"),
    ]:
        with pytest.raises(error, match=text):
            fully_shard(model, shard_placement_fn=choose)
    with pytest.raises(ValueError, match="layout='tensor'"):
        fully_shard(model, shard_placement_fn=last_dim, layout="flat")
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(p is before[name] for name, p in model.named_parameters())


def test_impossible_placements_are_refused(ranks):
    ranks(1, _refused)


def _resident_bytes(rank, world, strategy, choose):
    """What compute weights take that rest on every rank."""
    torch.manual_seed(0)
    model, reference = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
    reference.load_state_dict(model.state_dict())
    policy = flatshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, strategy=strategy, shard_placement_fn=choose, mp_policy=policy)
    x, optimizer = torch.ones(2, 64), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        wanted = x.bfloat16() @ model.weight.full_tensor().bfloat16().T
        torch.testing.assert_close(model(x), wanted)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    group = unit_of(model).groups[0]
    storages = [group.source.buffer.local.untyped_storage(), *(m.full.untyped_storage() for m in group.params)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("strategy", [1, 2])
def test_weights_cut_on_dim_1_rest_once(ranks, strategy):
    assert ranks(2, _resident_bytes, strategy, last_dim) == [2 * 64 * 96] * 2
