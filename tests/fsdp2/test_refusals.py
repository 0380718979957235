"""What both refuse is caught, and recognised by its words, by code that was written for PyTorch's FSDP2."""

from __future__ import annotations

import re
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flatshard


def _twice(fully_shard):
    fully_shard(fully_shard(nn.Linear(4, 4)))


def _container(fully_shard):
    fully_shard(nn.ModuleList([nn.Linear(4, 4)]))


def _axes(fully_shard):
    fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1, 1, 1)))


def _strides(fully_shard):
    fully_shard(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last))


def _placement(fully_shard):
    fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: Replicate())


def _dim(fully_shard):
    fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: Shard(3))


def _group_size(fully_shard):
    fully_shard(nn.Linear(4, 4), reshard_after_forward=3)


def _kind_of_group_size(fully_shard):
    fully_shard(nn.Linear(4, 4), reshard_after_forward="never")


def _reshard(fully_shard):
    fully_shard(nn.Linear(4, 4)).set_reshard_after_forward(2)


def _prefetch(fully_shard):
    fully_shard(nn.Linear(4, 4)).set_modules_to_forward_prefetch([nn.Linear(4, 4)])


def _buffers(fully_shard):
    fully_shard(nn.Linear(4, 4)).set_reduce_scatter_max_input_buffers(0)


def _stream(fully_shard):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(nn.Linear(4, 4), mesh=mesh).set_all_reduce_hook(lambda output: None, stream=object())


def _custom_comm(fully_shard):
    model = fully_shard(nn.Linear(4, 4))
    model.set_custom_all_gather(MagicMock(spec=AllGather))
    model.set_allocate_memory_from_process_group_for_comm(True)


def _no_dims(fully_shard):
    _dims(fully_shard)()


def _sharded_on_dp(fully_shard):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, (Shard(0), Replicate())))
    fully_shard(module, mesh=mesh, dp_mesh_dims=_dims(fully_shard)(shard="dp"))


def _dims(fully_shard):
    from torch.distributed.fsdp import DataParallelMeshDims

    return DataParallelMeshDims if fully_shard is torch_fully_shard else flatshard.DataParallelMeshDims


CASES = {
    _twice: "Each distinct composable distributed API can only be applied to a module once",
    _container: "fully_shard does not support containers that do not implement forward",
    _axes: "fully_shard expects a 1D or 2D DeviceMesh but got",
    _strides: "FSDP does not support non-contiguous parameters",
    _placement: "Invalid shard_placement_fn result: ",
    _dim: "Shard dim 3 is invalid for",
    _group_size: "If passing reshard_after_forward as an int, it should be a factor of 1, not 3",
    _kind_of_group_size: "reshard_after_forward should be a bool or an int representing the group size to reshard to",
    _reshard: "reshard_after_forward should be a bool, got <class 'int'>",
    _prefetch: "Expects list of FSDPModules but got|Linear",
    _buffers: "max_input_buffers must be a positive int, got 0",
    _stream: "stream cannot be set when using native HSDP",
    _custom_comm: "",  # the control's has no words
    _no_dims: "At least one of shard or replicate",
    _sharded_on_dp: "Expected Replicate",
}


def _refused(rank, world):
    """Which cases ours does not refuse as the control does."""
    wrong = []
    unknown = () if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers") else (_buffers,)
    unknown += () if hasattr(fsdp, "DataParallelMeshDims") else (_no_dims, _sharded_on_dp, _placement)
    for case, words in CASES.items():
        if case in unknown:
            continue  # FSDP2 of this torch has no such thing
        errors = []
        for by in (torch_fully_shard, flatshard.fully_shard):
            try:
                case(by)
            except Exception as error:
                errors.append(error)
        if len(errors) < 2 or not isinstance(errors[1], type(errors[0])) or not re.search(words, str(errors[1])):
            wrong.append((case.__name__, errors))
        elif not re.search(words, str(errors[0])):
            wrong.append((case.__name__, "the control says something else", errors))
    return [str(each) for each in wrong]


def test_errors_are_caught_and_matched_by_code_for_fsdp2(ranks):
    assert ranks(1, _refused) == [[]]


def _asked(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        flatshard.fully_shard(module)
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="reset_iter_state must be called on the root FSDP module"):
        model[0].reset_iter_state()
    with pytest.raises(ValueError, match="does not have a method no_such"):
        flatshard.register_fsdp_forward_method(model, "no_such")


def test_errors_of_methods_have_the_words_of_fsdp2(ranks):
    ranks(1, _asked)
