"""Tensor subclasses that say themselves how they are gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flatshard
from flatshard import _torch, fully_shard, fully_shard_optimizer
from flatshard.engine.tree.roots import find_root
from flatshard.engine.units.unit import unit_of


def encode(rows):
    """Each row as whole numbers of one byte, and what one of them stands for."""
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return (rows / scale).round().to(torch.int8), scale


class Coded(torch.Tensor):
    """A matrix of float32 that travels as bytes: a quarter of the traffic."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self._data = data

    def __repr__(self):
        return f"Coded({self._data})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Coded(inner["_data"])

    seen: ClassVar[list] = []

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        self.seen.append((mesh, outer_size, outer_stride, module, mp_policy))
        rows = -(-outer_size[0] // mesh.size())
        codes, scale = encode(self._data)
        wide = torch.zeros(rows, *outer_size[1:], dtype=torch.int8, device=self.device)
        wide[: codes.shape[0]] = codes
        scales = torch.zeros(rows, *outer_size[1:], device=self.device)
        scales[: codes.shape[0], :1] = scale
        return (wide, scales), "remember"

    def fsdp_post_all_gather(self, gathered, remembered, param_dtype, *, out=None):
        assert remembered == "remember"
        codes, scales = gathered
        assert codes.dtype == torch.int8
        made = (codes * scales[:, :1]).to(param_dtype)
        if out is None:
            return made, (codes, scales, made)
        out.copy_(made)
        return None


class Simple(Coded):
    """By the older protocol: a mesh and nothing else, a tensor and nothing else; uneven parts are not padded."""

    def fsdp_pre_all_gather(self, mesh):
        codes, scale = encode(self._data)
        return (codes * scale).to(torch.float64), "remember"

    def fsdp_post_all_gather(self, gathered, remembered, param_dtype, *, out=None):
        (made,) = gathered
        if out is None:
            made = made.to(param_dtype)
            return made, (made,)
        out.copy_(made)
        return None


def build(kind=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        if kind is not None:
            layer.weight = nn.Parameter(kind(layer.weight.data))
    return model


def _train(rank, world, kind, sizes, choices):
    Coded.seen.clear()  # of another test in this process
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    reference, model = build(), build(kind)
    units = [model] if kind is Simple else [model[0], model[2], model]
    for unit in units:
        fully_shard(unit, mesh=mesh, **choices)
    fused = kind is Simple and world == 2
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused))
    masters = [p.detach().clone() for p in reference.parameters()]
    ours = torch.optim.Adam(masters, lr=1e-2)
    data = torch.randn(4, 4 * world, 6, generator=torch.Generator().manual_seed(1))
    for batch in data:
        for p, master in zip(reference.parameters(), masters):
            codes, scale = encode(master) if master.dim() > 1 else (master, 1)
            p.data.copy_(codes * scale)
            p.grad = None
        model(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
        for (name, sharded), p, master in zip(model.named_parameters(), reference.parameters(), masters):
            assert type(sharded.grad) is DTensor
            assert type(sharded.grad.to_local()) is torch.Tensor
            whole = sharded.grad.full_tensor()
            torch.testing.assert_close(whole, p.grad, msg=lambda m, n=name: f"{n}: {m}")
            master.grad = whole  # rounding to bytes would magnify the last bit
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters])
        torch.testing.assert_close(flatshard.clip_grad_norm_(model, 10.0), norm)
        for each in (optimizer, ours):
            each.step()
            each.zero_grad()
    for (name, sharded), master in zip(model.named_parameters(), masters):
        local = sharded.to_local()
        assert type(local) is (kind if "weight" in name else torch.Tensor)
        parts = [*master.chunk(sizes[-1]), *[master[:0]] * sizes[-1]]
        part = parts[mesh.get_local_rank(mesh.ndim - 1)]
        torch.testing.assert_close(local._data if "weight" in name else local, part)
    flatshard.check_buffers(model)
    if kind is Simple:  # matrices and biases are gathered by one launch, and reduced by two
        launches = [each.kind for each in unit_of(model).root.gather_lane.history]
        assert launches == ["all_gather"] * len(data)
        assert unit_of(model).root.reduce_lane.launched == 2 * len(data)
    if kind is Coded:
        given, size, stride, module, policy = Coded.seen[0]
        assert (given.ndim, given.size()) == (1, sizes[-1])
        assert (size, stride) == (torch.Size([8, 6]), (6, 1))
        assert module is model[0]
        assert policy is choices.get("mp_policy", policy)
        Coded.seen.clear()


