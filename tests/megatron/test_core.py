"""What Megatron-Core takes out of this surface, apart from the model itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flatshard.megatron import DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP, experimental
from flatshard.megatron.distributed_data_parallel_config import own_config, schedule_of
from flatshard.megatron.experimental.parameter_group import sync_model_weights_from_main_weights
from flatshard.megatron.param_and_grad_buffer import make_fsdp_dtensor
from flatshard.megatron.uneven_dtensor import gather_and_compute_chunk_metadata, uneven_dtensor_to_full_tensor
from flatshard.megatron.utils import find_megatron_fsdp
from tests.dist.models import Block, batches, loss_of, make_net


def _made(rank, world):
    """A gated layer is split by what parameters say of their parts, and each half is put together again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    index = FSDPDistributedIndex(mesh, "dp", tp_dim="tp")
    for dim in (0, 1, None):
        torch.manual_seed(0)
        whole = torch.randn(12, 6)
        module = nn.Linear(6, 12, bias=False)
        module.weight.data = whole if dim is None else whole.chunk(2, dim)[mesh.get_local_rank("tp")].clone()
        if dim is not None:
            module.weight.tensor_model_parallel, module.weight.partition_dim = True, dim
        model = MegatronFSDP(module, index, fsdp_unit_modules=[nn.Linear])
        weight, rows = model.module.weight, 6 if dim == 0 else 12  # of this tensor-parallel rank
        held, index_of = weight.megatron_fsdp_slice, weight.megatron_fsdp_dist_index
        part = whole if dim is None else whole.chunk(2, dim)[mesh.get_local_rank("tp")]
        assert torch.equal(part.reshape(-1)[held], weight.to_local().reshape(-1))
        columns = part.shape[1]
        for half in (0, 1):
            begin = half * rows // 2 * columns
            end = begin + rows // 2 * columns
            mine = slice(max(begin, held.start), max(begin, held.start, min(end, held.stop)))
            local = weight.to_local().reshape(-1)[mine.start - held.start : mine.stop - held.start]
            shape = torch.empty(rows // 2, columns, device="meta")
            shape.__dict__.update({k: v for k, v in weight.__dict__.items() if k.startswith(("tensor", "partition"))})
            made = make_fsdp_dtensor(local, shape, index_of, run_check=True, update_uneven_dtensor_chunk_meta=True)
            full = uneven_dtensor_to_full_tensor(made)
            if dim == 0:  # of each tensor-parallel rank this half
                wanted = torch.cat([rank_part.chunk(2)[half] for rank_part in whole.chunk(2)])
            else:
                wanted = whole.chunk(2)[half]
            assert torch.equal(full, wanted)
            box = gather_and_compute_chunk_metadata(made)
            assert made.__create_chunk_list__() == [box]
        with pytest.raises(ValueError, match="not sharded"):
            make_fsdp_dtensor(torch.empty(1), weight, index, is_sharded_param=False)
        with pytest.raises(AssertionError, match="do not compose"):
            make_fsdp_dtensor(torch.empty(2, 3), torch.empty(12, 3), index, run_check=True)
    given = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)])
    copy = make_fsdp_dtensor(given.to_local(), given, index, is_sharded_param=False)
    assert copy.placements == (Replicate(), Shard(0))
    assert torch.equal(copy.full_tensor(), torch.arange(8.0))
    bias = torch.full((2,), float(rank))
    made = make_fsdp_dtensor(bias, torch.empty(4), index, force_sync_tp_duplicated_param=True)
    assert torch.equal(uneven_dtensor_to_full_tensor(made), torch.tensor([0.0, 0.0, 2.0, 2.0]))


def test_tensors_made_of_parts(ranks):
    ranks(4, _made)


def _outer(rank, world):
    """Both axes of a hybrid mesh cut: the shard axis first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    index = FSDPDistributedIndex(mesh, "dp", "outer", hsdp_outer_dp_shard=True)
    whole = torch.arange(20.0).view(10, 2)
    sizes = [3, 1, 0, 6]
    place = index.get_logical_hybrid_fsdp_rank()
    made = make_fsdp_dtensor(whole.split(sizes)[place], whole, index, run_check=True)
    assert torch.equal(uneven_dtensor_to_full_tensor(made), whole)


def test_tensors_made_of_parts_of_both_axes(ranks):
    ranks(4, _outer)


def _found(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = MegatronFSDP(make_net(depth=1), FSDPDistributedIndex(mesh, "dp"), fsdp_unit_modules=[Block])
    holder = nn.ModuleDict({"inside": model})
    assert find_megatron_fsdp(holder) is model
    assert find_megatron_fsdp(nn.Linear(1, 1)) is None


def test_the_model_is_found_in_a_wrapper(ranks):
    ranks(2, _found)


def _synced(rank, world):
    """Parameters that an optimizer of another kind has updated: compute weights follow when they are told to."""
    mesh = init_device_mesh("cpu", (world,))
    placements = experimental.Placements([0], [Replicate()], [Shard(0)], [Shard(0)])
    net = make_net(depth=1)
    with experimental.fully_shard_context() as context:
        experimental.fully_shard(net.blocks[0], mesh, placements)
        experimental.fully_shard(net, mesh, placements)
    tokens = next(batches(1, 8))
    loss_of(net, tokens).backward()
    assert set(context.parameter_groups) == {group for unit in (net, net.blocks[0]) for group in unit.parameter_groups}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().mul_(0.5)
        sync_model_weights_from_main_weights([*net.parameters(), nn.Parameter(torch.zeros(1))])
        with experimental.microbatch(net, is_first=False):  # which refreshes nothing by itself
            changed = net(tokens)
    reference = make_net(depth=1)
    for parameter in reference.parameters():
        parameter.data.mul_(0.5)
    torch.testing.assert_close(changed, reference(tokens).detach())


def test_compute_weights_follow_when_they_are_told_to(ranks):
    ranks(2, _synced)


def test_fields_of_newer_configurations(caplog):
    schedule_of(DistributedDataParallelConfig(num_buckets=4))
    assert "num_buckets: no effect" in caplog.text
    with pytest.raises(
        NotImplementedError, match=r"param_name_patterns_for_fp32_local_accumulation=.*main_grads_dtype"
    ):
        schedule_of(DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("all",)))
    with pytest.raises(ValueError, match="fp4_param_gather=True needs TransformerEngine"):
        schedule_of(DistributedDataParallelConfig(fp4_param_gather=True))
    assert own_config(DistributedDataParallelConfig(num_buckets=2)).num_buckets == 2
    with pytest.raises(TypeError, match="ddp_config"):
        own_config(SimpleNamespace())
