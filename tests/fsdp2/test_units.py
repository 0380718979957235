"""What fully_shard makes of a module, for code that asks as it would ask PyTorch's."""

import inspect

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication

import flatshard
from flatshard import FSDPModule, fully_shard
from tests.fsdp2.cases import check_grads, mine, reference_grads, sharded_chain

NAMES = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def test_everything_of_the_composable_api_is_here():
    for name in NAMES:
        assert hasattr(flatshard, name), name
        assert name in flatshard.__all__


def test_methods_have_pytorchs_arguments_and_defaults():
    theirs = vars(torch_fsdp.FSDPModule)
    for name in theirs:
        if name.startswith("_") or not callable(theirs[name]):
            continue
        ours = vars(FSDPModule)[name]
        assert not ours.__doc__.startswith("Not supported; raises"), name
        wanted = inspect.signature(inspect.unwrap(theirs[name])).parameters.values()
        found = inspect.signature(ours).parameters.values()
        kinds = [[(p.name, p.kind, p.default) for p in each] for each in (found, wanted)]
        assert kinds[0] == kinds[1], name
    wanted = list(inspect.signature(inspect.unwrap(torch_fsdp.fully_shard)).parameters)
    assert list(inspect.signature(fully_shard).parameters)[: len(wanted)] == wanted


def _asks(rank, world):
    model = sharded_chain()
    states = [fully_shard.state(module) for module in (model, *model.blocks)]
    assert None not in states
    assert len({id(state) for state in states}) == len(states)
    assert fully_shard.state(model.head) is None
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.device_mesh == init_device_mesh("cpu", (world,))
    with pytest.raises(ValueError, match="already"):
        fully_shard(model)


def test_a_unit_can_be_asked_for(ranks):
    ranks(2, _asks)


def _policies(rank, world):
    half = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = nn.Linear(4, 4)
    fully_shard(model, mp_policy=half, offload_policy=torch_fsdp.OffloadPolicy())
    assert model(torch.ones(1, 4)).dtype == torch.float32
    model.unshard()
    assert model.weight.dtype == torch.bfloat16
    model.reshard()
    other = fully_shard(nn.Linear(4, 4), offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False))
    other(torch.ones(1, 4)).sum().backward()
    assert other.weight.grad.device.type == "cpu"
    plain = fully_shard(nn.Linear(4, 4), mp_policy=None, offload_policy=None)  # no choice
    assert plain(torch.ones(1, 4)).dtype == torch.float32
    for wrong in ({"mp_policy": torch.bfloat16}, {"offload_policy": "cpu"}):
        with pytest.raises(TypeError):
            fully_shard(nn.Linear(4, 4), **wrong)


def test_pytorchs_policies_are_taken(ranks):
    ranks(2, _policies)


def _replicated(rank, world):
    model = sharded_chain()
    outer = nn.Sequential(nn.Linear(6, 6), model)
    dense = outer[0]
    with torch.no_grad():
        dense.weight.copy_(torch.eye(6))
        dense.bias.zero_()
    replicate(outer)  # takes what is no unit's
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    outer(mine(rank, world)).sum().backward()
    check_grads(model, reference_grads(world))
    assert not isinstance(dense.weight.grad, DTensor)
    with implicit_replication():
        optimizer.step()
    # And the reverse: fully_shard leaves alone what replicate has taken.
    parts = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    replicate(parts[0])
    fully_shard(parts)
    assert not isinstance(parts[0].weight, DTensor)
    assert isinstance(parts[1].weight, DTensor)


def test_replicate_and_fully_shard_leave_each_other_alone(ranks):
    ranks(2, _replicated)
