"""A model with every kind of parameter, and states of it to compare."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatshard import fully_shard, fully_shard_optimizer
from tests.dist import models
from tests.dist.models import Net

ROWS = 12
# strategy, outer strategy on a mesh of two axes (None: one axis; "tp": tensor parallel), layout
PLACES = [
    ("optim_grads_params", None, "tensor"),
    ("optim_grads_params", None, "flat"),
    ("optim", None, "flat"),
    ("no_shard", None, "tensor"),
    ("optim_grads_params", "no_shard", "tensor"),
    ("optim_grads", "no_shard", "flat"),
    ("optim_grads_params", "optim", "tensor"),
    ("optim_grads_params", "optim", "flat"),
    ("optim_grads_params", None, "auto"),
    ("optim_grads_params", "tp", "tensor"),
]


class Everything(Net):
    """`Net` with tied, frozen, never-used, scalar, bfloat16 and integer tensors."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(5, 7)
        self.coarse = nn.Parameter(torch.zeros(9, 2, dtype=torch.bfloat16))
        self.blocks[1].up.weight.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.zeros(3, 4, dtype=torch.int32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + self.coarse.float().mean())


def make(seed: int) -> Everything:
    torch.manual_seed(seed)
    model = Everything()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.seen.fill_(seed + 40)
    model.table.random_(0, 100)
    return model


def fits(place, world) -> bool:
    return place[1] is None or world % 2 == 0


# (world, place) of who saves or loads
ENDS = [(world, place) for world in (1, 2, 3, 4) for place in PLACES if fits(place, world)]


def partners(shift):
    """Pairs of ends, as few as let every place save once and load once, in all worlds and with others."""

    def end(place, number):
        worlds = [world for world in (1, 2, 3, 4) if fits(place, world)]
        return worlds[number % len(worlds)], place

    loaders = PLACES[shift:] + PLACES[:shift]
    return [(end(a, i), end(b, i // 2 + shift)) for i, (a, b) in enumerate(zip(PLACES, loaders))]


def shard(model, world, place):
    strategy, outer, layout = place
    if outer == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("inner", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh, outer = mesh["inner"], None
    else:
        shape, names = ((world,), ("inner",)) if outer is None else ((2, world // 2), ("outer", "inner"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy, outer_strategy=outer, layout=layout)
    return fully_shard(model, mesh=mesh, strategy=strategy, outer_strategy=outer, layout=layout)


def train(model, optimizer, steps, rank, world, place=PLACES[0]):
    """Some steps, in which tensor-parallel ranks get the same rows."""
    tensor_parallel = 2 if place[1] == "tp" else 1
    return models.train(model, optimizer, steps, ROWS, rank // tensor_parallel, world // tensor_parallel)


def groups_of(model):
    """Two parameter groups of other options than the defaults."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() <= 1], "betas": (0.8, 0.9)},
    ]


def trained(rank, world, place, seed=1, steps=2, local_step=False):
    model = shard(make(seed), world, place)
    made = torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True)
    if local_step:
        fully_shard_optimizer(made)
    if steps:
        train(model, made, steps, rank, world, place)
    return model, made


def full_state(model, optimizer=None):
    """Whole tensors by name, of model and optimizer state. A collective call."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, entries in ({} if optimizer is None else optimizer.state).items():
        for key, value in entries.items():
            found[f"optim.{names[parameter]}.{key}"] = value
    return whole(found)


@torch.no_grad()
def whole(tensors):
    """Copies, of DTensors whole: put together from what all ranks say that they hold, in one exchange."""
    mine = {name: held(value) for name, value in tensors.items() if isinstance(value, DTensor)}
    ranks = [mine]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    found = {name: value.clone() for name, value in tensors.items() if name not in mine}
    for name in mine:
        value = tensors[name]
        if any(len(rank[name]) > 1 for rank in ranks):  # a local tensor in several places
            found[name] = value.full_tensor().clone()
            continue
        full, seen = torch.empty(value.shape, dtype=value.dtype), torch.zeros(value.shape, dtype=torch.bool)
        for box, content in (part for rank in ranks for part in rank[name]):
            part = torch.frombuffer(bytearray(content), dtype=value.dtype).view(full[box].shape)
            assert not seen[box].any() or torch.equal(full[box], part), f"{name}: replicas differ"
            full[box], seen[box] = part, True
        assert seen.all(), f"{name}: nobody holds all of it"
        found[name] = full
    return {name: found[name] for name in tensors}


def held(value):
    """What this rank holds of a DTensor: where, and the bytes there."""
    boxes = [
        tuple(slice(first, first + count) for first, count in zip(box.offsets, box.sizes))
        for box in value.__create_chunk_list__()
        if 0 not in box.sizes
    ]
    return [(box, value.to_local().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()) for box in boxes]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
