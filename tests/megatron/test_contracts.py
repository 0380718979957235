"""What users of the first version rely on in its models, meshes and helpers."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flatshard.checkpoint import CheckpointError
from flatshard.megatron import MixedPrecisionPolicy, fully_shard
from flatshard.megatron.uneven_dtensor import (
    gather_and_compute_chunk_metadata,
    preprocess_state_dict_for_uneven_dtensor,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    validate_state_dict_for_uneven_dtensor,
    validate_uneven_dtensor,
)

pytestmark = pytest.mark.sampled(2)


class Pictures(nn.Module):
    """Weights of four dims, in units that hold one layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding="same") for _ in range(2))
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        x = x.expand(1, 3, 4, 4)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.permute(0, 2, 3, 1)).flatten()


class Sequences(nn.Module):
    """One unit that holds almost everything, of which some parameters have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"d_model": 2, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0}
        self.transformer = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **kind)
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        x = x[0, :, :2]
        return self.out(self.transformer(x, x)).flatten()


class Bare(nn.Module):
    """The root itself has the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3, 4)), nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias).flatten()


UNITS = {Pictures: [nn.Conv2d, nn.Linear], Sequences: [nn.Transformer], Bare: [Bare]}


def meshed(kind, shape, strategy, outer, seed, on_meta=False, **choices):
    """A model on axes of the names that Megatron-FSDP's guide uses, some of them made of others, and its optimizer."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    hybrid = mesh["dp_outer", "dp_shard", "cp"]._flatten("hsdp").get_group()
    torch.manual_seed(seed)
    with torch.device("meta" if on_meta else "cpu"):
        module = kind()
    return fully_shard(
        module,
        torch.optim.Adam(module.parameters(), lr=0.01),
        device_mesh=mesh,
        dp_shard_dim="dp_shard_cp" if shape[2] > 1 else "dp_shard",
        dp_outer_dim=None if outer is None else "dp_outer",
        tp_dim="tp",
        hybrid_fsdp_group=None if outer is None else hybrid,
        fsdp_unit_modules=UNITS[kind],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy="no_shard" if outer is None else outer,
        init_model_with_meta_device=on_meta,
        report_nan_in_param_grad=True,
        **choices,
    )


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def whole(tensor):
    return uneven_dtensor_to_full_tensor(tensor.detach())


def _trains(rank, world, shape, cases):
    x = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    for kind, strategy, outer, choices in cases:
        model, optimizer = meshed(kind, shape, strategy, outer, 0, **choices)
        reference = kind()
        reference.load_state_dict({name.removeprefix("module."): whole(v) for name, v in model.state_dict().items()})
        theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
        for sync in (False, True):  # two micro-batches of a step, without and with synchronisation
            model.set_model_auto_sync(sync)
            loss_of(model, x).backward()
            loss_of(reference, x).backward()
        for (name, ours), plain in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(whole(ours.grad), plain.grad, msg=lambda m, n=f"{kind} {name}": f"{n}: {m}")
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        for ours, plain in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(whole(ours), plain.data, rtol=1e-4, atol=1e-5)


STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
PLAIN = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None)}
META = {"on_meta": True, "maxpool_double_buffer": True}
OUTER = [None, "no_shard", "optim"]


@pytest.mark.limit(120)
@pytest.mark.parametrize("shape", [(2, 2, 1, 1), pytest.param((1, 2, 2, 1), marks=pytest.mark.full)])
def test_models_of_many_kinds_under_all_strategies(ranks, shape):
    product = itertools.product(STRATEGIES, OUTER)
    chosen = [(s, o) for s, o in product if o != "optim" or s == "optim_grads_params"]
    cases = []
    for number, (strategy, outer) in enumerate(chosen):
        kind = list(UNITS)[number % len(UNITS)]
        cases.append((kind, strategy, outer, META if strategy != "no_shard" and number % 2 else PLAIN))
    ranks(4, _trains, shape, cases)


def _restores(rank, world, folder, strategy, outer):
    """Of a model and an optimizer: all that is saved is there again, and the loss is the same to the last bit."""
    x = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    for kind in (Pictures, Sequences):
        model, optimizer = meshed(kind, (2, 2, 1, 1), strategy, outer, 0)
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        before = loss_of(model, x).item()
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        place = f"{folder}/{kind.__name__}"
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=place)
        model, optimizer = meshed(kind, (2, 2, 1, 1), strategy, outer, 1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=place)
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        found = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        _compare(saved, found)
        model.eval()
        loss = loss_of(model, x)
        assert loss.item() == before
        loss.backward()
        optimizer.step()


def _compare(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _compare(one[key], other[key])
    elif isinstance(one, DTensor):
        assert one.shape == other.shape
        assert torch.equal(one.to_local(), other.to_local())
    else:
        assert one == other if not isinstance(one, torch.Tensor) else torch.equal(one, other)


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [
        pytest.param("optim_grads_params", OUTER[-1]),
        ("optim_grads", "no_shard"),
        pytest.param("optim", "no_shard", marks=pytest.mark.full),
    ],
)
def test_what_was_saved_is_there_again(ranks, tmp_path, strategy, outer):
    ranks(4, _restores, str(tmp_path), strategy, outer)


def _cut(whole, mesh, placements, sizes):
    """A DTensor whose part along each sharded axis has this rank's of the given sizes."""
    local = whole
    for axis, (placement, lengths) in enumerate(zip(placements, sizes)):
        if isinstance(placement, Shard):
            place = mesh.get_local_rank(axis)
            local = local.narrow(placement.dim, sum(lengths[:place]), lengths[place])
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _uneven(rank, world, folder):
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows = torch.arange(40.0).view(10, 4)
    cube = torch.arange(13.0 * 5 * 3).view(13, 5, 3)
    cases = [
        (rows, line, [Shard(0)], [[1, 2, 3, 4]]),
        (rows, line, [Shard(0)], [[0, 7, 0, 3]]),
        (rows.T.contiguous(), line, [Shard(1)], [[4, 3, 2, 1]]),
        (cube, square, [Shard(0), Shard(1)], [[9, 4], [1, 4]]),
        (cube, square, [Shard(2), Replicate()], [[2, 1], []]),
    ]
    for number, (wanted, mesh, placements, sizes) in enumerate(cases):
        tensor = _cut(wanted, mesh, placements, sizes)
        box = gather_and_compute_chunk_metadata(tensor)
        part = wanted[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]
        assert torch.equal(part, tensor.to_local())
        validate_uneven_dtensor(tensor)
        assert torch.equal(uneven_dtensor_to_full_tensor(tensor), wanted)
        for dim in range(wanted.dim()):
            for given in (2, [1, wanted.shape[dim] - 1]):
                parts = split_dtensor(tensor, given, dim=dim, update_uneven_dtensor_chunk_meta=True)
                for found, expected in zip(parts, wanted.split(given, dim), strict=True):
                    assert torch.equal(uneven_dtensor_to_full_tensor(found), expected)
        state = preprocess_state_dict_for_uneven_dtensor({"deep": {"down": tensor}})
        dcp.save(state, checkpoint_id=f"{folder}/{number}")
        empty = _cut(torch.full_like(wanted, -1), mesh, placements, sizes)
        dcp.load(
            preprocess_state_dict_for_uneven_dtensor({"deep": {"down": empty}}), checkpoint_id=f"{folder}/{number}"
        )
        assert torch.equal(empty.to_local(), tensor.to_local())
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()]):
        assert torch.equal(uneven_dtensor_to_full_tensor(distribute_tensor(cube, square, placements)), cube)
    with pytest.raises(TypeError, match="DTensor"):
        uneven_dtensor_to_full_tensor(rows)


