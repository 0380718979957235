"""Every private name of torch, and every name that changes between versions. Tested with torch 2.11 to 2.15.

The functions only translate. They contain no logic of flatshard.
"""

# mypy: implicit-reexport
# ruff: noqa: F401, I001
# fmt: off

from flatshard._torch.autograd import (
    PlainAttributes, Untransformed, accumulation, allow_grad_of, at_end_of_backward, before_node, grads_and_hooks,
    graph_task, grad_of, hook_first, hooks_of, in_backward, in_compiled_backward, keeping_versions, on_grad_read,
    profiling, transforming, uncompiled, will_be_executed,
)
from flatshard._torch.collectives import (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, all_gather_coalesced, all_gather_one, all_to_all_one,
    reduce_scatter_coalesced, reduce_scatter_one,
)
from flatshard._torch.cuda import (
    Event, allow_events_amid_captures, assert_on_device, clear_workspaces, current_stream, end_allocating,
    is_symmetric, memory, rendezvous, set_stream, symmetric_memory,
)
from flatshard._torch.dtensors import (
    AsyncCollectiveTensor, DispatchingDTensor, Spec, StridedShard, as_parameter, bare_wrapper, box_at, boxes_of,
    data_parallel_mesh, dtensor_of, dtensors_over, flattened_names, held_of, in_box, join_meshes, keep_values,
    replace_local, like_dtensor, local_of, local_part, local_rows, make_dtensor, make_spec, part_of, rebased,
    require_backward, share_data, spec_of, spec_with_dtype,
)
from flatshard._torch.fsdp import (
    FSDP_BODY, FSDP_HOMES, FSDP_INTERNALS, FSDP_NAMES, REDUCES_IN_GRAD_DTYPE, FSDPState, is_replicated,
    is_shipped_comm, let_torch_find, mark_managed, mark_sharded, mesh_info, shipped_comms,
)
from flatshard._torch.groups import (
    PrefixStore, TCPStore, backend_name, backend_of, backends_of, default_store, limit_of, lost_a_peer, new_group,
    timeout_of,
)
from flatshard._torch.optimizers import has_step_pre_hooks, loading_to_host, put_scheduler_patch, take_scheduler_patch
from flatshard._torch.tensors import (
    handle, is_made_of_others, is_wrapper, map_leaves, no_torch_function, pytree_leaves, storage_id, tree_flatten,
    tree_unflatten, unhandled, wrapper_like, writes,
)
