"""The methods of a unit: those of PyTorch's `FSDPModule`, implemented on this engine.

They exist for code written for FSDP2. New code can use arguments of `fully_shard` and `SchedulePolicy` for most of it.
"""

from __future__ import annotations

import functools
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from flatshard import _arguments, _torch
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.schedule.reduces import join_reduces
from flatshard.engine.schedule.root import Root, root_of
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.roots import find_root
from flatshard.engine.tree.unit_classes import RowEmbedding, class_before
from flatshard.engine.units.changes import applying, check_change
from flatshard.engine.units.unit import Unit, unit_of
from flatshard.policy import MixedPrecisionPolicy, own_policy
from flatshard.state import FSDPState, state_of


class HasCustomComm(RuntimeError, AssertionError):
    """A call that is not possible with custom communication. FSDP2 raises AssertionError."""


class FSDPModule(TorchFSDPModule):
    """The class that `fully_shard` adds to the bases of a module.

    It is a subclass of PyTorch's class of that name because other code checks for it (pipelining, the compiler). It
    shares no code with it: methods of PyTorch's that are missing here raise NotImplementedError. Methods with
    ``recurse`` apply to this unit and, if it is True, to all units below; the others apply to this unit only.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class: containers create one when they are sliced, and it is not a unit."""
        original = class_before(cls)
        made: Any = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with the same units and settings, on copies of the shards. Gradients are not copied."""
        copier: Any = _unit(self).copier
        return copier(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: a rank's shards, process groups and hooks are of no use in another process."""
        name = class_before(type(self)).__name__
        raise pickle.PicklingError(
            f"{name} is sharded, and cannot be pickled. Save it with flatshard.checkpoint.save, its state_dict() with "
            "torch.distributed.checkpoint, or whole weights with flatshard.checkpoint.export_safetensors or "
            f"get_model_state_dict and full_state_dict=True; load them into a new {name}. Use copy.deepcopy for a copy"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to`, `.float`, `to_empty` and similar methods replace parameters; the unit's buffers adopt the new ones."""
        for below in _units(self, True):
            check_change(below, fn)
        own: Any = super(TorchFSDPModule, self)  # the module's own class
        with applying(_unit(self)):
            return own._apply(fn, recurse)

    # Gathering and releasing

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters: the module has the full ones until `reshard` or the end of the unit's pass.

        With ``async_op``, the module has them after ``wait`` of the returned handle. A forward of the unit also waits.
        """
        return self._unshard(_units(self, False), async_op)

    def unshard_all(self, async_op: bool = False) -> UnshardHandle | None:
        """`unshard` this unit and all units below."""
        return self._unshard(_units(self, True), async_op)

    def _unshard(self, units: Sequence[Unit], async_op: bool) -> UnshardHandle | None:
        async_op = _arguments.flag("async_op", async_op)
        _root(self).gather_outside_pass(units)
        for unit in units:
            unit.keep()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Put back this unit's sharded parameters and free the full ones."""
        _unit(self).reshard()

    def reshard_all(self) -> None:
        """`reshard` this unit and all units below."""
        for unit in _units(self, True):
            unit.reshard()

    def own_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters of this unit, without those of units below."""
        return [member.sharded for group in _unit(self).groups for member in group.params]

    def hold_weights(self) -> None:
        """Until `refresh_weights`, compute with the current weights in all units below, even if main weights change.

        A unit without persistent compute weights needs memory for a shard in the compute dtype during that time. Call
        it between passes only.
        """
        _root(self).hold(_units(self, True))

    def refresh_weights(self) -> None:
        """Start to update the compute weights of all units below from the main weights, and end `hold_weights`.

        Forwards do this when it is needed. If you call it after the optimizer's step, its communication overlaps
        everything before the next forward. Values that are written to the ``.data`` of a local part afterwards are used
        after the next call. Call it between passes only.
        """
        _root(self).refresh(_units(self, True))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in _units(self, recurse):
            unit.configure(reshard_after_forward=reshard_after_forward)
            for group in unit.groups:
                group.post_forward_mesh = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: full parameters stay after backward, and the next forward uses them without a gather.

        For gradient accumulation. They are gathered again once main weights have changed, and take memory until then,
        so set it to True before the last backward of a step.
        """
        _configure(
            self, recurse, reshard_after_backward=_arguments.flag("reshard_after_backward", reshard_after_backward)
        )

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True: full parameters keep their memory after they are resharded, and so their addresses. (Of torch 2.15.)"""
        keep = _arguments.flag("keep", keep)
        for group in _groups(self, recurse):
            group.keep_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this unit, because no gradient needs its weights (an embedding)."""
        _unit(self).configure(unshard_in_backward=_arguments.flag("unshard_in_backward", unshard_in_backward))

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this unit's forward starts, instead of the next ones in the recorded order."""
        _unit(self).configure(prefetch_in_forward=_refs("set_modules_to_forward_prefetch", modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this unit's backward starts, instead of the next ones in the recorded order."""
        _unit(self).configure(prefetch_in_backward=_refs("set_modules_to_backward_prefetch", modules))

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module, also while units are unsharded, for example between a forward and its backward.

        It also drops unreduced gradients of earlier micro-batches, and frees the memory of gradients at once, unless
        steps have several backwards. `zero_grad` after `fully_shard_optimizer` does the same. With other optimizers,
        unreduced gradients stay, and the next forward frees the memory.
        """
        assert isinstance(self, nn.Module)
        join_reduces(to_host=not set_to_none)
        with _torch.PlainAttributes() if set_to_none else nullcontext():
            nn.Module.zero_grad(self, set_to_none)
        for group in _groups(self, True):
            group.gradients.drop_partial()
            group.gradients.main_grads.clear_decoupled(set_to_none)
            for parameter in (member.sharded for member in group.params if group.is_full):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        for root in _roots(self, True) if set_to_none else ():
            root.free_cleared_gradients()

    def sync_gradients(self, wait: bool = True) -> None:
        """Finish the reduction of all gradients of the units below, as the backward of the last micro-batch does.

        It also waits for reduces that a backward did not wait for (`set_is_last_backward`). With ``wait=False`` it only
        starts them: call it again before the gradients are read. All ranks must call it.
        """
        wait = _arguments.flag("wait", wait)
        _root(self).reduces.flush(_units(self, True), all_the_way=True, wait=wait)

    def set_decoupled_gradients(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: reduced gradients are stored in ``parameter.decoupled_grad`` instead of ``.grad``.

        For optimizers that read them there, for example in another dtype than the parameter's. `zero_grad` of this
        module clears them; that of an optimizer does not.
        """
        enable = _arguments.flag("enable", enable)
        for group in _groups(self, recurse):
            group.gradients.main_grads.decouple(enable)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients stay full-size and unreduced on each rank, until a backward with True reduces them."""
        on = _arguments.flag("requires_gradient_sync", requires_gradient_sync)
        _configure(self, recurse, reduces=on, all_reduces=on)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: reduce gradients only as far as the strategy does between micro-batches; HSDP: no all-reduce."""
        _configure(self, recurse, all_reduces=_arguments.flag("requires_all_reduce", requires_all_reduce))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: a backward ends without waiting for its reduces, so that they overlap the next forward.

        It applies to the whole model. Gradients are complete after a backward with True. It does not change how far
        gradients are reduced: see `set_requires_gradient_sync` and `microbatch`.
        """
        _root(self).is_last_backward = _arguments.flag("is_last_backward", is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True: backwards end without waiting for their reduces, until `finalize_backward`. (Of torch 2.15.)

        Call it on the root before a forward. It takes precedence over `set_is_last_backward`.
        """
        root = _root_at("set_manual_backward_finalization", self)
        enabled = _arguments.flag("enabled", enabled)
        if enabled != root.finalizes_by_hand and _torch.in_backward():
            raise RuntimeError(
                "set_manual_backward_finalization was called during a backward; call it before the forward"
            )
        root.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """After all backwards of a step: reduce the gradients that they have left unreduced, and wait for all reduces.

        Call it on the root, after ``set_manual_backward_finalization(True)`` and, if gradient synchronization was off,
        with it on again. Parameters are resharded as their settings say. With ``async_op``, gradients can be read after
        ``wait`` of the returned handle. No effect before the first forward.
        """
        async_op = _arguments.flag("async_op", async_op)
        if root_of(_unit(self)) is None:
            return GradientReductionHandle(None) if async_op else None
        root = _root_at("finalize_backward", self)
        if not root.finalizes_by_hand:
            raise RuntimeError("finalize_backward: call set_manual_backward_finalization(True) before the forward")
        if _torch.in_backward():
            raise RuntimeError("finalize_backward was called during a backward; call it after backward has returned")
        if root.finalizing is not None:
            raise RuntimeError("finalize_backward: call wait() of the handle that its last call has returned first")
        root.reduce_accumulated()
        handle = GradientReductionHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by ``factor``, in this unit, instead of taking their mean."""
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and math.isfinite(factor)
        if not number or factor == 0:
            raise ValueError(f"set_gradient_divide_factor(factor={factor!r}): must be a finite number, and not 0")
        for group in _unit(self).groups:
            group.gradients.configure(scale=1.0 / factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        message = "set_reduce_scatter_divide_factor is deprecated: use set_gradient_divide_factor"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """True: reduces of this unit use sums only; the mean is computed by a multiplication afterwards."""
        enable = _arguments.flag("enable", enable)
        for group in _unit(self).groups:
            group.gradients.configure(sums_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: a parameter that a backward did not use takes part in the reduce with a gradient of zero.

        For ranks that use different parameters of a unit that contains other units, or that skip a unit. Gradients are
        the mean over all ranks in any case. A parameter that no rank has used gets a gradient of zero with True, and
        ``None`` with False.
        """
        on = _arguments.flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _configure(self, recurse, reduces_unused=on)
        for group in _groups(self, recurse):
            group.gradients.counts_unused = on

    # Precision

    def set_mp_policy(self, mp_policy: MixedPrecisionPolicy, *, recurse: bool = True) -> None:
        """Compute, communicate and reduce in other dtypes from the next forward on. Main weights keep their dtype.

        Call it between passes only. While there are gradients, ``grad_dtype`` must not change.
        """
        policy = own_policy(mp_policy)
        if not isinstance(policy, MixedPrecisionPolicy):
            raise TypeError(f"set_mp_policy takes a flatshard.MixedPrecisionPolicy, not {mp_policy!r}")
        if policy.param_dtype_override_fn is not None:
            raise ValueError("param_dtype_override_fn is called when a module is sharded: give it to fully_shard")
        units = _units(self, recurse)
        awaited = next((unit for unit in units if unit.calls.are_awaited()), None)
        if awaited is not None:
            raise RuntimeError(
                f"set_mp_policy was called between a forward of unit '{awaited.name}' and its backward, which needs "
                "the old dtypes; run the backward first, or discard it with reset() on the root module"
            )
        _root(self).set_precision(units, policy)

    # Communication

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit with ``comm``, an ``AllGather`` of `torch.distributed.fsdp`. None removes it.

        ``comm.allocate(size, dtype=, device=)`` allocates a flat output buffer for all ranks, and
        ``comm(output_tensor=, input_tensor=, group=, async_op=)`` fills it, once per gather. Full parameters are copied
        out of it.
        """
        for group in _one_mesh("set_custom_all_gather", _unit(self)):
            group.all_gather_comm = _checked_comm("set_custom_all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients with ``comm``, a ``ReduceScatter`` of `torch.distributed.fsdp`. None removes it.

        ``comm.allocate`` allocates the flat input, which gradients are copied into, and the flat output;
        ``comm(output_tensor=, input_tensor=, group=, op=, async_op=)`` is called once per reduce.
        """
        for group in _one_mesh("set_custom_reduce_scatter", _unit(self)):
            if comm is not None and group.gradients.is_encoded:
                raise ValueError(
                    "set_custom_reduce_scatter: this unit has rows=True or a reduce_format, which do not use a "
                    "reduce-scatter; leave one of the two out"
                )
            group.gradients.comm = _checked_comm("set_custom_reduce_scatter", comm)

    def set_gather_group(self, group: ProcessGroup, mesh: DeviceMesh | None = None) -> None:
        """Use this process group for gathers of all units below that are sharded over ``mesh`` (default: this unit's).

        It must have the ranks of the shard axis. Reduces use the groups of the mesh, or separate ones
        (`SchedulePolicy.separate_groups`). Call it before the first forward.
        """
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"set_gather_group(group={group!r}): must be a ProcessGroup")
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"set_gather_group(mesh={mesh!r}): must be a DeviceMesh")
        mesh = _unit(self).mesh if mesh is None else mesh
        _root(self).gather_lane.use(mesh, mesh.ndim - 1, group)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with this rank's flat shard of each gradient of this unit, after it is reduced over all axes.

        The hook may change it in place, for example by an all-reduce over ranks that are not in the mesh. It is called
        on the stream of reduces, or on ``stream``, which is possible only for a mesh of one axis.
        """
        unit = _unit(self)
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook: hook must be callable, not a {type(hook).__name__}")
        if stream is not None and unit.mesh.ndim > 1:
            raise ValueError("stream cannot be set when using native HSDP")  # the text of FSDP2
        for group in _one_mesh("set_all_reduce_hook", unit):
            group.gradients.hook = hook, stream

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """True: allocate the communication buffers of this unit with the process group's allocator, if it has one.

        It uses torch's ``AllGather`` and ``ReduceScatter`` for that, so it cannot be used with custom ones.
        """
        kind = "ProcessGroupAlloc" if _arguments.flag("enable", enable) else None
        self._set_comms("set_allocate_memory_from_process_group_for_comm", kind)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocate the communication buffers of this unit in symmetric memory, for which NCCL has faster collectives.

        It uses torch's ``AllGather`` and ``ReduceScatter`` for that, so it cannot be used with custom ones. Reduces use
        it only after ``set_force_sum_reduction_for_comms(True)``, because NCCL can only sum there. Needs CUDA.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm(backend={backend!r}): must be 'NCCL'")
        device = _unit(self).device
        if device.type != "cuda":
            raise ValueError(f"set_symm_mem_for_comm: symmetric memory needs a mesh on CUDA; this one is on {device}")
        self._set_comms("set_symm_mem_for_comm", "SymmMem")

    def _set_comms(self, method: str, kind: str | None) -> None:
        for group in _one_mesh(method, _unit(self)):
            custom = [c for c in (group.all_gather_comm, group.gradients.comm) if c is not None]
            if any(not _torch.is_shipped_comm(comm) for comm in custom):
                raise HasCustomComm(
                    f"{method}: this unit has a custom all-gather or reduce-scatter; remove it first (comm=None)"
                )
            comms = kind and _torch.shipped_comms(kind, group.mesh.get_group(group.mesh.ndim - 1))
            if kind and not comms:
                raise RuntimeError(f"{method}: this torch ({torch.__version__}) has no {kind}AllGather")
            group.all_gather_comm, reduce = comms or (None, None)
            adds = kind != "SymmMem" or group.gradients.sums_only
            if adds and not group.gradients.is_encoded:
                group.gradients.comm = reduce

    def set_post_optim_event(self, event: Any) -> None:
        """Let the gathers of the next forward wait for this event instead of for the current stream.

        Set a new one after each optimizer step. No effect on CPU, where the optimizer has finished when it returns.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event(event={event!r}): must be a torch.Event or None")
        _root(self).gathers.main_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set `SchedulePolicy.max_reducing`, the number of reduces in flight. The highest value of a unit is used."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        _configure_reduces(self, recurse, max_reducing=max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set `SchedulePolicy.separate_groups`: whether reduces use separate process groups. One choice per model."""
        _configure_reduces(self, recurse, separate_groups=_arguments.flag("enable", enable))

    def _get_fsdp_state(self) -> FSDPState:  # type: ignore[override]  # has a part of the attributes of PyTorch's
        assert isinstance(self, nn.Module)
        _unit(self)
        found = state_of(self)
        assert found is not None
        return found

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect: every gather is asynchronous."""

    # Recovery

    def reset(self) -> None:
        """Discard a step that an exception interrupted, so that the next one can run. Unreduced gradients are lost."""
        _root(self).reset()

    def reset_iter_state(self) -> None:
        """`reset`, which also drops ``.grad`` of all parameters of units. It must be called on the root."""
        _root_at("reset_iter_state", self).reset()
        for group in _groups(self, True):
            for parameter in (member.sharded for member in group.params):
                parameter.grad = None


def _refuse(name: str) -> Callable[..., None]:
    def refusal(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: flatshard does not support this method of PyTorch's FSDPModule")

    refusal.__name__ = name
    refusal.__doc__ = "Not supported; raises NotImplementedError."
    return refusal


for _name in set(vars(TorchFSDPModule)) - set(vars(FSDPModule)):
    if not _name.startswith("__") and callable(getattr(TorchFSDPModule, _name)):
        setattr(FSDPModule, _name, _refuse(_name))


class UnshardHandle(TorchUnshardHandle):
    """A gather in flight, as `FSDPModule.unshard` returns it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait for the gather on the current stream, and put the full parameters into the modules."""
        for unit in self._units:
            if unit.is_gathered:
                unit.swap_in()
        self._units = ()


class GradientReductionHandle(getattr(torch.distributed.fsdp, "GradientReductionHandle", object)):  # type: ignore[misc]
    """The reduces that `FSDPModule.finalize_backward` has left in flight."""

    def __init__(self, root: Root | None) -> None:
        self._root, self._token = root, object()
        if root is not None:
            root.finalizing = self._token

    def wait(self) -> None:
        """Order the current stream after the reduces, so that gradients can be read."""
        root, self._root = self._root, None
        if root is None:
            return
        if root.finalizing is not self._token:
            raise RuntimeError("these gradients were discarded by reset_iter_state, or reset")
        root.finalizing = None
        root.reduces.join()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of ``module`` unshard and reshard its unit as ``forward`` does. No effect if it is not a unit."""
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str):
        raise TypeError(f"method_name={method_name!r}: must be a str, the name of a method")
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    # The module holds this function, so the function must not hold the module: it would never be freed.
    function = method.__func__ if getattr(method, "__self__", None) is module else None
    me = weakref.ref(module)

    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        self: Any = me()
        call = method_of_others if function is None else functools.partial(function, self)
        return _unit(self).call_as_forward(self, call, args, kwargs)

    method_of_others = method if function is None else None
    del method
    as_forward.__dict__.pop("__wrapped__", None)  # the bound method, which holds the module
    setattr(module, method_name, as_forward)


def share_comm_ctx(modules: Iterable[TorchFSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, share communication streams and memory pools."""
    roots = [_root(module) for module in _checked_units("share_comm_ctx", modules)]
    for root in roots[1:]:
        root.share(roots[0])


def _configure(module: FSDPModule, recurse: bool, **settings: Any) -> None:
    for unit in _units(module, recurse):
        unit.configure(**settings)


def _configure_reduces(module: FSDPModule, recurse: bool, **settings: Any) -> None:
    _configure(module, recurse, **settings)
    for root in _roots(module, recurse):
        root.reduces.resolve(root.units)


def _refs(method: str, modules: Iterable[Any]) -> tuple[weakref.ref[nn.Module], ...]:
    return tuple(weakref.ref(_unit(module).modules[0]) for module in _checked_units(method, modules))


def _checked_units(function: str, modules: Iterable[Any]) -> list[FSDPModule]:
    listed = _arguments.modules(function, modules)
    odd = [type(module).__name__ for module in listed if not isinstance(module, FSDPModule)]
    if odd:
        raise ValueError(f"Expects list of FSDPModules but got {odd[0]}, on which fully_shard was not called")
    return listed


def _units(module: Any, recurse: bool) -> list[Unit]:
    recurse = _arguments.flag("recurse", recurse)
    return [unit for _, unit in units_below(module) if recurse or unit is unit_of(module)]


def _groups(module: FSDPModule, recurse: bool) -> list[ParamGroup]:
    return [group for unit in _units(module, recurse) for group in unit.groups]


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"{type(module).__name__} is not sharded: call fully_shard on it first")
    return unit


def _root(module: Any) -> Root:
    return find_root(_unit(module), module)


def _root_at(method: str, module: Any) -> Root:
    """The root of a module that is to be the outermost unit."""
    unit, root = _unit(module), _root(module)
    if root.units[0] is not unit:
        name, root_name = unit.name, root.units[0].name
        raise RuntimeError(
            f"{method} must be called on the root FSDP module; '{name}' is not the root, '{root_name}' is"
        )
    return root


def _roots(module: FSDPModule, recurse: bool) -> list[Root]:
    """The roots that there are of these units: none before the first forward."""
    return [root for root in dict.fromkeys(map(root_of, _units(module, recurse))) if root is not None]


def _one_mesh(method: str, unit: Unit) -> list[ParamGroup]:
    if len({group.mesh for group in unit.groups}) > 1:
        raise ValueError(
            f"{method} is not supported with multiple param groups: the parameters of this unit are on several meshes; "
            "call fully_shard on a submodule for each mesh"
        )
    return unit.groups


def _checked_comm(method: str, comm: Any) -> Any:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(f"{method}: comm must be callable and have an allocate method, not a {type(comm).__name__}")
    return comm


_CLASSES: dict[tuple[type, bool], type] = {}


def unit_class(cls: type, methods_for: Callable[[type], dict[str, Any]] | None = None, rows: bool = False) -> type:
    """The class of a unit whose module has class ``cls``. ``methods_for``: returns methods that units of it override.

    ``rows``: whether the unit is an embedding that looks up rows instead of gathering its table.
    """
    if (cls, rows) not in _CLASSES:
        own = () if rows and cls is nn.Embedding else (cls,)
        bases = (FSDPModule, *own, RowEmbedding) if rows else (FSDPModule, *own)
        made = type(f"FSDP{cls.__name__}", bases, {} if methods_for is None else methods_for(cls))
        _CLASSES.setdefault((cls, rows), made)
    return _CLASSES[cls, rows]