def test_uneven_tensors_of_any_shape_and_mesh(ranks, tmp_path):
    ranks(4, _uneven, str(tmp_path))


def _differ(rank, world):
    """Ranks that tell of different tensors are told so, all of them, and can go on afterwards."""
    mesh = init_device_mesh("cpu", (world,))

    def made(rows, placement=Shard(0), here=1):  # noqa: B008
        local = torch.zeros(here, 3)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=(rows, 3), stride=(3, 1))

    ours = made(world)
    for call, told in [
        (lambda: gather_and_compute_chunk_metadata(made(world + (rank == 0))), "contract mismatch"),
        (
            lambda: gather_and_compute_chunk_metadata(made(world, Replicate() if rank else Shard(0))),
            "contract mismatch",
        ),
        (lambda: gather_and_compute_chunk_metadata(made(world, here=2)), "do not compose"),
        (lambda: preprocess_state_dict_for_uneven_dtensor({f"{min(rank, 1)}": ours}), "contract mismatch"),
        (
            lambda: validate_state_dict_for_uneven_dtensor({"a": ours} | ({} if rank else {"b": ours})),
            "contract mismatch",
        ),
    ]:
        with pytest.raises(CheckpointError, match=told):
            call()
        dist.barrier()


def test_ranks_that_tell_of_different_tensors(ranks):
    ranks(3, _differ)
