"""Policies that a user chooses: precision, offloading, placements of weights, gradients and state, and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _arguments, _torch
from flatshard.layout import Flat, Partial, Placement, Replicate, is_sharded


class Refusal(ValueError, AssertionError):
    """A wrong argument for which FSDP2 raises AssertionError, so that code written for FSDP2 catches it."""


class Unsupported(ValueError, NotImplementedError):
    """A wrong argument for which FSDP2 raises NotImplementedError."""


GatherFormat: TypeAlias = Literal["int8", "float8"]
ReduceFormat: TypeAlias = Literal["int8", "bf16_fp32"]


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """The dtypes of a unit. ``None`` changes nothing. A subclass of PyTorch's class of this name.

    ``param_dtype``: dtype of the compute weights, in which forward, backward and all-gather run.
    ``reduce_dtype``: dtype in which gradients are reduced; default: as FSDP2 of the installed torch, ``param_dtype``
    before torch 2.15 and ``grad_dtype`` since.
    ``output_dtype``: floating-point outputs of the unit's forward are cast to it.
    ``cast_forward_inputs``: floating-point inputs of the forward are cast to ``param_dtype``.
    ``param_dtype_override_fn``: a function of a parameter, called when it is sharded; if it returns the parameter's own
    dtype, that is the dtype of its compute weights, and if it returns None, ``param_dtype`` is. (Of torch 2.15.)
    ``main_dtype``: dtype of the main weights (optimizer, checkpoints); default: the dtype of the parameter.
    ``grad_dtype``: dtype of the reduced gradients (``.grad``) of parameters that have no ``grad_dtype`` of their own;
    default: ``main_dtype``.

    Formats send fewer bytes than these dtypes (docs/formats.md). The default is none:

    ``gather_format``: weights are sent as one byte per element, ``"int8"`` or ``"float8"`` (e4m3), with a scale per
    block. They are encoded once per optimizer step from the main weights, and decoded to ``param_dtype``. ``"auto"``:
    the third step is measured, and from the next one on, units whose all-gathers compute waits for use ``"int8"``.
    ``reduce_format``: gradients are sent as ``"int8"`` with a scale per block, or in bfloat16 (``"bf16_fp32"``). Both
    are added in float32, in the order of ranks, without further rounding. A pair gives the formats of the two axes of a
    mesh, (outer, inner); a single format is for the sharded axis.
    ``block``: how many elements of a row share a scale: a power of two.
    ``stochastic``: round int8 gradients up or down at random, so that their mean is exact.
    ``encodes``: a function of a parameter's name, relative to its unit, and the parameter; it returns whether the
    parameter is sent as one byte per element. Default: matrices are, except embeddings, heads, routers and small ones.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    gather_format: GatherFormat | Literal["auto"] | None = None
    reduce_format: ReduceFormat | tuple[ReduceFormat | None, ReduceFormat | None] | None = None
    block: int = 128
    stochastic: bool = False
    # Not in the repr, which ranks compare: a function's differs between them. They compare what it returned instead.
    encodes: Callable[[str, nn.Parameter], bool] | None = field(default=None, repr=False)
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "main_dtype", "grad_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"MixedPrecisionPolicy({name}={value!r}): must be a floating-point torch.dtype or None")
        for name in ("cast_forward_inputs", "stochastic"):
            _arguments.flag(name, getattr(self, name))
        gathers, reduces = (get_args(kind) for kind in (GatherFormat, ReduceFormat))
        if self.gather_format not in (*gathers, "auto", None):
            raise ValueError(f"gather_format={self.gather_format!r}: must be one of {', '.join(gathers)}, auto or None")
        given = self.reduce_format
        for each in given if isinstance(given, tuple) else (given,):
            if each is not None and each not in reduces:
                raise ValueError(f"reduce_format={given!r}: must be {' or '.join(reduces)}, None, or a pair of these")
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(f"reduce_format={given!r}: a tuple must have two formats, (outer, inner)")
        _arguments.whole_number("block", self.block, 16)
        if self.block & (self.block - 1) or self.block > 1024:
            raise ValueError(f"block={self.block}: must be a power of two from 16 to 1024")
        for name, of in (("encodes", "a name and a parameter"), ("param_dtype_override_fn", "a parameter")):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be a function of {of}, or None")

    def reduce_formats(self, axes: int) -> tuple[ReduceFormat | None, ...]:
        """The reduce format of each axis of a mesh with ``axes`` axes."""
        given = self.reduce_format if isinstance(self.reduce_format, tuple) else (None, self.reduce_format)
        return (None,) * (axes - 2) + given[-axes:] if axes else ()

    @property
    def has_formats(self) -> bool:
        return self.gather_format is not None or self.reduce_format not in (None, (None, None))

    def keeps_dtype(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether `param_dtype_override_fn` lets a parameter compute in its own dtype instead of ``param_dtype``."""
        dtype = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(parameter)
        if dtype not in (None, self.param_dtype, parameter.dtype):
            raise ValueError(
                f"param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype; for "
                f"'{name}' of {parameter.dtype} it returned {dtype!r}, and param_dtype is {self.param_dtype}"
            )
        return dtype is not None and self.param_dtype not in (None, dtype)

    def of_group(self, keeps_dtype: bool, grad_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """The policy of parameters that compute in their own dtype, or of the others; ``grad_dtype``: set on them."""
        if not keeps_dtype and grad_dtype is None and self.param_dtype_override_fn is None:
            return self
        param_dtype = None if keeps_dtype else self.param_dtype
        return replace(
            self, param_dtype=param_dtype, grad_dtype=grad_dtype or self.grad_dtype, param_dtype_override_fn=None
        )

    # Dtypes of one parameter group. ``own`` is the dtype that its parameters had before sharding.

    def compute_of(self, own: torch.dtype) -> torch.dtype:
        """The dtype of compute weights."""
        return self.param_dtype if self.param_dtype is not None and own.is_floating_point else own

    def grad_of(self, main: torch.dtype, compute: torch.dtype) -> torch.dtype:
        """The dtype of reduced gradients."""
        return self.grad_dtype or main

    def reduce_of(self, compute: torch.dtype, grad: torch.dtype) -> torch.dtype:
        """The dtype of a reduce."""
        return self.reduce_dtype or (grad if _torch.REDUCES_IN_GRAD_DTYPE else compute)

    def resting_of(self, grad: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """The dtype in which backwards accumulate gradients that are not reduced all the way yet: the wider one."""
        return reduce if reduce.itemsize > grad.itemsize else grad


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep main weights, gradients and optimizer state on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep main weights, gradients and optimizer state in host memory.

    Weights are copied to the device for each gather. Gradients are reduced on the device and copied back; they are
    complete when the backward returns. ``pin_memory``: use page-locked memory, so that copies overlap compute.
    ``pin_limit``: bytes that this process pins at most; the host waits for copies of what is not pinned. The policy has
    no effect on a mesh of CPUs.

    ``device_grad_bytes``: bytes of reduced gradients that may stay on the device until they are zeroed, instead of
    being copied. `clip_grad_norm_` and `fully_shard_optimizer` use them there, and the optimizer then steps on the
    device, also a fused one. Reading a ``.grad`` copies all of them.
    """

    pin_memory: bool = True
    pin_limit: int | None = None
    device_grad_bytes: int = 0

    def __post_init__(self) -> None:
        _arguments.flag("pin_memory", self.pin_memory)
        if self.pin_limit is not None:
            _arguments.whole_number("pin_limit", self.pin_limit, 0)
        _arguments.whole_number("device_grad_bytes", self.device_grad_bytes, 0)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel axes of a mesh of all parallelism.

    ``shard``: axes that parameters are sharded over. ``replicate``: axes of replicas. Several axes of one kind are used
    as one. With ``replicate`` alone nothing is sharded, and gradients are averaged.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None
    shard_names = property(lambda self: _names(self.shard))
    replicate_names = property(lambda self: _names(self.replicate))

    def __post_init__(self) -> None:
        for name, given in (("shard", self.shard), ("replicate", self.replicate)):
            if not all(isinstance(each, str) for each in _names(given)):
                wrong = f"DataParallelMeshDims({name}={given!r})"
                raise TypeError(f"{wrong}: must be the name of an axis, or a tuple of names")
        twice = set(self.shard_names) & set(self.replicate_names)
        if twice:
            raise ValueError(f"DataParallelMeshDims: {min(twice)!r} is in both shard and replicate; use one of them")
        if not self.shard_names and not self.replicate_names:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")


def _names(given: Any) -> tuple[str, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else () if given is None else (given,)


@dataclass(frozen=True)
class Sharding:
    """How one parameter is sharded; a ``shard_placement_fn`` may return it.

    ``dim``: the dim to shard, as torch.chunk does. None: dim 0, or another dim if dim 0 would need much padding, for
    example stacked experts ``(experts, in, out)`` with fewer experts than ranks.
    ``mesh``: the mesh to shard the parameter over, if it is not the unit's. The gradient is still the mean over the
    ranks of the unit's ``data_mesh``, because their data reaches the parameter.
    ``apart``: a mesh of one axis whose ranks hold different plain tensors of one shape under this name, for example the
    experts ``(experts, ...)`` of each rank of expert parallelism. The forward sees this rank's tensor. For norms, state
    dicts and checkpoints all of them are one tensor, concatenated on dim 0.
    """

    dim: int | None = None
    mesh: DeviceMesh | None = None
    apart: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and (not isinstance(self.dim, int) or isinstance(self.dim, bool)):
            raise TypeError(f"Sharding(dim={self.dim!r}): must be an int or None")
        _check_meshes("Sharding", self.mesh, self.apart)


@dataclass(frozen=True)
class Experts:
    """The experts of a model and the mesh to shard them over, for `shard_model`.

    ``modules``: classes, or their import paths, whose instances hold only parameters of experts.
    ``mesh``: the ranks that hold the same experts; they are sharded over it.
    ``apart``: a mesh whose ranks hold different experts as plain tensors, as in `Sharding`. Not needed if the experts
    are DTensors.
    """

    modules: Sequence[type[nn.Module] | str]
    mesh: DeviceMesh
    apart: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.modules, (list, tuple)) or not self.modules:
            raise ValueError(f"Experts(modules={self.modules!r}): must be a list of classes or import paths, not empty")
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(f"Experts(mesh={self.mesh!r}): must be a DeviceMesh")
        _check_meshes("Experts", self.mesh, self.apart)


def _check_meshes(what: str, mesh: Any, apart: Any) -> None:
    """Raise if these cannot be the ``mesh`` and ``apart`` of a parameter."""
    for name, given in (("mesh", mesh), ("apart", apart)):
        if given is not None and not isinstance(given, DeviceMesh):
            raise TypeError(f"{what}({name}={given!r}): must be a DeviceMesh")
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(f"{what}: mesh has {mesh.ndim} axes; it must have one (shard) or two (outer, inner)")
    if apart is not None and apart.ndim != 1:
        raise ValueError(f"{what}: apart has {apart.ndim} axes; it must have one")


# Policies of PyTorch, which callers may pass too.
_OWN = {
    torch_fsdp.MixedPrecisionPolicy: MixedPrecisionPolicy,
    torch_fsdp.OffloadPolicy: OffloadPolicy,
    torch_fsdp.CPUOffloadPolicy: CPUOffloadPolicy,
    getattr(torch_fsdp, "DataParallelMeshDims", None): DataParallelMeshDims,  # since torch 2.13
}


def own_policy(given: Any) -> Any:
    """``given``; a policy of PyTorch is converted to the one of this module."""
    kind = _OWN.get(type(given))
    return given if kind is None else kind(**{field.name: getattr(given, field.name) for field in fields(given)})


@dataclass(frozen=True)
class Placements:
    """The placements of the three buffers of a parameter group, one placement per axis of the mesh.

    ``parameter``: compute weights between their uses. ``gradient``: gradients between a backward and the optimizer
    step. ``optimizer``: main weights and optimizer state.
    """

    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            if not isinstance(given, tuple) or not all(isinstance(p, get_args(Placement)) for p in given):
                raise TypeError(f"Placements({name}={given!r}): must be a tuple of flatshard.layout placements")
            cut = [is_sharded(p) for p in given]
            if cut != sorted(cut):
                raise ValueError(f"Placements({name}={given!r}): an axis is sharded but a later one is not; swap them")
        axes = {len(given) for given in vars(self).values()}
        if len(axes) != 1:
            raise ValueError(f"Placements: parameter, gradient and optimizer have different lengths: {sorted(axes)}")
        for axis, (parameter, gradient, optimizer) in enumerate(zip(self.parameter, self.gradient, self.optimizer)):
            reason = ""
            if isinstance(parameter, Partial) or isinstance(optimizer, Partial):
                reason = "has Partial for parameter or optimizer; only gradient can be Partial"
            elif not is_sharded(optimizer) and (is_sharded(parameter) or is_sharded(gradient)):
                reason = "shards parameter or gradient but not optimizer, which would update weights that the rank "
                reason += "does not hold; use Flat() for optimizer too"
            elif isinstance(gradient, Replicate) and is_sharded(optimizer):
                reason = "has Replicate for gradient; use Partial() or Flat()"
            if reason:
                raise ValueError(f"Placements: axis {axis} {reason}")


Strategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

# Which buffers a strategy shards on an axis: parameter, gradient, optimizer. The order gives the strategy's number.
_SHARDED: dict[str, tuple[bool, bool, bool]] = {
    "no_shard": (False, False, False),
    "optim": (False, False, True),
    "optim_grads": (False, True, True),
    "optim_grads_params": (True, True, True),
}
_OUTER = ("no_shard", "optim")


def placements_for(strategy: Strategy | int | Placements | None, outer: Strategy | int | None, axes: int) -> Placements:
    """The placements of a strategy on a mesh of one axis, or of two (outer, inner).

    ``strategy`` (default ``optim_grads_params``) is for the last axis, ``outer`` (default ``no_shard``) for the first.
    """
    if isinstance(strategy, Placements):
        if len(strategy.parameter) != axes:
            raise ValueError(f"strategy: Placements have {len(strategy.parameter)} axes, but the mesh has {axes}")
        if outer is not None:
            raise ValueError("outer_strategy: strategy=Placements(...) already says it; leave one of the two out")
        return strategy
    if outer is not None and axes == 1:
        raise ValueError(f"outer_strategy={outer!r} needs a mesh of two axes (outer, inner)")
    name = "optim_grads_params" if strategy is None else strategy_name("strategy", strategy)
    outer_name = "no_shard" if outer is None else strategy_name("outer_strategy", outer, _OUTER)
    if outer_name == "optim" and name != "optim_grads_params":
        raise ValueError(f"outer_strategy='optim' needs strategy='optim_grads_params', not {name!r}")
    unsharded: tuple[Placement, ...] = (Replicate(), Partial("avg"), Replicate())
    by_axis = [
        [Flat() if sharded else other for sharded, other in zip(_SHARDED[each], unsharded)]
        for each in (outer_name, name)[-axes:]
    ]
    parameter, gradient, optimizer = zip(*by_axis)
    return Placements(parameter, gradient, optimizer)


def on_another_mesh(
    strategy: Strategy | int | Placements | None, outer: Strategy | int | None, axes: int
) -> Placements:
    """The placements of a strategy on a mesh whose number of axes may differ from that of the unit's mesh."""
    if isinstance(strategy, Placements) and axes < len(strategy.parameter):
        return Placements(strategy.parameter[-axes:], strategy.gradient[-axes:], strategy.optimizer[-axes:])
    return placements_for(strategy, outer if axes > 1 else None, axes)


def strategy_name(what: str, given: str | int, names: tuple[str, ...] = tuple(_SHARDED)) -> str:
    """The name of a strategy that is given by name or number. ``what``: the name of the argument, for errors."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        return names[given]
    if given not in names:
        raise ValueError(f"{what}={given!r}: must be one of {', '.join(names)} or their numbers 0 to {len(names) - 1}")
    assert isinstance(given, str)
    return given


def resident(placements: Placements) -> Placements:
    """The same placement of optimizer state, with replicated weights: nothing is gathered during a pass."""
    return replace(replicated(len(placements.parameter)), optimizer=placements.optimizer)


def replicated(axes: int) -> Placements:
    """Everything is replicated; gradients are reduced in the last micro-batch."""
    rest = (Replicate(),) * axes
    return Placements(rest, (Partial("avg"),) * axes, rest)


SEPARATE_GROUPS = True  # the default of SchedulePolicy.separate_groups (decision 002)


@dataclass(frozen=True)
class SchedulePolicy:
    """How far communication runs ahead. Given to the root, it applies to all units below it.

    ``prefetch``: gather the next units ahead, in the recorded order. False: gather each unit when it is needed.
    ``async_reduce``: let reduces overlap compute. False: wait for each reduce where it is launched.
    ``max_gathered``: how many units are gathered at a time (the one in use and prefetched ones), not counting units
    that are kept and units on another mesh than the root's (experts in a block); at least 1.
    ``max_gathered_bytes``: prefetch further units while all gathered weights, including kept ones, take at most this
    many bytes. It helps if units differ in size: several small ones can be gathered around a large one. With a
    ``gather_format``, prefetched units count with the bytes that are sent.
    ``max_reducing``: how many reduces, with the full-size gradients that they read, are in flight; at least 1.
    ``separate_groups``: use separate process groups for reduces, so that they can overlap gathers, which use those of
    the mesh. None: `SEPARATE_GROUPS`, and always True for models with optional units, which need it.
    ``keep_for_backward``: bytes of gathered weights that units with ``reshard_after_forward="auto"`` may keep from
    forward to backward. Those that save the most communication time per byte are kept; `summary` lists them.
    ``keep_for_next``: bytes of gathered weights that may be kept from the backward of one micro-batch to the forward of
    the next, within `microbatch(is_last=False)`, or be gathered at the end of that backward if it did not need them
    (embeddings). The forward frees this memory as activations grow, so it seldom adds to the peak.
    """

    prefetch: bool = True
    async_reduce: bool = True
    max_gathered: int = 2
    max_gathered_bytes: int = 0
    max_reducing: int = 2
    separate_groups: bool | None = None
    keep_for_backward: int = 0
    keep_for_next: int = 0

    def __post_init__(self) -> None:
        for name in ("max_gathered_bytes", "keep_for_backward", "keep_for_next"):  # bytes
            _arguments.whole_number(name, getattr(self, name), 0)
        for name in ("max_gathered", "max_reducing"):
            _arguments.whole_number(name, getattr(self, name), 1)
        for name in ("prefetch", "async_reduce"):
            _arguments.flag(name, getattr(self, name))
        if self.separate_groups is not None:
            _arguments.flag("separate_groups", self.separate_groups)

    def check(self, mesh: DeviceMesh) -> None:
        """Raise if the policy cannot be used for units on a mesh."""

    def connect(self, lane: Any, pool: Any, meshes: Sequence[DeviceMesh]) -> None:
        """Prepare a lane and its pool for the process groups of these meshes, before the first pass. Collective."""
