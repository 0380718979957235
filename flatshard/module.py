"""The methods of a unit: PyTorch's `FSDPModule`, over this engine.

They exist for code written for PyTorch's `fully_shard`. What they set is kept by the unit, its groups or its root,
and nothing else looks at it; new code finds most of it as arguments of `fully_shard` and as `SchedulePolicy`.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
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
from flatshard.engine.tree.row_embedding import RowEmbedding, class_before
from flatshard.engine.units.changes import applying, check_change
from flatshard.engine.units.unit import Unit, unit_of
from flatshard.policy import MixedPrecisionPolicy, own_policy
from flatshard.state import FSDPState, state_of


class HasCustomComm(RuntimeError, AssertionError):
    """A call that custom communication rules out. PyTorch's is an AssertionError."""


class FSDPModule(TorchFSDPModule):
    """What `fully_shard` adds to the class of a module.

    It is a subclass of PyTorch's own class of that name for those who ask for it by `isinstance` (pipelining, the
    compiler). It shares no code with it: methods of PyTorch's that are missing here refuse. Methods that take
    ``recurse`` concern this unit and, with it, all units below; the others concern this unit alone.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers make new instances of their own class when they are sliced; those are not units."""
        original = class_before(cls)
        made: Any = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another model of the same units and settings, over copies of the shards. Gradients are not copied."""
        unit = _unit(self)
        assert isinstance(self, nn.Module)
        assert unit.copier is not None
        return unit.copier(self, memo)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to`, `.float`, `to_empty` and their like replace parameters; the buffers take the new ones over."""
        for below in _units(self, True):
            check_change(below, fn)
        own: Any = super(TorchFSDPModule, self)  # the module's own class
        with applying(_unit(self)):
            return own._apply(fn, recurse)

    # Gathering and releasing

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and show them in full, until `reshard` or the end of a pass through the unit.

        With ``async_op`` the handle's ``wait`` shows them; a forward of the unit waits by itself.
        """
        return self._unshard(_units(self, False), async_op)

    def unshard_all(self, async_op: bool = False) -> UnshardHandle | None:
        """`unshard` this unit and all units below."""
        return self._unshard(_units(self, True), async_op)

    def _unshard(self, units: Sequence[Unit], async_op: bool) -> UnshardHandle | None:
        async_op = _arguments.flag("async_op", async_op)
        _root(self).gather_apart(units)
        for unit in units:
            unit.keep()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show this unit's sharded parameters and free the full ones."""
        _unit(self).reshard()

    def reshard_all(self) -> None:
        """`reshard` this unit and all units below."""
        for unit in _units(self, True):
            unit.reshard()

    def own_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters of this unit, without those of units below."""
        return [member.sharded for group in _unit(self).groups for member in group.params]

    def hold_weights(self) -> None:
        """Compute with the weights as they are now, in all units below, whatever becomes of main weights.

        Until `refresh_weights`. Where compute weights do not rest on this rank by themselves, they take the memory of a
        shard in the compute dtype meanwhile. Between passes only.
        """
        _root(self).hold(_units(self, True))

    def refresh_weights(self) -> None:
        """Start bringing the compute weights of all units below up to date with main, and end `hold_weights`.

        Every forward does so by itself, where it has to. Called after the optimizer's step, what is communicated for it
        overlaps all that comes before the next forward, which then communicates nothing for it. Between passes only.
        What is written through ``parameter.data`` after it is seen when it is called again.
        """
        _root(self).refresh(_units(self, True))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        _ask(self, recurse, reshard_after_forward=reshard_after_forward)
        for unit in _units(self, recurse):
            unit.parks = False
        for group in _groups(self, recurse):
            group.park_mesh = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Off: full parameters stay after backward and the next forward uses them as they are, without a gather.

        For micro-batches between which no optimizer steps. Once main weights have changed they are gathered anew; until
        then they take memory, so let it be on again before the last backward of a step.
        """
        _ask(self, recurse, reshard_after_backward=_arguments.flag("reshard_after_backward", reshard_after_backward))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Off: backward does not gather this unit, whose weights no gradient needs (an embedding's, for example)."""
        _unit(self).ask(unshard_in_backward=_arguments.flag("unshard_in_backward", unshard_in_backward))

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this one's forward starts, instead of those that the recorded order says."""
        _unit(self).ask(prefetch_in_forward=_refs("set_modules_to_forward_prefetch", modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this one's backward starts, instead of those that the recorded order says."""
        _unit(self).ask(prefetch_in_backward=_refs("set_modules_to_backward_prefetch", modules))

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; also where full parameters are shown, as between a forward and its backward.

        Gradients of micro-batches that wait for the last one are forgotten too. `Optimizer.zero_grad` cannot do that.
        """
        assert isinstance(self, nn.Module)
        if not set_to_none:
            join_reduces()
        nn.Module.zero_grad(self, set_to_none)
        for group in _groups(self, True):
            group.gradients.drop_partial()
            group.gradients.main_grads.clear_decoupled(set_to_none)
            for parameter in (member.sharded for member in group.params if group.is_full):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        for root in dict.fromkeys(map(root_of, _units(self, True))):
            if root is not None and set_to_none:
                root.rest_gradients()

    def sync_gradients(self, wait: bool = True) -> None:
        """Reduce all the way what backwards have left unreduced in the units below, as if the last one had done so.

        Without ``wait`` that is only started: call it again before the gradients are read, by an optimizer for example.
        It also waits for the reduces of backwards that did not (`set_is_last_backward`). All ranks must call it.
        """
        wait = _arguments.flag("wait", wait)
        _root(self).reduces.flush(_units(self, True), all_the_way=True, wait=wait)

    def set_decoupled_gradients(self, enable: bool = True, *, recurse: bool = True) -> None:
        """On: reduced gradients come as ``parameter.decoupled_grad``, and ``.grad`` is left as it is.

        For optimizers that read them there, in another dtype than the parameter's for example. `zero_grad` of this
        module sees to them; that of an optimizer does not.
        """
        enable = _arguments.flag("enable", enable)
        for group in _groups(self, recurse):
            group.gradients.main_grads.decouple(enable)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Off: gradients stay on their rank, whole and unreduced, until a backward with it on reduces them all."""
        on = _arguments.flag("requires_gradient_sync", requires_gradient_sync)
        _ask(self, recurse, reduces=on, all_reduces=on)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Off: gradients go no further than they rest between micro-batches; under HSDP, the outer axis waits."""
        _ask(self, recurse, all_reduces=_arguments.flag("requires_all_reduce", requires_all_reduce))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Off: a backward ends without waiting for its reduces, so they overlap the next forward.

        Concerns the whole model. Gradients are complete after a backward with it on. How far gradients are reduced is
        `set_requires_gradient_sync`'s to say, or `microbatch`'s.
        """
        _root(self).joins = _arguments.flag("is_last_backward", is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by ``factor``, in this unit, instead of taking their mean."""
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and math.isfinite(factor)
        if not number or factor == 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): the factor must be a finite number, and not 0")
        for group in _unit(self).groups:
            group.gradients.ask(scale=1.0 / factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        told = "set_reduce_scatter_divide_factor is an old name: use set_gradient_divide_factor"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """On: collectives of this unit add, and nothing else; means are taken by a multiplication afterwards."""
        enable = _arguments.flag("enable", enable)
        for group in _unit(self).groups:
            group.gradients.ask(sums_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """On: a parameter that a backward did not use has a gradient of zero, and takes part in the reduce with it.

        For ranks that use different parameters of a unit around other units, or none of a unit. Each rank sees the mean
        over all of them, on or off; what no rank has used has a gradient of zero with it on, and ``None`` with it off.
        """
        on = _arguments.flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _ask(self, recurse, reduces_unused=on)
        for group in _groups(self, recurse):
            group.gradients.counts_unused = on

    # Precision

    def set_mp_policy(self, mp_policy: MixedPrecisionPolicy, *, recurse: bool = True) -> None:
        """Compute, communicate and reduce in other dtypes from the next forward on. Main weights keep theirs.

        Between passes only, and with ``grad_dtype`` as it was while there are gradients.
        """
        policy = own_policy(mp_policy)
        if not isinstance(policy, MixedPrecisionPolicy):
            raise TypeError(f"set_mp_policy takes a flatshard.MixedPrecisionPolicy, not {mp_policy!r}")
        units = _units(self, recurse)
        awaited = next((unit for unit in units if unit.is_awaited), None)
        if awaited is not None:
            raise RuntimeError(
                f"set_mp_policy: the backward of a forward of unit '{awaited.name}' is to come, and needs weights in "
                "the dtype that they had; run it first, or give it up with reset() on the root"
            )
        _root(self).set_precision(units, policy)

    # Communication

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit by ``comm``: a `torch.distributed.fsdp` ``AllGather``.

        ``comm.allocate(size, dtype=, device=)`` makes a flat buffer for the results of all ranks, and
        ``comm(output_tensor=, input_tensor=, group=, async_op=)`` fills it, once per gather. Full parameters are copied
        out of it.
        """
        for group in _one_mesh("set_custom_all_gather", _unit(self)):
            group.all_gather_comm = _checked_comm("set_custom_all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients by ``comm``: a `torch.distributed.fsdp` ``ReduceScatter``.

        ``comm.allocate`` makes the flat input and output, into which gradients are copied and out of which they are
        taken; ``comm(output_tensor=, input_tensor=, group=, op=, async_op=)`` reduces, once per reduce.
        """
        for group in _one_mesh("set_custom_reduce_scatter", _unit(self)):
            if comm is not None and group.gradients.is_encoded:
                raise ValueError(
                    "set_custom_reduce_scatter: gradients by rows, or with a reduce_format, are exchanged, not "
                    "scattered"
                )
            group.gradients.comm = _checked_comm("set_custom_reduce_scatter", comm)

    def set_gather_group(self, group: ProcessGroup, mesh: DeviceMesh | None = None) -> None:
        """Gather over this process group all units below that are sharded over ``mesh``, which is this unit's if None.

        It has the ranks of the shard axis. Reduces use the mesh's, or their own (`SchedulePolicy.separate_groups`).
        Call it before the first forward.
        """
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"set_gather_group({group!r}): must be a process group")
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"set_gather_group(mesh={mesh!r}): must be a DeviceMesh")
        mesh = _unit(self).mesh if mesh is None else mesh
        _root(self).gather_lane.use(mesh, mesh.ndim - 1, group)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with this rank's flat part of every gradient that has been reduced over all axes.

        It may change it in place before it reaches the parameters, as by an all-reduce over ranks that the mesh does
        not have. It is called on the reduce lane, or on ``stream`` where the mesh has one axis.
        """
        unit = _unit(self)
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook: the hook must be callable, not a {type(hook).__name__}")
        if stream is not None and unit.mesh.ndim > 1:
            raise ValueError("stream cannot be set when using native HSDP")  # PyTorch's words, to the letter
        for group in _one_mesh("set_all_reduce_hook", unit):
            group.gradients.hook = hook, stream

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """On: what this unit communicates lies in memory from the process group's own allocator, where it has one.

        By torch's implementations of ``AllGather`` and ``ReduceScatter`` for it; not together with custom ones.
        """
        kind = "ProcessGroupAlloc" if _arguments.flag("enable", enable) else None
        self._set_comms("set_allocate_memory_from_process_group_for_comm", kind)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Let what this unit communicates lie in symmetric memory, for the faster collectives that NCCL has for it.

        By torch's implementations of ``AllGather`` and ``ReduceScatter`` for it; not together with custom ones. Reduces
        use it after ``set_force_sum_reduction_for_comms(True)``: NCCL can only add there. Needs CUDA.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm({backend!r}): NCCL is the only backend that has it")
        if _unit(self).device.type != "cuda":
            raise ValueError(
                f"set_symm_mem_for_comm: symmetric memory is CUDA's, and this mesh is on {_unit(self).device}"
            )
        self._set_comms("set_symm_mem_for_comm", "SymmMem")

    def _set_comms(self, method: str, kind: str | None) -> None:
        for group in _one_mesh(method, _unit(self)):
            custom = [c for c in (group.all_gather_comm, group.gradients.comm) if c is not None]
            if any(not _torch.is_shipped_comm(comm) for comm in custom):
                raise HasCustomComm(
                    f"{method}: this unit has a custom all-gather or reduce-scatter, which allocates itself"
                )
            comms = kind and _torch.shipped_comms(kind, group.mesh.get_group(group.mesh.ndim - 1))
            if kind and not comms:
                raise RuntimeError(f"{method}: this torch ({torch.__version__}) has no {kind}AllGather")
            group.all_gather_comm, reduce = comms or (None, None)
            adds = kind != "SymmMem" or group.gradients.sums_only
            if adds and not group.gradients.is_encoded:
                group.gradients.comm = reduce

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward's gathers wait for this event instead of all that the current stream has been given.

        Set a new one after each optimizer step. No effect on CPU, where the optimizer is done when it returns.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event(event={event!r}): must be an event of torch, or None")
        _root(self).main_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """`SchedulePolicy.max_reducing`: how many reduces, and their inputs, may be in flight. The highest counts."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        _ask(self, recurse, max_reducing=max_input_buffers)
        _resolve_reduces(self, recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """`SchedulePolicy.separate_groups`: whether reduces have process groups of their own. One choice per model."""
        _ask(self, recurse, separate_groups=_arguments.flag("enable", enable))
        _resolve_reduces(self, recurse)

    def _get_fsdp_state(self) -> FSDPState:  # type: ignore[override]  # not PyTorch's, and so not all of it
        assert isinstance(self, nn.Module)
        _unit(self)
        found = state_of(self)
        assert found is not None
        return found

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Every gather is asynchronous here."""

    # Recovery

    def reset(self) -> None:
        """Give up a step that an exception interrupted: the next one starts clean. Unreduced gradients are lost."""
        _root(self).reset()

    def reset_iter_state(self) -> None:
        """`reset`, of the root."""
        unit, root = _unit(self), _root(self)
        if root.units[0] is not unit:
            raise RuntimeError(
                f"reset_iter_state must be called on the root FSDP module; '{unit.name}' is not the root, "
                f"'{root.units[0].name}' is"
            )
        root.reset()


def _refuse(name: str) -> Callable[..., None]:
    def refusal(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: flatshard does not offer this method of PyTorch's FSDPModule")

    refusal.__name__ = name
    refusal.__doc__ = "Not offered; raises NotImplementedError."
    return refusal


for _name in set(vars(TorchFSDPModule)) - set(vars(FSDPModule)):
    if not _name.startswith("__") and callable(getattr(TorchFSDPModule, _name)):
        setattr(FSDPModule, _name, _refuse(_name))


class UnshardHandle(TorchUnshardHandle):
    """A gather on its way."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Order what follows after the gather, and show the full parameters to the modules."""
        for unit in self._units:
            if unit.is_gathered:
                unit.swap_in()
        self._units = ()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of ``module`` gather and release its unit as ``forward`` does. No effect on what is no unit."""
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str):
        raise TypeError(f"method_name={method_name!r}: must be the name of a method")
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    # The module holds what is set here, which therefore must not hold the module.
    function = method.__func__ if getattr(method, "__self__", None) is module else None
    me = weakref.ref(module)

    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        self: Any = me()
        call = method_of_others if function is None else functools.partial(function, self)
        return _unit(self).call_as_forward(self, call, args, kwargs)

    method_of_others = method if function is None else None
    del method
    as_forward.__dict__.pop("__wrapped__", None)  # it is bound to the module
    setattr(module, method_name, as_forward)


def share_comm_ctx(modules: Iterable[TorchFSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, communicate over the same lanes and memory pools."""
    given = _arguments.modules("share_comm_ctx", modules)
    _units_of("share_comm_ctx", given)
    roots = [_root(module) for module in given]
    for root in roots[1:]:
        root.share(roots[0])


def _ask(module: FSDPModule, recurse: bool, **settings: Any) -> None:
    for unit in _units(module, recurse):
        unit.ask(**settings)


def _resolve_reduces(module: FSDPModule, recurse: bool) -> None:
    for root in dict.fromkeys(map(root_of, _units(module, recurse))):
        if root is not None:
            root.reduces.resolve(root.units)


def _refs(method: str, modules: Iterable[Any]) -> tuple[weakref.ref[nn.Module], ...]:
    return tuple(weakref.ref(unit.modules[0]) for unit in _units_of(method, modules))


def _units_of(function: str, modules: Iterable[Any]) -> list[Unit]:
    found = []
    for module in _arguments.modules(function, modules):
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"Expects list of FSDPModules but got {type(module).__name__}, on which fully_shard was not called"
            )
        found.append(_unit(module))
    return found


def _units(module: FSDPModule, recurse: bool) -> list[Unit]:
    assert isinstance(module, nn.Module)
    recurse = _arguments.flag("recurse", recurse)
    own = unit_of(module)
    return [unit for _, unit in units_below(module) if recurse or unit is own]


def _groups(module: FSDPModule, recurse: bool) -> list[ParamGroup]:
    return [group for unit in _units(module, recurse) for group in unit.groups]


def _unit(module: TorchFSDPModule) -> Unit:
    assert isinstance(module, nn.Module)
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"{type(module).__name__} is not a unit: fully_shard was not called on it")
    return unit


def _root(module: TorchFSDPModule) -> Root:
    unit = _unit(module)
    assert isinstance(module, nn.Module)
    return find_root(unit, module)


def _one_mesh(method: str, unit: Unit) -> list[ParamGroup]:
    if len({group.mesh for group in unit.groups}) > 1:
        raise ValueError(
            f"{method} is not supported with multiple param groups: the parameters of this unit lie on several meshes; "
            "make a unit of each"
        )
    return unit.groups


def _checked_comm(method: str, comm: Any) -> Any:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(f"{method}: needs an object that can be called and has allocate(), not a {type(comm).__name__}")
    return comm


_CLASSES: dict[tuple[type, bool], type] = {}


def unit_class(cls: type, methods_for: Callable[[type], dict[str, Any]] | None = None, rows: bool = False) -> type:
    """The class of a unit made of a module of class ``cls``. ``methods_for``: of that, what units do otherwise.

    ``rows``: of an embedding, whose own forward ends in a look-up by rows.
    """
    if (cls, rows) not in _CLASSES:
        own = () if rows and cls is nn.Embedding else (cls,)
        bases = (FSDPModule, *own, RowEmbedding) if rows else (FSDPModule, *own)
        made = type(f"FSDP{cls.__name__}", bases, {} if methods_for is None else methods_for(cls))
        _CLASSES.setdefault((cls, rows), made)
    return _CLASSES[cls, rows]