@pytest.mark.parametrize(
    ("world", "kind", "sizes", "choices"),
    [
        (2, Coded, (2,), {}),
        (3, Coded, (3,), {"mp_policy": flatshard.MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
        (4, Coded, (2, 2), {"reshard_after_forward": False}),
        (2, Simple, (2,), {}),
        (3, Simple, (3,), {}),  # of the second matrix, one rank has nothing
    ],
)
def test_coded_weights_train_as_on_one_process(ranks, world, kind, sizes, choices):
    ranks(world, _train, kind, sizes, choices)


def _meta(rank, world):
    """From the meta device, by way of state dicts, to another dtype; and what rests is only the shards."""
    with torch.device("meta"):
        model = build(Coded)
    fully_shard(model)
    model.to_empty(device="cpu")
    whole = build().state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = whole[name].chunk(world)
            parameter.to_local().copy_(parts[rank])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(x)
        model.reshard()
        assert all(not storage.nbytes() for storage in _gathered(model))
        model.load_state_dict({name: value * 0 for name, value in state.items()}, assign=True)
        assert not model(x).any()
        model.load_state_dict(state)
        assert torch.equal(model(x), before)
    model.double()
    assert model[0].weight.dtype == torch.float64
    model(x.double()).sum().backward()
    assert model[0].weight.grad.dtype == torch.float64


def _gathered(model):
    groups = [group for group in unit_of(model).groups if group.is_extended]
    assert len(groups) == 1  # both matrices, which travel together
    owned = [tensor for group in groups for each in group.source.each for tensor in each._owned]
    return [tensor.untyped_storage() for tensor in (*groups[0].source.wire, *owned)]


def test_meta_models_and_state_dicts_of_subclasses(ranks):
    ranks(2, _meta)


def _refused(rank, world, folder):
    class Silent(Coded):
        fsdp_pre_all_gather = None

    with pytest.raises(ValueError, match=r"'0.weight'.*optim_grads_params"):
        fully_shard(build(Coded), strategy=1)
    model = build(Silent)
    fully_shard(model)
    with pytest.raises(TypeError, match=r"'0.weight' is a Silent"):
        model(torch.randn(1, 6))

    class Turned(Simple):
        def fsdp_pre_all_gather(self, mesh):
            return self._data.t().contiguous(), None

    uneven = nn.Linear(2, 3, bias=False)
    uneven.weight = nn.Parameter(Turned(uneven.weight.data))
    fully_shard(uneven)
    if rank:
        unit = unit_of(uneven)
        with pytest.raises(ValueError, match=r"'weight' has shards of unequal size.*\(2, 2\)"):
            unit.groups[0].gather(find_root(unit, uneven).gather_pool, "uneven")
    with pytest.raises(flatshard.checkpoint.CheckpointError, match="is a Coded"):
        flatshard.checkpoint.save(folder, fully_shard(build(Coded)), progress=False)
    patched = fully_shard(nn.Linear(2, 2))
    _torch.local_of(patched.weight).fsdp_pre_all_gather = lambda mesh: None
    with pytest.raises(TypeError, match=r"'weight'.*has that class already"):
        patched(torch.randn(1, 2))
    dist.barrier()


def test_what_cannot_be_gathered_is_named(ranks, tmp_path):
    ranks(2, _refused, str(tmp_path / "saved"))


class Quantised(Coded):
    """Codes and a scale for each row, and a shift for all; it says nothing of how it is gathered."""

    fsdp_pre_all_gather = fsdp_post_all_gather = None

    @staticmethod
    def __new__(cls, data, parts=None):
        return Coded.__new__(cls, data)

    def __init__(self, data, parts=None):
        self._codes, self._scale = encode(data) if parts is None else parts[:2]
        self._shift = torch.tensor([1, 0, -1]) if parts is None else parts[2]

    def __repr__(self):
        return "Quantised"

    @property
    def _data(self):
        return self._codes * self._scale + self._shift.sum()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            parts = [part.detach() for part in (args[0]._codes, args[0]._scale, args[0]._shift)]
            return cls(torch.empty(args[0].shape), parts)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self):
        return ["_codes", "_scale", "_shift"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Quantised(torch.empty(size), list(inner.values()))


def _composed(rank, world):
    """Rows that no rank count divides, fewer than there are ranks, and one in a parameter of a part that is whole."""
    for size in (7, 3, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, size, bias=False), nn.Linear(size, 2))
        model[0].weight = nn.Parameter(Quantised(model[0].weight.data), requires_grad=False)
        codes, reference = model[0].weight._codes.clone(), nn.Linear(size, 2)
        reference.load_state_dict(model[1].state_dict())
        whole = nn.functional.linear(torch.ones(1, 4), model[0].weight)
        fully_shard(model[0])
        fully_shard(model)
        assert _torch.local_of(model[0].weight)._codes.shape[0] <= -(-size // world)
        for _ in range(2):
            output = model(torch.ones(1, 4))
            wanted = reference(whole)
            assert output.equal(wanted)
            output.sum().backward()
            wanted.sum().backward()
            torch.testing.assert_close(model[1].weight.grad.full_tensor(), reference.weight.grad)
        with flatshard.gathered(model):
            assert model[0].weight._codes.equal(codes)


def test_frozen_subclasses_are_gathered_as_they_are(ranks):
    ranks(3, _composed)


def _inferred_first(rank, world, kind):
    model = build(kind)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    with torch.inference_mode():
        model(torch.ones(2, 6))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    reference = build()
    for layer in (reference[0], reference[2]):
        codes, scale = encode(layer.weight.data)
        layer.weight.data.copy_(codes * scale)
    reference(torch.ones(2, 6)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("kind", [Coded, Simple], ids=lambda kind: kind.__name__)
def test_subclasses_first_gathered_under_inference_mode_train(ranks, kind):
    ranks(2, _inferred_first, kind)
